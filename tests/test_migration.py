"""From FSDP2 to fshard: calls of an FSDP2 program and what stands for each, run side by side on two processes.

Each row trains, evaluates, saves or initialises the same network twice, and what the two sides return must be equal:
bit for bit, but where a row says how far they may be apart and why. The table of `MIGRATION.md` has these rows, those
of `tests/ext/interop/test_migration.py`, and others.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import gelu, mse_loss

import fshard as fs
from fshard.testing import assert_trees_close
from tests.ranks import on_ranks

INWARD, WIDTH, OUTWARD, ROWS_OF_A_BATCH, STEPS = 24, 48, 8, 6, 3
ADAMW = MappingProxyType({"lr": 1e-2, "weight_decay": 0.1})
FULL = StateDictOptions(full_state_dict=True)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(gelu(self.up(self.norm(x))))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.inward, self.head = nn.Linear(INWARD, WIDTH), nn.Linear(WIDTH, OUTWARD)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        h = self.inward(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def network():
    """The same values on every rank and on both sides."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Network()


def batches(count=STEPS):
    """This rank's batches."""
    draw = torch.Generator().manual_seed(1 + dist.get_rank())
    shapes = (ROWS_OF_A_BATCH, INWARD), (ROWS_OF_A_BATCH, OUTWARD)
    return [tuple(torch.randn(shape, generator=draw) for shape in shapes) for _ in range(count)]


# What every FSDP2 program has, and what every fshard program has in its place.


def sharded(module=None, **options):
    module = module or network()
    for block in module.blocks:
        fully_shard(block, **options)
    return fully_shard(module, **options)


def adamw_of(module):
    return torch.optim.AdamW(module.parameters(), **ADAMW)


def fsdp2_step(model, optimizer, batch):
    x, y = batch
    loss = mse_loss(model(x).float(), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def train_fsdp2(model, optimizer=None):
    optimizer = optimizer or adamw_of(model)
    losses = [fsdp2_step(model, optimizer, batch) for batch in batches()]
    return {"losses": losses, "params": full(model)}


def full(model):
    return {name: getattr(p, "full_tensor", lambda p=p: p)().detach() for name, p in model.named_parameters()}


def mesh_of_ranks():
    return fs.init_mesh({"shard": -1}, device="cpu")


def zero3(mesh=None, **options):
    """ZeRO-3 of a network so small that biases would be kept whole and units merged."""
    return fs.zero3(mesh or mesh_of_ranks(), min_shard_elements=0, merge_bytes=0, **options)


def loss_of(model):
    return lambda params, batch: mse_loss(model.apply(params, batch[0]).float(), batch[1])


class Program(NamedTuple):
    """An fshard program: a model, its first state, its optimizer, and its train step."""

    model: fs.Model
    state: fs.TrainState
    tx: fs.Optimizer
    step: Callable[..., Any]


def program(strategy=None, module=None):
    model, tx = fs.functionalize(module or network(), units=Block), fs.from_torch(torch.optim.AdamW, **ADAMW)

    def train_step(state, batch):
        loss, grads = fs.value_and_grad(loss_of(model))(state.params, batch)
        return fs.update(tx, state, grads), loss

    return Program(model, fs.TrainState.create(model.init(strategy or zero3()), tx), tx, train_step)


def stepped(made):
    state, losses = made.state, []
    for batch in batches():
        state, loss = made.step(state, batch)
        losses.append(loss)
    return state, losses


def train(made):
    state, losses = stepped(made)
    return {"losses": losses, "params": fs.unshard(state.params)}


# What several rows use.


def others():
    """A network of other values, to load into."""
    module = network()
    module.load_state_dict({name: 0.5 * value for name, value in module.state_dict().items()})
    return module


def shared_directory():
    """A directory of all ranks."""
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    return str(Path(box[0]) / "saved")


def saved_by_fsdp2(directory):
    """Train by FSDP2 and save as its programs do."""
    model = sharded()
    train_fsdp2(model, optimizer := adamw_of(model))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=directory)


