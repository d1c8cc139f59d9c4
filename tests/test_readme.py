"""The programs of the README and of the reference run as printed."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fshard as fs
from fshard.testing import assert_trees_close, spmd
from tests.ranks import on_ranks
from tests.test_processes import TORCHRUN, run

ROOT = Path(__file__).parents[1]
README, REFERENCE = ROOT / "README.md", ROOT / "examples/REFERENCE.md"
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
PROGRAM, FOUR_VERBS, OPTIMIZERS, STATE, TRANSFORMS, TESTING = BLOCK.findall(README.read_text())
# The program up to its loop, and that with the eager step.
SETUP = PROGRAM.split("train, test = ")[0]
EAGER = SETUP.replace("@fs.jit", "")


def blocks(heading: str) -> list[str]:
    """The programs of one section of the reference."""
    return BLOCK.findall(REFERENCE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0])


((UNITS,), (SAME_BITS,), (GO_ON, BAD_SAMPLE, NO_ROWS)) = map(
    blocks, ("Units of a plain function", "The same bits at any number of ranks", "When a rank fails")
)


def rows_of(scope: dict[str, Any]) -> torch.Tensor:
    """The first rows of this rank."""
    return scope["data"].chunk(scope["mesh"].size())[scope["mesh"].get_rank()][:4]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ([sys.executable], [*TORCHRUN, 2]))
def test_the_first_program_runs_as_pasted(launcher, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    said = re.findall(r"loss ([\d.]+), of bytes it was not trained on ([\d.]+)", run(*launcher, script))
    assert len(said) == (1 if len(launcher) == 1 else 2)
    assert len(set(said)) == 1
    assert max(map(float, said[0])) < 3.5  # nothing learned is log(256), 5.5


@on_ranks(1, 2)
def test_the_first_program_trains_and_evaluates(capsys):
    scope = {}
    exec(PROGRAM.replace("range(200)", "range(2)"), scope)
    assert int(scope["state"].step) == 2
    return scope["loss"].item()


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


def weighted(params, rows):
    return (rows @ fs.gather(params)["w"]).sum(), torch.tensor(float(len(rows)))


@on_ranks(2, "2 processes")
def test_training_goes_on_behind_a_failure_in_the_same_processes():
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    seen = []

    def train_step(state, batch):
        def loss_fn(params):
            w = fs.gather(params)["w"]
            if batch < 0 and mesh.get_rank() == 1:
                raise ValueError("bad sample 17")
            return batch * w.sum()

        loss, grads = fs.value_and_grad(loss_fn)(state.params)
        seen.append(loss.item())
        return fs.update(fs.sgd(0.5), state, grads), loss

    state = fs.TrainState.create(fs.shard({"w": torch.ones(4)}, fs.zero3(mesh)), fs.sgd(0.5))
    exec(GO_ON, {"fs": fs, "train_step": train_step, "state": state, "batches": [1, -1, 1, -1, 1]})
    assert seen == [4.0, 2.0, 0.0]


@on_ranks(1, 2)
def test_ranks_decide_together_to_leave_out_a_step():
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    params = fs.shard({"w": torch.ones(4)}, fs.zero3(mesh))
    scope = {"torch": torch, "fs": fs, "mesh": mesh, "params": params, "loss_fn": weighted}
    good, bad = torch.ones(3, 4), torch.full((3, 4), torch.nan)
    first = mesh.get_rank() == 0
    exec(BAD_SAMPLE, scope | {"rows": bad if first else good}, left_out := {})
    assert "loss" not in left_out
    exec(BAD_SAMPLE, scope | {"rows": good}, taken := {})
    assert taken["loss"].item() == 4.0
    # The first rank's data end one step before the others'.
    batches = iter([good] * (1 if first else 2))
    scope |= {"axis": fs.axis_of(mesh, "shard"), "batches": batches}
    losses = []
    for _ in range(3):
        scope.pop("loss", None)
        exec(NO_ROWS, scope)
        losses.append(scope["loss"].item() if "loss" in scope else None)
    assert losses == [4.0, 4.0 if mesh.size() > 1 else None, None]


@on_ranks(1, 2)
def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    text = STATE.replace('"runs/gpt"', repr(str(tmp_path))).replace("every=100", "every=2")
    scope = {"GPT": lambda width, layers: nn.Sequential(*(scope["Block"]() for _ in range(layers)))}
    exec(EAGER, scope)
    scope["batches"] = [rows_of(scope)] * 5
    first = scope["state"]
    exec(text, scope)
    assert fs.checkpoint.latest(tmp_path) == 4
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
    params = fs.shard({"blocks": blocks}, fs.zero3(mesh, min_shard_elements=0, merge_bytes=0))
    scope = {"torch": torch, "fs": fs, "params": params, "x": x}
    with fs.comm.record() as record:
        exec(UNITS, scope)
    # Of three, the last stays for the backward, and the others are gathered again.
    assert sum(entry.label == "gather" for entry in record) == (5 if world_size > 1 else 0)
    expected = torch.func.grad(scope["loss_fn"])({"blocks": blocks}, x)
    assert_trees_close(fs.unshard(scope["grads"]), expected, rtol=1e-5, atol=1e-7)


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
