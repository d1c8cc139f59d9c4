"""reduce_over: batches split over some of the axes that leaves are sharded on, where ranks of others share a loss."""

import re
from functools import partial

import pytest
import torch

import fshard as fs
from fshard.testing import assert_trees_close
from tests.checks import find_problems
from tests.ranks import on_ranks
from tests.tolerance import within
from tests.trees import assert_same_bits, normal

WIDTH, HIDDEN, ROWS = 6, 8, 12
FULL = {"up": normal(1)(WIDTH, HIDDEN), "down": normal(2)(HIDDEN, WIDTH), "bias": normal(3)(WIDTH)}
X, Y = normal(4)(ROWS, WIDTH), normal(5)(ROWS, WIDTH)


def loss_fn(params, x, y, reduce="mean", tp=None):
    """Each rank of `tp` computes with its columns of the full weights; their sum is the output of all of them."""
    full = fs.gather(params)
    size, rank = (1, 0) if tp is None else (tp.size, fs.comm.rank(tp))
    up, down = full["up"].chunk(size, 1)[rank], full["down"].chunk(size, 0)[rank]
    part = torch.tanh(x @ up) @ down + full["bias"] * (rank == 0)
    out = part if tp is None else fs.psum_invariant(part, tp)
    squares = (out - y).square().sum(1)
    return (squares.sum(), torch.tensor(len(x))) if reduce == "weighted" else squares.mean()


def loss_over_tp(params, x, y, tp):
    return loss_fn(params, x, y, tp=tp)


def axes():
    mesh = fs.init_mesh({"shard": -1, "tp": 2}, device="cpu")
    return mesh, fs.axis_of(mesh, "shard"), fs.axis_of(mesh, "tp")


STRATEGIES = (
    lambda mesh: fs.zero3(mesh, axis=("shard", "tp"), min_shard_elements=0),
    lambda mesh: fs.ddp(mesh, axis=("shard", "tp")),
    lambda mesh: fs.hsdp(mesh, replicate_axis="tp", min_shard_elements=7, bucket_bytes=0),
)


@pytest.mark.rows(3)
@pytest.mark.parametrize("reduce", ("mean", "sum", "weighted"))
@on_ranks(2, 4, "2 processes", 6)
def test_ranks_of_other_axes_share_a_loss(reduce, world_size):
    mesh, shard, tp = axes()
    expected = torch.func.grad_and_value(lambda p: loss_fn(p, X, Y))(FULL)
    if reduce == "sum":
        expected = fs.tree_map(lambda leaf: leaf * shard.size, expected)
    # Sums over rows and hidden units, in parts of ranks, forward and backward.
    near = within(expected, terms=ROWS + HIDDEN, steps=2)
    x, y = (tensor.chunk(shard.size)[fs.comm.rank(shard)] for tensor in (X, Y))
    loss, over = partial(loss_fn, reduce=reduce, tp=tp), {"reduce": reduce, "reduce_over": "shard"}
    for make in STRATEGIES:
        params = fs.shard(FULL, make(mesh))
        value, grads = fs.value_and_grad(loss, **over)(params, x, y)
        assert_trees_close((fs.unshard(grads), value), expected, **near)
        halves = list(zip(x.chunk(2), y.chunk(2), strict=True))
        if reduce != "sum":
            value_of_halves, grads_of_halves = fs.accumulate(lambda p, xy: loss(p, *xy), **over)(params, halves)
            assert_trees_close((fs.unshard(grads_of_halves), value_of_halves), expected, **near)

        def total(full):
            local = loss(full, x, y)
            return (local[0] if reduce == "weighted" else local), local

        local_grads, (_, local) = torch.func.grad_and_value(total, has_aux=True)(fs.gather(params))
        count = local[1] if reduce == "weighted" else None
        scattered = fs.scatter_grads(local_grads, like=params, count=count, **over)
        assert_same_bits(fs.tree_leaves(scattered), fs.tree_leaves(grads))
        assert_same_bits(fs.objective(local, params, **over), value)


# Options, and what follows on "value_and_grad: ".
UNSUMMED = (
    "gradients of these leaves would not be summed\n"
    "  ['bias']: expected a transform that sums gradients over ['shard', 'cp']"
)
BOTH = 'expected reduce_over or reduction_order="tree", got both; shard the parameters on these axes alone'
NO_AXES = 'expected reduce_over to be axes or their names, got a DeviceMesh; as in ("dp", "cp")'
REFUSED = (({"reduce_over": ("shard", "cp")}, UNSUMMED), ({"reduce_over": "shard", "reduction_order": "tree"}, BOTH))


@on_ranks(1)
def test_a_check_finds_no_problem_in_a_loss_that_ranks_share():
    mesh = fs.init_mesh({"shard": 1, "tp": 1}, device="cpu")
    params = fs.shard(FULL, STRATEGIES[0](mesh))
    assert find_problems(loss_over_tp, params, X, Y, fs.axis_of(mesh, "tp"), reduce_over="shard") == []


@on_ranks(2)
def test_leaves_with_the_fewest_axes_are_the_ones_that_are_named():
    """The first leaf was split for good, as if all ranks had one batch, and the others fit."""
    mesh, _, tp = axes()
    layout = fs.masked(fs.split_dim(tp, dim=0), "bias", otherwise=fs.fully_shard(tp))
    params = fs.shard(FULL, fs.zero3(mesh, layout=layout))
    text = (
        "value_and_grad: gradients of these leaves would not be summed\n"
        "  ['bias']: expected a transform that sums gradients over ['tp'], or owns pieces there, got one over []\n"
        "To fix: shard the whole tree on these axes (zero3 takes axis=, ddp keeps leaves whole, and own_dim owns pieces"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        fs.value_and_grad(loss_fn)(params, X, Y)


@on_ranks(2)
def test_refused():
    """And frozen leaves need no part in a reduction."""
    mesh, _, tp = axes()
    params = fs.shard(FULL, STRATEGIES[0](mesh))
    for options, text in (*REFUSED, ({"reduce_over": mesh}, NO_AXES)):
        with pytest.raises(ValueError, match=re.escape(f"value_and_grad: {text}")):
            fs.value_and_grad(partial(loss_fn, tp=tp), **options)(params, X, Y)
    text = "value_and_grad: reduce_over needs Sharded parameters, and these are plain tensors."
    with pytest.raises(ValueError, match=re.escape(text)):
        fs.value_and_grad(loss_fn, reduce_over="shard")(FULL, X, Y)
    frozen = fs.shard({"down": FULL["down"]}, fs.fully_shard(mesh["shard"]), frozen="down")
    over = ("shard", "tp")
    run = fs.value_and_grad(lambda p: fs.gather(p)["up"].sum() * fs.gather(p)["down"].sum(), reduce_over=over)
    value, grads = run({"up": params["up"]} | frozen)
    assert grads["down"] is None
    # The mean over the ranks of both axes.
    expected = FULL["up"].sum() * FULL["down"].sum()
    assert_trees_close(value, expected, **within(expected, terms=FULL["up"].numel()))
