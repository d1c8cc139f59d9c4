"""The programs of the README and of the reference run as printed."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fshard as fs
from fshard.testing import assert_trees_close, spmd
from tests.ranks import on_ranks
from tests.test_guide import README, REFERENCE, section
from tests.trees import assert_same_bits

BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
PROGRAM, FOUR_VERBS, OPTIMIZERS, STATE, TRANSFORMS, TESTING = BLOCK.findall(README.read_text())
# The program up to its loop, and that with the eager step.
SETUP = PROGRAM.split("train, test = ")[0]
EAGER = SETUP.replace("@fs.jit", "")


def blocks(heading: str) -> list[str]:
    """The programs of one section of the reference."""
    return BLOCK.findall(section(REFERENCE, heading))


((UNITS,), (SAME_BITS,)) = map(blocks, ("Units of a plain function", "The same bits at any number of ranks"))


def rows_of(scope: dict[str, Any]) -> torch.Tensor:
    """The first rows of this rank."""
    return scope["data"].chunk(scope["mesh"].size())[scope["mesh"].get_rank()][:4]


@pytest.mark.rows(1)
@on_ranks(1, 2)
def test_the_first_program_trains_and_evaluates(capsys):
    scope = {}
    exec(PROGRAM.replace("range(200)", "range(2)"), scope)
    assert int(scope["state"].step) == 2
    return scope["loss"].item()


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


@on_ranks(1, 2)
def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    text = STATE.replace('"runs/gpt"', repr(str(tmp_path))).replace("every=100", "every=2")
    scope = {"GPT": lambda width, layers: nn.Sequential(*(scope["Block"]() for _ in range(layers)))}
    exec(EAGER, scope)
    scope["batches"] = [rows_of(scope)] * 5
    first = scope["state"]
    exec(text, scope)
    assert fs.checkpoint.latest_step(tmp_path) == 4
    there = scope["state"]
    scope |= {"state": first, "batches": scope["batches"][:1]}
    exec(text, scope)
    assert_trees_close(scope["state"], there, exact=True)


@on_ranks(1, 2)
def test_units_of_a_plain_function(world_size):
    draw = torch.Generator().manual_seed(0)
    blocks = [{"weight": torch.randn(8, 8, generator=draw), "bias": torch.randn(8, generator=draw)} for _ in range(3)]
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    x = torch.linspace(-1.0, 1.0, 16).reshape(2, 8)
    params = fs.shard({"blocks": blocks}, fs.zero3(mesh, min_shard_elements=0, bucket_bytes=0))
    scope = {"torch": torch, "fs": fs, "params": params, "x": x}
    with fs.comm.record() as record:
        exec(UNITS, scope)
    # Of three, the last stays for the backward, and the others are gathered again.
    assert sum(entry.label == "gather" for entry in record) == (5 if world_size > 1 else 0)
    expected = torch.func.grad(scope["loss_fn"])({"blocks": blocks}, x)
    assert_same_bits(fs.unshard(scope["grads"]), expected)


def test_gradients_have_the_same_bits_at_any_number_of_ranks():
    data = torch.randint(7, (40, 2, 3), generator=torch.Generator().manual_seed(1))

    def program():
        scope = {}
        exec(EAGER, scope)
        scope |= {"key": 1, "step": 3, "data": data}
        apply = scope["model"].apply

        def loss_fn(params, microbatch):
            index, samples = microbatch
            x, y = samples.unbind(1)
            return F.cross_entropy(apply(params, x).flatten(0, 1), y.flatten()) * (1 + index)

        scope["loss_fn"] = loss_fn
        exec(SAME_BITS, scope)
        return scope["loss"], fs.unshard(fs.update(scope["tx"], scope["state"], scope["grads"]).params)

    found = [spmd(program, ranks)[0] for ranks in (1, 2, 4)]
    assert_trees_close(found[1:], found[:1] * 2, exact=True)


def test_testing_tools_are_there():
    exec("\n".join(line for line in TESTING.splitlines() if line.startswith("from ")))
