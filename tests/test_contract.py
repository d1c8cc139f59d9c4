"""Ranks that differ, and ranks whose peer fails, end with an error that names the difference."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fshard as fs
from fshard.testing import Workers
from tests.ranks import BreaksInBackward, my_rank

# Of every group of the mesh. No error may be that of a timeout, which says nothing of what the contract promises.
SECONDS = 5.0

# A dim of rank 0 and of rank 1, and what each becomes where an operator halves it.
LENGTHS = (422, 446)
SHAPES = (r"\b(422|211)\b", r"\b(446|223)\b")


def errors_of(program: Callable[[fs.Axis], Any]) -> list[str]:
    """Run a program on two processes that nothing runs on afterwards, and return the text of each rank's error."""

    def run() -> str:
        axis = fs.axis_of(fs.init_mesh({"shard": 2}, device="cpu", timeout=SECONDS))
        # Both have connected.
        fs.psum(torch.ones(()), axis)
        try:
            return f"no error, but {program(axis)}"
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    with Workers(2) as pool:
        texts = pool.run(run, timeout=8 * SECONDS)
    print(*texts, sep="\n\n")
    return texts


def assert_all_name(texts: list[str], *patterns: str) -> None:
    for rank, text in enumerate(texts):
        assert "Timed out" not in text, text
        for pattern in patterns:
            assert re.search(pattern, text), f"rank {rank} does not name {pattern!r}:\n{text}"


def trained(loss_fn: Callable[[Any], Any], axis: fs.Axis, strategy: Any = None) -> Any:
    """One step's loss and gradients, where `loss_fn` is given a full weight of ones."""
    strategy = strategy or fs.zero3(axis, min_shard_elements=0)
    params = fs.shard({"w": torch.ones(4)}, strategy)
    return fs.value_and_grad(lambda p: loss_fn(fs.gather(p)["w"]))(params)


def attention_of(attention: Callable[..., Any], x: Any, axis: fs.Axis) -> Any:
    heads = x.view(1, -1, 2, 2).transpose(1, 2)
    return attention(heads, heads, heads)


def ulysses(x: Any, axis: fs.Axis) -> Any:
    return attention_of(fs.ulysses(F.scaled_dot_product_attention, axis), x, axis)


def ring(x: Any, axis: fs.Axis) -> Any:
    return attention_of(partial(fs.ring_attention, axis=axis), x, axis)


def moe(x: Any, axis: fs.Axis) -> Any:
    rows, _ = fs.moe.dispatch(x[:8], fs.moe.route(x[:8, :2]), axis, capacity=len(x))
    return rows


# Operators on this rank's x, and how errors may call them.
OPERATORS = {
    "psum": (fs.psum, "psum|all_reduce"),
    "all_gather": (fs.all_gather, "all_gather"),
    "ppermute": (partial(fs.ppermute, perm=[(0, 1), (1, 0)]), "ppermute"),
    "all_to_all": (partial(fs.all_to_all, split_dim=0, concat_dim=1), "all_to_all"),
    "reduce_scatter": (fs.reduce_scatter, "reduce_scatter"),
    "ulysses": (ulysses, "ulysses|all_to_all"),
    "ring_attention": (ring, "ring_attention"),
    "moe.dispatch": (moe, "moe|all_to_all"),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_shapes_that_differ_between_ranks_are_named_on_all(name):
    operator, called = OPERATORS[name]

    def program(axis):
        length = LENGTHS[my_rank()]
        return trained(lambda w: operator(w.expand(length, 4), axis=axis).sum(), axis)

    assert_all_name(errors_of(program), called, *SHAPES)


def broken(x: Any) -> Any:
    """The same, but for a backward that raises on rank 1."""
    return BreaksInBackward.apply(x, "no luck") if my_rank() == 1 else x


def gpipe(axis: fs.Axis) -> Any:
    params = fs.shard({"layers": torch.ones(2, 4)}, fs.zero3(axis, layout=fs.split_dim(axis, dim=0)))
    loss_fn = fs.pipeline(
        lambda p, h: broken(h * p["layers"].prod(0)),
        axis,
        microbatches=2,
        last=lambda p, h: h.square().mean(),
        schedule="gpipe",
    )
    return fs.value_and_grad(loss_fn)(params, torch.ones(4, 4))


# Programs whose backward raises on rank 1 before a collective of the backward, for which rank 0 waits.
BROKEN = {
    "psum": lambda axis: trained(lambda w: broken(fs.psum(w, axis)).sum(), axis),
    "ppermute": lambda axis: trained(lambda w: broken(fs.ppermute(w, axis, [(0, 1), (1, 0)])).sum(), axis),
    "ring_attention": lambda axis: trained(lambda w: broken(ring(w.expand(6, 4), axis)).sum(), axis),
    "gpipe": gpipe,
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_backward_that_raises_on_one_rank_is_named_on_all(name):
    first, second = errors_of(BROKEN[name])
    assert_all_name([first, second], "no luck")
    assert_all_name([first], r"rank (shard=)?1\b", "BrokenError")


@dataclass(frozen=True)
class TooShort(fs.ShardTransform):
    """The identity, but for gradients of two elements too few on rank 1."""

    def gather(self, leaves, specs):
        return list(leaves)

    def scatter(self, grads, specs):
        return [grad[2 * my_rank() :] for grad in grads]


@dataclass(frozen=True)
class TooShortInTheEnd(fs.Wrapped):
    """Another transform, but for gradients of one element too few on rank 1."""

    def scatter(self, grads, specs):
        return [grad[my_rank() :] for grad in self.inner.scatter(grads, specs)]


# How a transform joins one that reduces gradients, and the shapes of what its scatter is to return and does on rank 1.
SCATTERS = {
    # Its result is reduced, for which rank 0 waits.
    "before a reduction": (lambda shard: fs.compose(shard, TooShort()), r"\(4,\)", r"\(2,\)"),
    # Its result is the gradient, and nothing finds it.
    "behind a reduction": (TooShortInTheEnd, r"\(2,\)", r"\(1,\)"),
}


@pytest.mark.parametrize("place", SCATTERS)
def test_a_scatter_that_returns_a_wrong_shape_on_one_rank_is_named_on_all(place):
    layout_of, needed, got = SCATTERS[place]

    def program(axis):
        layout = layout_of(fs.fully_shard(axis, min_shard_elements=0))
        return trained(lambda w: w.sum(), axis, fs.zero3(axis, layout=layout))

    first, second = errors_of(program)
    assert_all_name([first, second], "TooShort|scatter", needed, got)
    assert_all_name([first], r"rank (shard=)?1\b")
