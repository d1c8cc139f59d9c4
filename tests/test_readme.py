"""The programs of the README run as printed."""

import re
from typing import Any

import pytest
import torch

from fshard.testing import assert_trees_close
from tests.ranks import on_ranks
from tests.test_guide import README

BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
FOUR_VERBS, PROGRAM = BLOCK.findall(README.read_text())
# The program up to its loop, and that with the eager step.
SETUP = PROGRAM.split("train, test = ")[0]
EAGER = SETUP.replace("@fs.jit", "")


def rows_of(scope: dict[str, Any]) -> torch.Tensor:
    """The first rows of this rank."""
    return scope["data"].chunk(scope["mesh"].size())[scope["mesh"].get_rank()][:4]


def test_the_first_program_is_that_of_the_first_page():
    """Which `test_pages.py` runs on two ranks."""
    assert f"```python\n{PROGRAM}```" in (README.parent / "docs/start.md").read_text()


@pytest.mark.rows(1)
@on_ranks(1, 2)
def test_both_train_steps_and_the_jitted_one_give_the_same_bits():
    scopes = []
    for text in (SETUP, EAGER, EAGER + FOUR_VERBS):
        scopes.append(scope := {})
        exec(text, scope)
        scope["state"], scope["loss"] = scope["train_step"](scope["state"], rows_of(scope))
    results = [{"loss": scope["loss"], "state": scope["state"]} for scope in scopes]
    assert_trees_close(results[1:], results[:1] * 2, exact=True)
    return results[0]["loss"].item()
