"""The README's programs run as printed."""

import math
import re
import sys
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fshard as fs
from fshard.testing import assert_trees_close, check_transform, spmd
from tests.ranks import on_ranks

README = (Path(__file__).parents[1] / "README.md").read_text()
TRAIN_STEP, FOUR_VERBS, UNITS, SAME_BITS, MORE_AXES, OPTIMIZERS, JIT, STATE, TRANSFORMS, TESTING, AHEAD = re.findall(
    r"```python\n(.*?)```", README, flags=re.DOTALL
)


class Batch(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


MODULE = nn.Sequential(nn.Embedding(7, 300), nn.Linear(300, 7))
NAMES = {"torch": torch, "F": F, "module": MODULE, "Block": nn.Linear, "dataclass": dataclass, "fs": fs}


def batch_of(seed):
    generator = torch.Generator().manual_seed(seed)
    return Batch(*torch.randint(7, (2, 2, 3), generator=generator))


@pytest.mark.rows(1)
@on_ranks(1, 2)
def test_both_train_steps_give_the_same_bits():
    scope = dict(NAMES)
    exec(TRAIN_STEP, scope)
    batch = batch_of(scope["mesh"].get_rank())
    state, loss = scope["train_step"](scope["state"], batch)
    eager = scope["train_step"]
    exec(FOUR_VERBS, scope)
    again, loss_again = scope["train_step"](scope["state"], batch)
    assert_trees_close({"loss": loss, "state": state}, {"loss": loss_again, "state": again}, exact=True)
    scope["train_step"] = eager
    exec(JIT, scope)
    # A copy, because the jitted step takes its memory.
    jitted, loss_again = scope["train_step"](fs.tree_map(torch.clone, scope["state"]), batch)
    assert_trees_close({"loss": loss, "state": state}, {"loss": loss_again, "state": jitted}, exact=True)
    assert int(state.step) == 1
    return loss.item()


def test_a_step_is_planned_held_to_a_budget_and_traced(tmp_path, capsys):
    def program():
        scope = {**NAMES, "batch": batch_of(0)}
        exec(TRAIN_STEP, scope)
        exec(AHEAD.replace("step.json", str(tmp_path / f"{scope['mesh'].get_rank()}.json")), scope)

    spmd(program, 2)
    assert len(list(tmp_path.glob("*.json"))) >= 1
    assert "parameters" in capsys.readouterr().out


@on_ranks(1, 2)
def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    class GPT(nn.Sequential):
        def __init__(self, width, layers):
            super().__init__(nn.Embedding(7, width), *(nn.Linear(width, width) for _ in range(layers)))

    text = STATE.replace('"runs/gpt"', repr(str(tmp_path))).replace("every=100", "every=2")
    scope = {**NAMES, "GPT": GPT, "batches": [batch_of(0)] * 5}
    exec(TRAIN_STEP, scope)
    first = scope["state"]
    exec(text, scope)
    assert fs.checkpoint.latest(tmp_path) == 4
    there = scope["state"]
    scope |= {"state": first, "batches": [batch_of(0)]}
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
    # Of three, the first, whose input needs no gradient, is not gathered again, and the others stay for the backward.
    assert sum(entry.label == "gather" for entry in record) == (3 if world_size > 1 else 0)
    expected = torch.func.grad(scope["loss_fn"])({"blocks": blocks}, x)
    assert_trees_close(fs.unshard(scope["grads"]), expected, rtol=1e-5, atol=1e-7)


def test_gradients_have_the_same_bits_at_any_number_of_ranks():
    data = torch.randint(7, (40, 2, 3), generator=torch.Generator().manual_seed(1))

    def program():
        scope = {**NAMES, "key": 1, "step": 3, "data": data}
        exec(TRAIN_STEP, scope)
        apply = scope["model"].apply

        def loss_fn(params, samples, index):
            x, y = samples.unbind(1)
            return F.cross_entropy(apply(params, x).flatten(0, 1), y.flatten()) * (1 + index)

        scope["loss_fn"] = loss_fn
        exec(SAME_BITS, scope)
        return scope["loss"], fs.unshard(fs.update(scope["tx"], scope["state"], scope["grads"]).params)

    found = [spmd(program, ranks)[0] for ranks in (1, 2, 4)]
    assert_trees_close(found[1:], found[:1] * 2, exact=True)


@on_ranks(2)
def test_functions_over_more_axes():
    mesh = fs.init_mesh({name: -1 if name == "expert" else 1 for name in ("pipe", "cp", "tp", "expert")}, "cpu")
    scope = {"fs": fs} | {name: fs.axis_of(mesh, name) for name in mesh.mesh_dim_names}
    scope["x"], scope["router"] = torch.ones(6, 4), torch.ones(4, 2)
    scope["q"] = scope["k"] = scope["v"] = torch.ones(1, 2, 6, 4)
    scope["h"], scope["weight"], scope["targets"] = torch.ones(3, 4), torch.zeros(5, 4), torch.tensor([0, 3, 4])
    scope["stage"], scope["embed"] = lambda params, h: h * fs.tree_leaves(params)[0], lambda params, x: x.double()
    scope["head"] = lambda params, h: h.square().mean()
    exec(MORE_AXES, scope)
    assert scope["loss"].item() == pytest.approx(math.log(5))
    assert scope["mixed"].shape == (1, 2, 6, 4)
    # Each of 6 tokens goes to both experts, one of which each rank has.
    assert sum(len(rows) for rows in scope["rows"]) == 12
    params = fs.shard({"w": torch.full((1,), 3.0, dtype=torch.float64)}, fs.zero3(mesh, "expert"))
    value, grads = fs.value_and_grad(scope["loss_fn"])(params, torch.ones(8, 1))
    assert (value.item(), fs.unshard(grads)["w"].item()) == (9.0, 6.0)


@pytest.mark.parametrize("world_size", [1, 2])
def test_optimizers_of_groups_train(world_size):
    block = nn.Sequential(OrderedDict(norm=nn.LayerNorm(8), linear=nn.Linear(8, 8)))
    module = nn.Sequential(
        OrderedDict(embedding=nn.Embedding(7, 8), blocks=nn.ModuleList([block]), head=nn.Linear(8, 7))
    )
    full = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}

    def program():
        scope = {"torch": torch, "fs": fs}
        exec(OPTIMIZERS, scope)
        strategy = fs.zero3(fs.init_mesh({"shard": -1}, device="cpu"), min_shard_elements=0)
        state = fs.TrainState.create(fs.shard(full, strategy), scope["tx"])
        grads = fs.shard({name: torch.ones_like(value) for name, value in full.items()}, strategy)
        for _ in range(3):
            state = fs.update(scope["tx"], state, grads, donate=True)
        return fs.unshard(state.params), fs.unshard(state.opt_state.average)

    for params, average in spmd(program, world_size):
        assert all(not params[name].equal(full[name]) for name in full)
        assert all(not average[name].equal(params[name]) for name in full)


@on_ranks(4)
def test_transforms_hold_their_laws(monkeypatch):
    mesh = fs.init_mesh({"shard": 2, "tp": 2}, device="cpu")
    # A module of each rank's own, from which its class can be pickled.
    module = ModuleType(f"readme_of_rank_{mesh.get_rank()}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    scope = module.__dict__
    scope |= {"torch": torch, "fs": fs, "dataclass": dataclass, "mesh": mesh}
    exec(TRANSFORMS, scope)
    check_transform(scope["narrow"], [(64, 64), (5,)], error=2**-8)
    check_transform(scope["small"], [(64, 64), (5,)], error=1 / 200)
    params = fs.shard({"w": torch.ones(5, 3)}, scope["mixed"])
    assert fs.gather(params)["w"].dtype is torch.bfloat16
    assert fs.value_and_grad(lambda p: fs.gather(p)["w"].float().sum())(params)[1]["w"].local.dtype is torch.float32


def test_testing_tools_are_there():
    exec("\n".join(line for line in TESTING.splitlines() if line.startswith("from ")))
