"""The README's programs run as printed."""

import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fshard as fs
from fshard.testing import assert_trees_close, check_adjoint, spmd

README = (Path(__file__).parents[1] / "README.md").read_text()
TRAIN_STEP, FOUR_VERBS, TRANSFORMS, TESTING = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def names(seed):
    torch_generator = torch.Generator().manual_seed(seed)
    module = nn.Sequential(nn.Embedding(7, 300), nn.Linear(300, 7))
    batch = SimpleNamespace(
        x=torch.randint(7, (2, 3), generator=torch_generator), y=torch.randint(7, (2, 3), generator=torch_generator)
    )
    return {"torch": torch, "F": F, "module": module, "dataclass": dataclass, "fs": fs}, batch


@pytest.mark.parametrize("world_size", [1, 2])
def test_both_train_steps_give_the_same_bits(world_size):
    shared, _ = names(0)

    def program():
        scope = dict(shared)
        exec(TRAIN_STEP, scope)
        _, batch = names(scope["mesh"].get_rank())
        state, loss = scope["train_step"](scope["state"], batch)
        exec(FOUR_VERBS, scope)
        again, loss_again = scope["train_step"](scope["state"], batch)
        assert_trees_close({"loss": loss, "state": state}, {"loss": loss_again, "state": again}, exact=True)
        assert int(state.step) == 1
        return loss.item()

    losses = spmd(program, world_size)
    assert len(set(losses)) == 1


def test_transforms_are_adjoint():
    def program():
        scope = {"torch": torch, "fs": fs, "dataclass": dataclass}
        scope["mesh"] = fs.init_mesh({"replicate": 2, "shard": -1}, device="cpu")
        exec(TRANSFORMS, scope)
        check_adjoint(scope["hsdp"], [(5, 3), (4,)])
        check_adjoint(fs.compose(scope["Scale"](2.0), scope["hsdp"], scope["Scale"](0.5)), [(5, 3), (4,)])
        params = fs.shard({"w": torch.ones(5, 3)}, scope["mixed"])
        assert fs.gather(params)["w"].dtype is torch.bfloat16
        assert fs.value_and_grad(lambda p: fs.gather(p)["w"].float().sum())(params)[1]["w"].local.dtype is torch.float32

    spmd(program, 4)


def test_testing_tools_are_there():
    exec("\n".join(line for line in TESTING.splitlines() if line.startswith("from ")))
