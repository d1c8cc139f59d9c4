"""The tables of the laws: world sizes, trees and strategies by name, and batches split between ranks."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

import fshard as fs
from fshard.shard import without_padding
from fshard.tree import flatten, is_sharded

WORLD_SIZES = (1, 2, 3, 4, 8)


class Layer(NamedTuple):
    weight: Any
    bias: Any


def normal(seed: int = 0) -> Callable[..., torch.Tensor]:
    """A source of random tensors, drawn in float64 whatever their dtype."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape, dtype=torch.float64: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def uneven():
    draw = normal(1)
    return {"w": draw(5, 3), "v": draw(7), "cube": draw(3, 5, 7), "even": draw(24, 8)}


def empty():
    draw = normal(2)
    return {"no_rows": draw(0, 3), "no_columns": draw(3, 0), "none": draw(0), "w": draw(2, 2)}


def scalars():
    draw = normal(3)
    return [draw(), draw(), draw(3)]


def size_one():
    draw = normal(4)
    return (draw(1, 4), draw(4, 1), draw(1), draw(1, 1, 1))


def nested():
    draw = normal(5)
    layers = [Layer(draw(4, 3), None), Layer(draw(3, 4), draw(3))]
    return OrderedDict(layers=layers, head=({"w": draw(9)}, None), nothing=[])


def large():
    """One leaf for each way a tensor can travel: packed, exchanged whole, alone."""
    draw = normal(6)
    return {"packed": draw(3), "summed_in_pieces": draw(67, 65), "alone": draw(257, 129)}


def assorted():
    """A little of each of the above, for laws that cost much."""
    draw = normal(10)
    return {"w": draw(5, 3), "row": draw(1, 4), "scalar": draw(), "empty": draw(0, 3), "nothing": None}


def mixed_dtypes():
    draw = normal(7)
    half, single = draw(5, 3, dtype=torch.bfloat16), draw(9, dtype=torch.float32)
    return {"half": half, "single": single, "double": draw(7), "int": torch.arange(7), "bool": torch.arange(5) % 2 == 0}


def frozen():
    draw = normal(8)
    fixed = {name: nn.Parameter(draw(5, 3), requires_grad=False) for name in ("fixed", "still")}
    return {**fixed, "trained": nn.Parameter(draw(5, 3)), "plain": draw(3)}


