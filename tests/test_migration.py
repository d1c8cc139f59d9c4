"""From FSDP2 to fshard: calls of an FSDP2 program and what stands for each, run side by side on two processes.

Each row trains the same network twice, to the same bits. The page for FSDP2 users has these rows, and others.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fshard as fs
from fshard.testing import assert_trees_close
from tests.ranks import on_ranks
from tests.unit_models import Block, Language, filled, tokens

ADAMW = {"lr": 1e-2, "weight_decay": 0.1}


def network():
    """The same values on every rank and on both sides."""
    return filled(Language(), torch.float32)


def batches(count=3):
    """This rank's batches."""
    ranks = dist.get_world_size()
    return [batch for (batch,) in tokens(ranks * count)[dist.get_rank() :: ranks]]


def sharded(mesh=None, **options):
    module = network()
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for block in module.blocks:
        fully_shard(block, mesh=mesh, **options)
    model = fully_shard(module, mesh=mesh, **options)
    return model, torch.optim.AdamW(model.parameters(), **ADAMW)


def full(model):
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


def train_fsdp2(model, optimizer):
    losses = []
    for batch in batches():
        loss = model(batch).float()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
        dist.all_reduce(losses[-1])
    return {"losses": [loss / dist.get_world_size() for loss in losses], "params": full(model)}


def mesh_of(**sizes):
    return fs.init_mesh(sizes or {"shard": -1}, device="cpu")


def zero3(**options):
    """ZeRO-3 of a network so small that biases would be kept whole and units merged."""
    return fs.zero3(mesh_of(), min_shard_elements=0, bucket_bytes=0, **options)


def program(strategy):
    """A first state, its optimizer, and a local loss."""
    model, tx = fs.functionalize(network(), units=Block), fs.from_torch(torch.optim.AdamW, **ADAMW)
    state = fs.TrainState.create(model.init(strategy), tx)
    return state, tx, lambda params, batch: model.apply(params, batch).float()


def train(strategy, ahead=""):
    """The gather of leaves whose names begin with `ahead` starts before each call."""
    state, tx, loss_fn = program(strategy)
    losses = []
    for batch in batches():
        params = state.params
        if ahead:
            params = params | fs.start_gather({name: params[name] for name in params if name.startswith(ahead)})
        loss, grads = fs.value_and_grad(loss_fn)(params, batch)
        state = fs.update(tx, state, grads)
        losses.append(loss)
    return {"losses": losses, "params": fs.unshard(state.params)}


def accumulated_by_fsdp2():
    model, optimizer = sharded()
    microbatches = batches(4)
    for number, batch in enumerate(microbatches, start=1):
        model.set_requires_gradient_sync(number == len(microbatches))
        (model(batch) / len(microbatches)).backward()
    optimizer.step()
    return full(model)


def accumulated():
    state, tx, loss_fn = program(zero3())
    _, grads = fs.accumulate(loss_fn, communicate="once")(state.params, batches(4))
    return fs.unshard(fs.update(tx, state, grads).params)


def deferred_by_fsdp2():
    model, optimizer = sharded(mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    microbatches = batches(4)
    for number, batch in enumerate(microbatches, start=1):
        model.set_requires_all_reduce(number == len(microbatches))
        (model(batch) / len(microbatches)).backward()
    optimizer.step()
    return full(model)


def deferred():
    state, tx, loss_fn = program(fs.hsdp(mesh_of(replicate=2, shard=-1), min_shard_elements=0, bucket_bytes=0))
    _, grads = fs.accumulate(loss_fn, communicate="outer_once")(state.params, batches(4))
    return fs.unshard(fs.update(tx, state, grads).params)


def with_policies_of_modules():
    """One block and the last norm in float32, and the rest in bfloat16."""
    module = network()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    narrow, wide = MixedPrecisionPolicy(torch.bfloat16, torch.float32), MixedPrecisionPolicy(torch.float32)
    for block in module.blocks:
        fully_shard(block, mesh=mesh, mp_policy=wide if block is module.blocks[1] else narrow)
    fully_shard(module.norm, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.float32, output_dtype=torch.bfloat16))
    model = fully_shard(module, mesh=mesh, mp_policy=narrow)
    return model, torch.optim.AdamW(model.parameters(), **ADAMW)


