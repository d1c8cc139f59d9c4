"""What a bad call must do on every rank, and the world of good values that the tables of bad calls start from."""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import fshard as fs
from fshard.testing import Workers, spmd
from tests.trees import assert_same_bits


class Row(NamedTuple):
    """A bad call, made on every rank.

    `arguments` are made from the rank's world, and may issue collectives; `call` is what must refuse them, with the
    text `error`, before any collective but those of the labels in `issued` and the numbers by which ranks agree.
    """

    name: str
    arguments: Callable[["World"], tuple[Any, ...]]
    call: Callable[..., Any]
    error: str
    issued: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return self.name


def setup(name: str, call: Callable[..., Any], error: str, *arguments: Any) -> Row:
    """A row whose arguments are values, or functions of the world."""
    return Row(name, lambda world: tuple(a(world) if callable(a) else a for a in arguments), call, error)


class World(NamedTuple):
    """Good values of one rank: two meshes of all ranks, a tree in full and sharded, and all that a step takes."""

    mesh: Any
    grid: Any
    zero2: fs.ShardTransform
    full: Any
    params: Any
    full_grads: Any
    grads: Any
    tx: fs.Optimizer
    state: fs.TrainState


def make_world() -> World:
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    grid = fs.init_mesh({"replicate": 2 - mesh.size() % 2, "shard": -1}, device="cpu")
    zero2 = fs.zero2(mesh, min_shard_elements=0)
    draw = torch.Generator().manual_seed(0)
    full = {"a": torch.randn(5, 3, generator=draw), "b": [torch.randn(4, generator=draw)]}
    params = fs.shard(full, zero2)
    full_grads = fs.tree_map(lambda x: x * (dist.get_rank() + 1), full)
    tx = fs.chain(fs.clip_by_global_norm(1.0), fs.from_torch(torch.optim.AdamW, lr=0.1))
    state = fs.TrainState.create(params, tx)
    return World(mesh, grid, zero2, full, params, full_grads, fs.scatter_grads(full_grads, like=params), tx, state)


def loss(params: Any) -> torch.Tensor:
    """A good local loss, different on every rank."""
    return sum((x.square() * (dist.get_rank() + 1)).mean() for x in fs.tree_leaves(fs.gather(params)))


def good_calls(world: World) -> Any:
    """A whole step from the world's state, and the world's tree sharded anew."""
    value, grads = fs.value_and_grad(loss)(world.state.params)
    state = fs.update(world.tx, world.state, grads)
    return {"loss": value, "params": fs.unshard(state.params), "full": fs.unshard(fs.shard(world.full, world.zero2))}


def refuse(rows: Sequence[Row]) -> None:
    """Make bad calls on this rank, as their rows say; nothing may have changed by any, and good calls must work."""
    world = make_world()
    before = good_calls(world)
    for row in rows:
        arguments = row.arguments(world)
        tensors = list(held_tensors((world, arguments)))
        copies = [tensor.detach().clone() for tensor in tensors]
        with fs.comm.record() as record:
            try:
                ending = ("no error", row.call(*arguments))
            except Exception as error:
                ending = (type(error).__name__, str(error))
        # A hash or the name of a group is another in each run.
        text = re.sub("of hash [0-9a-f]{8}", "of hash {hash}", str(ending[1]))
        assert (ending[0], text) == ("ValueError", row.error), f"{row.name}: {text}"
        assert {entry.label for entry in record if not entry.about.is_comparison} == set(row.issued), row.name
        assert_same_bits([tensor.detach() for tensor in tensors], copies)
        assert_same_bits(good_calls(world), before)


def held_tensors(values: Any) -> Iterable[torch.Tensor]:
    """Every tensor with values that some arguments hold, those of modules included."""
    for leaf in fs.tree_leaves(values):
        tensors = [*leaf.parameters(), *leaf.buffers()] if isinstance(leaf, nn.Module) else [leaf]
        for tensor in tensors:
            if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_meta:
                yield tensor


def assert_all_refused(rows: Sequence[Row], world: int | Workers = 2) -> None:
    """Assert that the bad calls of a table do what their rows say, one after another in a run of ranks."""
    spmd(partial(refuse, rows), world, timeout=30.0 + len(rows))


def text_of(call: Callable[[], Any]) -> str:
    """The text of the ValueError that a call raises, or what it returned."""
    try:
        return f"no error, but {call()}"
    except ValueError as error:
        return str(error)
