"""The programs of the README and of the reference that use extensions run as printed."""

import math
import sys
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.testing import assert_trees_close, check_transform, spmd
from tests.ranks import my_rank, on_ranks
from tests.test_readme import EAGER, OPTIMIZERS, TRANSFORMS, blocks, rows_of
from tests.tolerance import within

(MORE_AXES,), (AHEAD,) = map(blocks, ("More axes", "Planning and tracing"))


def test_a_step_is_planned_held_to_a_budget_and_traced(tmp_path, capsys):
    def program():
        scope = {}
        exec(EAGER, scope)
        scope["batch"] = rows_of(scope)
        exec(AHEAD.replace("step.json", str(tmp_path / f"{my_rank()}.json")), scope)

    spmd(program, 2)
    assert list(tmp_path.glob("*.json"))
    assert "parameters" in capsys.readouterr().out


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
    assert_trees_close(scope["loss"].item(), math.log(5), **within(math.log(5), terms=5, dtype=scope["loss"].dtype))
    assert scope["mixed"].shape == (1, 2, 6, 4)
    # Each of 6 tokens goes to both experts, one of which each rank has.
    assert sum(len(rows) for rows in scope["rows"]) == 12
    params = fs.shard({"w": torch.full((1,), 3.0, dtype=torch.float64)}, fs.zero3(mesh, "expert"))
    value, grads = fs.value_and_grad(scope["loss_fn"])(params, torch.ones(8, 1))
    assert (value.item(), fs.unshard(grads)["w"].item()) == (9.0, 6.0)


@pytest.mark.parametrize("world_size", [1, 2])
def test_optimizers_of_groups_train(world_size):
    blocks = nn.ModuleDict({"norm": nn.LayerNorm(8), "linear": nn.Linear(8, 8)})
    module = nn.ModuleDict({"embedding": nn.Embedding(7, 8), "blocks": blocks, "head": nn.Linear(8, 7)})
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
    module = ModuleType(f"readme_of_rank_{my_rank()}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    scope = module.__dict__
    scope |= {"torch": torch, "fs": fs, "dataclass": dataclass, "mesh": mesh}
    exec(TRANSFORMS, scope)
    check_transform(scope["narrow"], [(64, 64), (5,)], error=2**-8)
    check_transform(scope["small"], [(64, 64), (5,)], error=1 / 200)
    params = fs.shard({"w": torch.ones(5, 3)}, scope["mixed"])
    assert fs.gather(params)["w"].dtype is torch.bfloat16
    assert fs.value_and_grad(lambda p: fs.gather(p)["w"].float().sum())(params)[1]["w"].local.dtype is torch.float32
