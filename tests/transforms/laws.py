"""The laws of a transform that changes no value, and trees to try transforms on."""

from typing import Any

import torch

import fshard as fs
from tests.ranks import my_rank
from tests.test_law_adjoint import check_adjoint_of
from tests.test_law_ddp import ALGORITHMS
from tests.test_law_purity import unchanged
from tests.trees import FLOATING, assert_same_bits, exotic_dtypes, frozen, mixed_dtypes, normal, one_axis

SMALL = {name: make for name, make in FLOATING.items() if name != "large"}
TREES = {**SMALL, **{make.__name__: make for make in (mixed_dtypes, frozen, exotic_dtypes)}}
FEW = {name: TREES[name] for name in ("uneven", "scalars", "exotic_dtypes")}
SGD = fs.from_torch(ALGORITHMS["SGD"].cls, **ALGORITHMS["SGD"].hyper)


def grid(ranks: int, inner: str = "tp") -> Any:
    """A mesh of an outer axis "shard" and an inner one of size 2 where the number of ranks is even."""
    return fs.init_mesh({"shard": -1, inner: 2 - ranks % 2}, device="cpu")


def assert_laws(transform: fs.ShardTransform) -> None:
    """Round trips, gather of every kind of leaf, adjoints and purity, on this rank."""
    other = fs.fully_shard(one_axis(), dim=-1)
    # Eight ranks are slow; what trees there are depends little on their number.
    chosen = TREES if one_axis().size() < 8 else FEW
    for name, make in chosen.items():
        full = make()
        params = fs.shard(full, transform)
        with unchanged(full, params):
            assert_same_bits(fs.unshard(params), full)
            moved = fs.reshard(params, other)
            assert_same_bits(fs.unshard(moved), full)
            assert_same_bits(fs.tree_leaves(fs.reshard(moved, transform)), fs.tree_leaves(params))
            assert_same_bits(fs.gather(params), full)
            assert_same_bits(fs.gather(params), full)
        if name in SMALL:
            check_adjoint_of(transform, full)


FROZEN = ("fixed", "int")


def every_kind() -> dict[str, torch.Tensor]:
    """Leaves of every dtype that takes a gradient and every odd shape, and two frozen ones."""
    draw = normal(11)
    names = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
    return {
        **{name: draw(5, 3, dtype=getattr(torch, name)) for name in names},
        **{"empty": draw(0, 3), "scalar": draw(), "row": draw(1, 4), "cube": draw(3, 5, 7), "vector": draw(7)},
        **{"fixed": draw(5, 3), "int": torch.arange(7)},
    }


def shard_kinds(transform: fs.ShardTransform) -> dict[str, fs.Sharded]:
    return fs.shard(every_kind(), transform, frozen=FROZEN)


def squares(params: Any) -> torch.Tensor:
    """A loss whose gradients differ between ranks and elements."""
    full = fs.gather(params)
    magnitudes = [leaf.abs().double() for name, leaf in full.items() if name not in FROZEN]
    return sum((x**2).sum() for x in magnitudes) * (my_rank() + 1)


def gradients(transform: fs.ShardTransform) -> dict[str, torch.Tensor]:
    """Full gradients of every kind of leaf, which the engine and the verbs must agree on, bit for bit."""
    params = shard_kinds(transform)
    with unchanged(params):
        _, grads = fs.value_and_grad(squares)(params)
        full = fs.gather(params)
        trained = {name: leaf for name, leaf in full.items() if name not in FROZEN}
        local = torch.func.grad(squares)(trained)
        with unchanged(local):
            scattered = fs.scatter_grads({**local, **dict.fromkeys(FROZEN)}, like=params)
    assert_same_bits(fs.tree_leaves(grads), fs.tree_leaves(scattered))
    for name, leaf in params.items():
        assert grads[name] is None if name in FROZEN else grads[name].spec == leaf.spec
    return fs.unshard(grads)