def go_on_by_fsdp2(directory):
    """Load what was saved into another network, and train on."""
    model = sharded(others())
    optimizer = adamw_of(model)
    states = dict(zip(("model", "optim"), get_state_dict(model, optimizer)))
    dcp.load(states, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optim"])
    return train_fsdp2(model, optimizer)


# The table.


class Row(NamedTuple):
    """What stands for an FSDP2 call, and a program of each for one rank of two, whose results may be `atol` apart."""

    equivalent: str
    fsdp2: Callable[[], Any]
    fshard: Callable[[], Any]
    atol: float = 0.0


def row(call, equivalent, atol=0.0, table=None):
    """Enter a pair of programs of several lines into a table."""

    def enter(pair):
        (ROWS if table is None else table)[call] = Row(equivalent, pair.fsdp2, pair.fshard, atol)
        return pair

    return enter


ROWS: dict[str, Row] = {}
ROWS["fully_shard(block), fully_shard(model)"] = Row(
    "fs.functionalize(module, units=Block), model.init(fs.zero3(mesh))",
    lambda: train_fsdp2(sharded()),
    lambda: train(program(fs.zero3(mesh_of_ranks()))),
)
ROWS["fully_shard(model, mesh=mesh_2d)"] = Row(
    "fs.hsdp(mesh)",
    lambda: [
        train_fsdp2(sharded(mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))))
        for shape in ((2, 1), (1, 2))
    ],
    lambda: [train(program(fs.hsdp(fs.init_mesh({"replicate": size, "shard": -1}, device="cpu")))) for size in (2, 1)],
)
REDUCE_DTYPES = (None, torch.float32)
ROWS["MixedPrecisionPolicy(param_dtype, reduce_dtype)"] = Row(
    "fs.zero3(mesh, param_dtype=..., reduce_dtype=...)",
    lambda: [train_fsdp2(sharded(mp_policy=MixedPrecisionPolicy(torch.bfloat16, kept))) for kept in REDUCE_DTYPES],
    lambda: [train(program(zero3(param_dtype=torch.bfloat16, reduce_dtype=kept))) for kept in REDUCE_DTYPES],
)


@row("model.set_requires_gradient_sync(False)", 'fs.accumulate(loss_fn, communicate="once")')
class Accumulated:
    """Parameters after an update with the gradients of four microbatches."""

    def fsdp2():
        model, microbatches = sharded(), batches(4)
        optimizer = adamw_of(model)
        for number, (x, y) in enumerate(microbatches, start=1):
            model.set_requires_gradient_sync(number == len(microbatches))
            (mse_loss(model(x), y) / len(microbatches)).backward()
        optimizer.step()
        return full(model)

    def fshard():
        model, state, tx, _ = program()
        _, grads = fs.accumulate(loss_of(model), communicate="once")(state.params, batches(4))
        return fs.unshard(fs.update(tx, state, grads).params)


@row(
    "dcp.save(...), dcp.load(...)", "fs.checkpoint.save(directory, state), fs.checkpoint.restore(directory, like=state)"
)
class Checkpoint:
    def fsdp2():
        saved_by_fsdp2(directory := shared_directory())
        return go_on_by_fsdp2(directory)

    def fshard():
        state, _ = stepped(program())
        fs.checkpoint.save(directory := shared_directory(), state)
        fresh = program(module=others())
        return train(fresh._replace(state=fs.checkpoint.restore(directory, like=fresh.state)))


def check_both_sides_are_equal(entry: Row) -> None:
    assert_trees_close(entry.fshard(), entry.fsdp2(), rtol=0, atol=entry.atol, exact=not entry.atol)


@pytest.mark.rows(2)
@pytest.mark.parametrize("call", ROWS)
@on_ranks("2 processes")
def test_both_sides_are_equal(call):
    check_both_sides_are_equal(ROWS[call])