def exotic_dtypes():
    draw = normal(9)
    names = ("float16", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2")
    floating = {name: draw(5, 3, dtype=torch.float32).to(getattr(torch, name)) for name in names}
    integers = {name: torch.arange(-4, 7).to(getattr(torch, name)) for name in ("int8", "uint8", "int16", "int32")}
    special = torch.tensor([float("nan"), float("inf"), -0.0, 5e-324, -float("inf")], dtype=torch.float64)
    return {**floating, **integers, "special": special, "flag": torch.tensor(True)}


# Trees whose leaves are all float64, which take every law.
FLOATING = {f.__name__: f for f in (uneven, empty, scalars, size_one, nested, large)}
TREES = {**FLOATING, **{f.__name__: f for f in (mixed_dtypes, frozen)}}


def one_axis():
    return fs.init_mesh({"shard": -1}, device="cpu")


def two_axes(ranks: int):
    """A mesh of two axes, the outer one of size 2 where the number of ranks is even."""
    return fs.init_mesh({"replicate": 2 - ranks % 2, "shard": -1}, device="cpu")


class Meshes(NamedTuple):
    """The meshes of one rank, which strategies are made on."""

    line: Any
    grid: Any


def meshes() -> Meshes:
    line = one_axis()
    return Meshes(line, two_axes(line.size()))


Strategy = Callable[[Meshes], fs.ShardTransform]

# Gradients are summed over all ranks in one go, in rank order.
ONE_AXIS: dict[str, Strategy] = {
    "ddp": lambda on: fs.ddp(on.line),
    "zero1": lambda on: fs.zero1(on.line),
    "zero2": lambda on: fs.zero2(on.line),
    "zero2 of every leaf": lambda on: fs.zero2(on.line, min_shard_elements=0),
    "last dim": lambda on: fs.fully_shard(on.line, dim=-1),
}

# Gradients are summed over the inner axis first, then over the outer one.
TWO_AXES: dict[str, Strategy] = {
    "hsdp": lambda on: fs.compose(fs.replicate(on.grid["replicate"]), fs.fully_shard(on.grid["shard"])),
    "one dim over two axes": lambda on: fs.zero3(on.grid, axis=("shard", "replicate"), min_shard_elements=0),
    "two dims": lambda on: fs.compose(
        fs.fully_shard(on.grid["replicate"]), fs.fully_shard(on.grid["shard"], dim=-1, min_shard_elements=4)
    ),
}

STRATEGIES = ONE_AXIS | TWO_AXES

# On a mesh of one axis, over which every leaf is split.
OF_EVERY_LEAF: dict[str, Callable[[Any], fs.ShardTransform]] = {
    "zero3": partial(fs.zero3, min_shard_elements=0),
    "zero3 that keeps": partial(fs.zero3, min_shard_elements=0, regather=False),
    "zero2": partial(fs.zero2, min_shard_elements=0),
    "ddp": fs.ddp,
}

# Leaves travel as bfloat16, gradients as float32.
CASTS: dict[str, Strategy] = {
    "cast ddp": lambda on: fs.compose(fs.cast(gather=torch.bfloat16), fs.ddp(on.line), fs.cast(scatter=torch.float32)),
    "cast zero2": lambda on: fs.compose(
        fs.cast(gather=torch.bfloat16), fs.zero2(on.line, min_shard_elements=0), fs.cast(scatter=torch.float32)
    ),
    "cast after gather": lambda on: fs.compose(
        fs.fully_shard(on.line, dim=-1), fs.cast(gather=torch.bfloat16, scatter=torch.float32)
    ),
    # Leaves of one tree have transforms of their own.
    "cast of matrices": lambda on: fs.compose(
        fs.masked(fs.cast(gather=torch.bfloat16, scatter=torch.float32), lambda name, leaf: len(leaf.shape) > 1),
        fs.zero2(on.line, min_shard_elements=0),
    ),
}


def every_strategy(table: dict[str, Strategy] = STRATEGIES) -> Iterator[tuple[str, fs.ShardTransform]]:
    """The strategies of a table by name, made on this rank."""
    on = meshes()
    return ((name, make(on)) for name, make in table.items())


def assert_same_bits(actual: Any, expected: Any) -> None:
    """Assert that two trees of tensors agree in structure, shapes, dtypes and every bit, those of NaN and -0.0 too."""
    result, reference = flatten(actual), flatten(expected)
    assert result.treedef == reference.treedef
    for path, a, b in zip(result.paths, result.leaves, reference.leaves):
        if b is None:
            assert a is None, path
            continue
        assert (path, a.dtype, a.shape) == (path, b.dtype, b.shape)
        assert as_bytes(a).equal(as_bytes(b)), f"{path}: {a} and {b} differ in some bits"


def assert_alike(actual: Any, expected: Any) -> None:
    """Assert that two trees agree in structure, specs and every bit."""
    result, reference = flatten(actual), flatten(expected)
    assert result.treedef == reference.treedef
    for path, a, b in zip(result.paths, result.leaves, reference.leaves, strict=True):
        assert is_sharded(a) == is_sharded(b), path
        assert not is_sharded(a) or a.spec == b.spec, path
    assert_same_bits(tensors(actual), tensors(expected))


def tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors that a tree holds, shards among them."""
    return [leaf for leaf in fs.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def copied(tree: Any) -> Any:
    return fs.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, tree)


def padded_with(leaf: fs.Sharded, value: float) -> fs.Sharded:
    """A leaf with another value where its shard is padded."""
    out = fs.Sharded(torch.full_like(leaf.local, value), leaf.spec)
    without_padding(out).copy_(without_padding(leaf))
    return out


def every_bit(tree: Any) -> list[bytes]:
    """The bits of a tree's tensors, which ranks can return to be compared."""
    return [as_bytes(leaf).numpy().tobytes() for leaf in fs.tree_leaves(tree)]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    # A clone, because a single element counts as contiguous whatever its stride, and then cannot be viewed as bytes.
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