def train_fsdp2_ahead():
    """The gather of one block starts before the forward."""
    model, optimizer = sharded()
    block = model.blocks[1]
    model.register_forward_pre_hook(lambda *_: block.unshard(async_op=True) and None)
    return train_fsdp2(model, optimizer)


def policies_of_units():
    strategy = zero3(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    strategy = fs.masked(zero3(param_dtype=torch.float32), "blocks.1.*", otherwise=strategy)
    wide_norm = zero3(param_dtype=torch.float32, output_dtype=torch.bfloat16)
    return fs.masked(wide_norm, "norm.*", otherwise=strategy)


class Scaled(torch.nn.Module):
    """A network whose loss is multiplied by a parameter of each rank's own."""

    def __init__(self, scale):
        super().__init__()
        self.network, self.scale = network(), torch.nn.Parameter(scale)

    def forward(self, x):
        return self.network(x) * self.scale.square().sum()


def scales():
    """A row for each of two ranks."""
    return torch.tensor([[1.0, 0.5], [0.25, 2.0]])


def ignored_by_fsdp2():
    module = Scaled(scales()[dist.get_rank()])
    fully_shard(module, ignored_params={module.scale})
    module(batches()[0]).backward()
    grads = {name: p.grad.full_tensor() for name, p in module.network.named_parameters()}
    return grads, module.scale.grad


def row_for_each_rank():
    model = fs.functionalize(Scaled(scales()), units=Block)
    mesh = mesh_of()
    params = model.init(fs.masked(fs.own_dim(mesh), "scale", otherwise=fs.zero3(mesh)))
    _, grads = fs.value_and_grad(model.apply)(params, batches()[0])
    row = grads.pop("scale").local[0]
    full = {name.removeprefix("network."): grad for name, grad in fs.unshard(grads).items()}
    return full, row * dist.get_world_size()


class Row(NamedTuple):
    """What stands for an FSDP2 call, and a program of each for one rank of two."""

    equivalent: str
    fsdp2: Callable[[], Any]
    fshard: Callable[[], Any]


DTYPES = (None, torch.float32)
ROWS = {
    "fully_shard(block), fully_shard(model)": Row(
        "fs.functionalize(module, units=Block), model.init(fs.zero3(mesh))",
        lambda: train_fsdp2(*sharded()),
        lambda: train(fs.zero3(mesh_of())),
    ),
    "fully_shard(model, mesh=mesh_2d)": Row(
        "fs.hsdp(mesh)",
        lambda: train_fsdp2(*sharded(mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))),
        lambda: train(fs.hsdp(mesh_of(replicate=2, shard=-1))),
    ),
    "MixedPrecisionPolicy(param_dtype, reduce_dtype)": Row(
        "fs.zero3(mesh, param_dtype=..., reduce_dtype=...)",
        lambda: [train_fsdp2(*sharded(mp_policy=MixedPrecisionPolicy(torch.bfloat16, kept))) for kept in DTYPES],
        lambda: [train(zero3(param_dtype=torch.bfloat16, reduce_dtype=kept)) for kept in DTYPES],
    ),
    "fully_shard(block, mp_policy=...), another for each module": Row(
        "fs.masked(fs.zero3(mesh, param_dtype=...), names, otherwise=fs.zero3(mesh, ...))",
        lambda: train_fsdp2(*with_policies_of_modules()),
        lambda: train(policies_of_units()),
    ),
    "block.unshard(async_op=True)": Row(
        "fs.value_and_grad(loss_fn)(fs.start_gather(params), batch)",
        train_fsdp2_ahead,
        lambda: train(zero3(), ahead="blocks.1."),
    ),
    "fully_shard(model, ignored_params=...), different on each rank": Row(
        'a leaf with a row for each rank, by fs.own_dim(mesh); with reduce="mean" its gradient is divided by the '
        "number of ranks",
        ignored_by_fsdp2,
        row_for_each_rank,
    ),
    "model.set_requires_gradient_sync(False)": Row(
        'fs.accumulate(loss_fn, communicate="once")', accumulated_by_fsdp2, accumulated
    ),
    "model.set_requires_all_reduce(False)": Row(
        'fs.accumulate(loss_fn, communicate="outer_once")', deferred_by_fsdp2, deferred
    ),
}


@pytest.mark.rows(1)
@pytest.mark.parametrize("call", ROWS)
@on_ranks("2 processes")
def test_both_sides_are_equal(call):
    assert_trees_close(ROWS[call].fshard(), ROWS[call].fsdp2(), exact=True)
