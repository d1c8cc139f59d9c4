"""The reports that the page "Find the NaN" prints are those of its program."""

import re

import pytest
import torch

import fshard as fs
from fshard.testing import spmd
from tests.ext.replay.inject import Fault, watching
from tests.ext.replay.reuse import reusing_traces
from tests.test_pages import DOCS, SETUP, program_of

PAGE = DOCS / "how_to/find_the_nan.md"
TEXT = re.compile(r"^```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)
RANKS = 2


def show(text):
    """Write a report with files as a reader would call them."""
    return text.replace(PAGE.name, "train.py").replace(SETUP.name, "model.py")


def verify_with_a_flipped_bit(scope):
    """Flip a bit of what the first gelu of the last rank returns, in one of two runs."""
    step, state = scope["train_step"], scope["state"]
    batch = scope["batch"], torch.ones(4, scope["TIME"])
    with watching() as recording:
        step(state, batch)
    call = next(record.call for record in recording.records if record.call.place == "gelu")
    if scope["mesh"].get_rank() != RANKS - 1:
        return str(fs.verify(step, state, batch))
    with watching(Fault(call, "bit", element=5, per_step=1)):
        return str(fs.verify(step, state, batch))


# As other pages of which each trace takes seconds. Texts of such reports are those of the tests beside this one.
@pytest.mark.slow
def test_the_reports_of_the_page(capsys):
    setup = compile(SETUP.read_text(), str(SETUP), "exec")
    program = compile(program_of(PAGE), str(PAGE), "exec")

    def run():
        scope = {"__name__": "page"}
        exec(setup, scope)
        exec(program, scope)
        return verify_with_a_flipped_bit(scope)

    with reusing_traces():
        flipped, *others = spmd(run, RANKS)
    assert others == [flipped]
    printed = capsys.readouterr().out
    nan, of_verify, of_diff = TEXT.findall(PAGE.read_text())
    assert of_verify == show(f"{flipped}\n")
    assert show(printed) == nan + of_diff
