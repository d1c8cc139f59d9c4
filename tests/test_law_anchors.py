"""Collectives of the function's own: their transposes run on every rank, whatever a rank makes of their results."""

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import fshard as fs
from fshard.testing import assert_trees_close
from tests.ranks import on_ranks
from tests.trees import normal, one_axis

SECONDS = 40.0
FULL = {"a": normal(1)(6, 3), "b": normal(2)(6, 3), "c": normal(3)(6, 3)}
STRATEGIES = {
    "ddp": lambda mesh: fs.ddp(mesh),
    "zero2": lambda mesh: fs.zero2(mesh, min_shard_elements=0),
    "zero3": lambda mesh: fs.zero3(mesh, min_shard_elements=0, merge_bytes=0),
}
COLLECTIVES = {
    "psum": lambda x, axis: fs.psum(x, axis),
    "pmean": lambda x, axis: fs.pmean(x, axis),
    "psum_invariant": lambda x, axis: fs.pvary(fs.psum_invariant(x, axis), axis),
    "all_gather": lambda x, axis: fs.all_gather(x, axis),
    "all_gather_invariant": lambda x, axis: fs.pvary(fs.all_gather_invariant(x, axis), axis),
    "reduce_scatter": lambda x, axis: fs.reduce_scatter(fs.all_gather(x, axis), axis),
}


def loss_of(params, call, axis, use, skip):
    """Two collectives between three units; a rank that does not use a result drops it, or multiplies it by zero."""
    mine = fs.comm.rank(axis) == axis.size - 1
    x = torch.tanh(fs.gather(params["a"]) * (1 + fs.comm.rank(axis)))
    first = call(x, axis)
    y = torch.tanh(x * fs.gather(params["b"]))
    second = call(y, axis)
    z = fs.gather(params["c"])
    if mine and use == "neither":
        value = y.sum() if skip else y.sum() + 0.0 * (first.sum() + second.sum())
    elif mine and use == "the first":
        value = (first * 2).square().sum() if skip else (first * 2).square().sum() + 0.0 * second.sum()
    else:
        value = first.square().sum() + (second.sum() * y).square().sum()
    # A unit that this rank does not use either.
    return value if mine and skip else value + (0.0 if mine else 1.0) * z.square().sum()


@on_ranks(2, pytest.param(3, marks=pytest.mark.slow), "2 processes", timeout=2 * SECONDS)
def test_a_result_that_one_rank_does_not_use_is_reduced_all_the_same():
    """On processes such a step ended by a signal or never."""
    mesh = one_axis()
    axis = fs.axis_of(mesh)
    for strategy in STRATEGIES.values():
        params = fs.shard(FULL, strategy(mesh))
        for call in COLLECTIVES.values():
            for use in ("neither", "the first", "both"):
                found, expected = (
                    fs.value_and_grad(partial(loss_of, call=call, axis=axis, use=use, skip=skip))(params)
                    for skip in (True, False)
                )
                assert_trees_close(found, expected, rtol=0.0, atol=1e-9)


@on_ranks(2, timeout=SECONDS)
def test_an_operand_that_needs_no_gradient_on_one_rank_is_named_on_every_rank():
    mesh = one_axis()
    axis, params = fs.axis_of(mesh), fs.shard(FULL, STRATEGIES["zero3"](mesh))

    def f(p):
        a = fs.gather(p["a"])
        return (a * fs.psum(a.detach() if mesh.get_rank() else a, axis)).sum()

    # The rank that has no transpose of the collective goes on to the reduction of the leaf.
    first = r"  rank 0: all_reduce number \d+ \(psum\) over 'shard' of float64 \(6, 3\), 144 bytes in value_and_grad\n"
    second = (
        r"  rank 1: reduce_scatter number \d+ \(scatter of \['a'\]\) over 'shard' of float64 \(2, 3, 3\), 144 bytes"
    )
    with pytest.raises(fs.comm.CollectiveError, match=rf"^ranks differ in a collective\n{first}{second}") as caught:
        fs.value_and_grad(f)(params)
    return str(caught.value).splitlines()[:3]


@pytest.mark.parametrize("nodes", (1, 40, 400))
@on_ranks(2, timeout=SECONDS)
def test_a_loss_that_was_reduced_many_nodes_ago_is_refused(nodes):
    mesh = one_axis()
    axis, params = fs.axis_of(mesh), fs.shard(FULL, STRATEGIES["zero3"](mesh))

    def f(p):
        value = fs.psum_invariant(fs.gather(p)["a"].square().sum(), axis)
        for _ in range(nodes):
            value = value * 1.01
        return value

    with pytest.raises(ValueError, match=re.escape("got one reduced over 'shard' already")):
        fs.value_and_grad(f)(params)


# Collectives of torch's own in a loss, which no transpose follows.
FOREIGN = {
    "c10d.allreduce_": lambda x: (dist.all_reduce(x), x)[1],
    "c10d.broadcast_": lambda x: (dist.broadcast(x, 0), x)[1],
    "_c10d_functional.all_reduce": lambda x: funcol.all_reduce(x, "sum", dist.group.WORLD),
}


@on_ranks("2 processes", timeout=2 * SECONDS)
def test_collectives_of_torch_are_refused_in_a_trace():
    params = fs.shard(FULL, STRATEGIES["zero3"](one_axis()))
    for name, call in FOREIGN.items():

        def f(p, call=call):
            value = fs.gather(p)["a"].sum()
            return call(value.detach()) * value

        with pytest.raises(ValueError, match=f"^jit: expected collectives of fshard alone, got {name}"):
            fs.jit(fs.value_and_grad(f))(params)
