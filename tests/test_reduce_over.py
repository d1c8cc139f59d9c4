"""reduce_over: batches split over some of the axes that leaves are sharded on, where ranks of others share a loss."""

import re
from functools import partial

import pytest
import torch

import fshard as fs
from fshard.testing import assert_trees_close, check_varying
from tests.ranks import on_ranks
from tests.trees import assert_same_bits, normal

WIDTH, HIDDEN, ROWS = 6, 8, 12
FULL = {"up": normal(1)(WIDTH, HIDDEN), "down": normal(2)(HIDDEN, WIDTH), "bias": normal(3)(WIDTH)}
X, Y = normal(4)(ROWS, WIDTH), normal(5)(ROWS, WIDTH)


def loss_fn(params, x, y, reduce="mean", tp=None):
    """Each rank of `tp` computes with its columns of the full weights; their sum is the output of all of them."""
    full = fs.gather(params)
    size, rank = (1, 0) if tp is None else (tp.size, fs.comm.rank(tp))
    up, down = full["up"].chunk(size, 1)[rank], full["down"].chunk(size, 0)[rank]
    part = torch.tanh(x @ up) @ down + (full["bias"] if rank == 0 else 0 * full["bias"])
    out = part if tp is None else fs.psum_invariant(part, tp)
    squares = (out - y).square().sum(1)
    return (squares.sum(), torch.tensor(len(x))) if reduce == "weighted" else squares.mean()


def axes():
    mesh = fs.init_mesh({"shard": -1, "tp": 2}, device="cpu")
    return mesh, fs.axis_of(mesh, "shard"), fs.axis_of(mesh, "tp")


STRATEGIES = {
    "split over both": lambda mesh: fs.zero3(mesh, axis=("shard", "tp"), min_shard_elements=0),
    "whole over both": lambda mesh: fs.ddp(mesh, axis=("shard", "tp")),
    "whole over one": lambda mesh: fs.hsdp(mesh, replicate="tp", min_shard_elements=7, merge_bytes=0),
}


@pytest.mark.rows(3)
@pytest.mark.parametrize("reduce", ("mean", "sum", "weighted"))
@on_ranks(2, 4, "2 processes", 6)
def test_ranks_of_other_axes_share_a_loss(reduce, world_size):
    mesh, shard, tp = axes()
    expected = torch.func.grad_and_value(lambda p: loss_fn(p, X, Y))(FULL)
    if reduce == "sum":
        expected = fs.tree_map(lambda leaf: leaf * shard.size, expected)
    x, y = (tensor.chunk(shard.size)[fs.comm.rank(shard)] for tensor in (X, Y))
    loss, over = partial(loss_fn, reduce=reduce, tp=tp), {"reduce": reduce, "reduce_over": "shard"}
    for make in STRATEGIES.values():
        params = fs.shard(FULL, make(mesh))
        check_varying(loss, params, x, y, reduce_over=("shard",))
        value, grads = fs.value_and_grad(loss, **over)(params, x, y)
        assert_trees_close((fs.unshard(grads), value), expected, rtol=0, atol=1e-12)
        halves = list(zip(x.chunk(2), y.chunk(2), strict=True))
        again = fs.accumulate(lambda p, batch: loss(p, *batch), **over)(params, halves)
        if reduce != "sum":
            assert_trees_close((again[0], fs.unshard(again[1])), (value, fs.unshard(grads)), rtol=0, atol=1e-12)

        def total(full):
            found = loss(full, x, y)
            return (found[0], found) if reduce == "weighted" else (found, found)

        local, (_, found) = torch.func.grad_and_value(total, has_aux=True)(fs.gather(params))
        count = {"count": found[1]} if reduce == "weighted" else {}
        scattered = fs.scatter_grads(local, like=params, **over, **count)
        assert_same_bits(fs.tree_leaves(scattered), fs.tree_leaves(grads))
        assert_same_bits(fs.objective(found, params, **over), value)
    one = fs.value_and_grad(loss, **over)
    if world_size == 2 and reduce == "mean":
        assert_same_bits(fs.tree_leaves(fs.jit(one)(params, x, y)), fs.tree_leaves(one(params, x, y)))


def different(params, x, y, tp):
    """A loss of which each rank of tp has another one."""
    return 0 * fs.gather(params)["up"].sum() + fs.comm.rank(tp)


# A loss, options, and what follows on "value_and_grad: ".
REFUSED = {
    "a loss that varies over an axis that nothing is reduced over": (
        different,
        {"reduce_over": "shard"},
        "expected a loss that agrees between ranks of 'tp', over which it is not reduced, got [0.0, 1.0]; sum "
        "partial results by fs.psum_invariant, or name the axis in reduce_over if its ranks have own batches",
    ),
    "an axis that is none": (
        loss_fn,
        {"reduce_over": ("shard", "cp")},
        "gradients would stay unsummed\n"
        "  ['bias']: expected a transform that sums gradients over ['shard', 'cp'], or owns pieces there, got one over "
        "['tp', 'shard']\n",
    ),
    "sums in a tree": (
        loss_fn,
        {"reduce_over": "shard", "sums": "tree"},
        'expected reduce_over or sums="tree", got both; shard the parameters on these axes alone',
    ),
}


@on_ranks(2)
def test_refused():
    mesh, _, tp = axes()
    params = fs.shard(FULL, STRATEGIES["split over both"](mesh))
    text = "expected one that agrees: fs.psum_invariant of a value computed from it, got fs.gather over 'tp'"
    with pytest.raises(AssertionError, match=re.escape(text)):
        check_varying(loss_fn, params, X, Y, reduce_over="shard")
    for f, options, text in REFUSED.values():
        with pytest.raises(ValueError, match=re.escape(f"value_and_grad: {text}")):
            fs.value_and_grad(partial(f, tp=tp), **options)(params, X, Y)
    text = "value_and_grad: expected reduce_over with Sharded leaves, whose specs have axes, got it with plain tensors"
    with pytest.raises(ValueError, match=re.escape(text)):
        fs.value_and_grad(loss_fn, reduce_over="shard")(FULL, X, Y)


@on_ranks(2)
def test_frozen_leaves_need_no_part_in_a_reduction():
    mesh, *_ = axes()
    trained = fs.shard({"up": FULL["up"]}, fs.zero3(mesh, axis=("shard", "tp")))
    frozen = fs.shard({"down": FULL["down"]}, fs.fully_shard(mesh["shard"]), frozen="down")

    def total(p):
        full = fs.gather(p)
        return full["up"].sum() * full["down"].sum()

    value, grads = fs.value_and_grad(total, reduce_over=("shard", "tp"))(trained | frozen)
    assert grads["down"] is None
    assert_trees_close(value, FULL["up"].sum() * FULL["down"].sum())
