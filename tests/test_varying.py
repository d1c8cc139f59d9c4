"""What varies between ranks and what agrees: wrong uses of psum, psum_invariant, pcast and whole leaves are named."""

import re
from functools import partial

import pytest
import torch
from torch.func import grad

import fshard as fs
from fshard.testing import assert_trees_close
from tests.ranks import on_ranks
from tests.tolerance import within
from tests.trees import normal, one_axis, two_axes

FULL = {"w": normal(1)(6, 3), "b": normal(2)(5)}


def params_of(make):
    """The axis of all ranks, and params by zero3 or DDP, of which the first leaves "b" whole."""
    mesh = one_axis()
    strategy = fs.zero3(mesh, min_shard_elements=6) if make is fs.zero3 else make(mesh)
    return fs.axis_of(mesh), fs.shard(FULL, strategy)


def squares(params):
    full = fs.gather(params)
    return full["w"].square().sum() + full["b"].square().sum()


def assert_refused(f, params, text, **options):
    with pytest.raises(ValueError, match=re.escape(text)):
        fs.value_and_grad(f, **options)(params)


def assert_equal(f, params, other, terms):
    """Two losses have the same value and gradients, which are returned in full."""
    (value, grads), (expected, expected_grads) = (fs.value_and_grad(loss)(params) for loss in (f, other))
    expected = expected, fs.unshard(expected_grads)
    assert_trees_close((value, fs.unshard(grads)), expected, **within(expected, terms))
    return fs.unshard(grads)


REDUCED = (
    "value_and_grad: the loss uses the result of fs.psum_invariant over 'shard', which agrees between ranks, so "
    "gradients would be too small. Return the loss of this rank's batch; it is reduced for you. To sum parts use "
    'fs.psum. Pass a term that is summed, as by fs.global_norm or a value_and_grad, to fs.pcast(x, axis, to="varying").'
)


@pytest.mark.parametrize("make", (fs.ddp, fs.zero3))
@on_ranks(3)
def test_sums_in_a_loss(make):
    """Of a loss reduced already gradients would be too small; psum is its own transpose, and pcast hands back."""
    axis, params = params_of(make)

    def total_of(p):
        return fs.psum_invariant(squares(p), axis)

    assert_refused(lambda p: fs.objective(squares(p), like=p), params, REDUCED)
    assert_refused(lambda p: 0.5 * total_of(p) / 2 + 1, params, REDUCED, reduce="sum")
    assert_refused(lambda p: (total_of(p), torch.tensor(2)), params, REDUCED, reduce="weighted")
    for move, remedy in ((fs.all_gather_invariant, "fs.all_gather."), (fs.broadcast, "fs.pcast(x, axis, to=")):
        text = f"the loss uses the result of fs.{move.__name__} over 'shard', which agrees between ranks, so gradients "
        shared = partial(lambda move, p: squares(p) + move(squares(p)[None], axis).mean(), move)
        assert_refused(shared, params, f"value_and_grad: {text}would be too small. Use {remedy}")
    with pytest.raises(ValueError, match=re.escape(REDUCED.replace("value_and_grad", "objective", 1))):
        grad(lambda p: fs.objective(squares(p) + total_of(p), like=p))(params)
    # One term for each rank.
    grads = assert_equal(
        lambda p: fs.psum(squares(p), axis), params, lambda p: fs.pcast(total_of(p), axis, to="varying"), terms=3
    )
    expected = fs.tree_map(lambda x: 2 * 3 * x, FULL)
    assert_trees_close(grads, expected, **within(expected, terms=3))


UNSUMMED = (
    "value_and_grad: gradients of these leaves would not be summed\n"
    "  ['b']: expected gather or pcast, got math on a leaf that is replicated over 'shard'\n"
    "To fix: use fs.gather, or fs.pcast before math on each rank."
)


def loss_by_rank(params, b, axis):
    """A loss that uses a leaf as each rank does by itself."""
    return squares(params) + (b * (1 + fs.axis_index(axis))).sum()


@on_ranks(2)
def test_math_on_a_whole_leaf():
    """Its gradient would stay this rank's part of a sum; and collectives of leaves that mean something else."""
    for make in (fs.ddp, fs.zero3):
        axis, params = params_of(make)
        by_rank = partial(loss_by_rank, axis=axis)
        assert_refused(lambda p, by_rank=by_rank: by_rank(p, p["b"].local), params, UNSUMMED)
        assert_equal(
            lambda p, by_rank=by_rank, axis=axis: by_rank(p, fs.pcast(p["b"].local, axis, to="varying")),
            *(params, lambda p, by_rank=by_rank: by_rank(p, fs.gather(p)["b"])),
            terms=2,
        )
    # The rows of a rank are its part of the sum.
    fs.value_and_grad(lambda p: squares(p) + p["w"].local.sum())(params)
    whole = "is replicated over 'shard', but {} needs a value that differs between ranks\nTo fix: use fs.pcast(x, axis"
    mixed = "is split over 'shard', and {} would mix the different elements that ranks store\nTo fix: use fs.pcast"
    split = "is split over 'shard', but pcast needs a value that is equal on all ranks\nTo fix: gather it first."
    for collective, leaf, text in (
        (fs.psum_invariant, "b", whole.format("psum_invariant")),
        (fs.pmean, "b", whole.format("pmean")),
        *((sums, "w", mixed.format(sums.__name__)) for sums in (fs.psum, fs.pmean, fs.psum_invariant, fs.pmax)),
        (partial(fs.broadcast, root=1), "w", mixed.format("broadcast")),
        (partial(fs.pcast, to="varying"), "w", split),
    ):
        with pytest.raises(ValueError, match=re.escape(f"['{leaf}']: {text}")):
            collective({leaf: params[leaf]}, axis)


@on_ranks(4)
def test_a_loss_that_differs_over_an_axis_that_stays_split():
    mesh = two_axes(4)
    full = {"w": normal(1)(6, 4)}
    tp = fs.axis_of(mesh["replicate"])
    params = fs.shard(full, fs.compose(fs.fully_shard(mesh["shard"]), fs.split_dim(tp, dim=1)))

    def local_loss(params):
        return fs.gather(params)["w"].square().sum()

    refusal = "value_and_grad: the loss differs between ranks of 'replicate' (["
    assert_refused(local_loss, params, refusal)
    value, grads = fs.value_and_grad(lambda p: fs.psum_invariant(local_loss(p), tp))(params)
    expected = full["w"].square().sum(), {"w": 2 * full["w"]}
    assert_trees_close((value, fs.unshard(grads)), expected, **within(expected, full["w"].numel()))


@on_ranks(4)
def test_a_loss_that_ranks_compute_together_over_an_axis_without_leaves():
    """As by ring attention: each rank would update its own copy by a part of the gradient."""
    mesh = two_axes(4)
    axis = fs.axis_of(mesh["replicate"])
    params = fs.shard({"w": normal(1)(6, 4)}, fs.fully_shard(mesh["shard"]))
    factor = 1.0 + fs.axis_index(axis)

    def of_others(params):
        return factor * fs.ppermute(fs.gather(params)["w"].square().sum(), axis, [(0, 1), (1, 0)])

    assert_refused(of_others, params, "value_and_grad: the loss differs between ranks of 'replicate' ([")

    def of_this_replica(params):
        """Replicas that train apart may look at each other, also at losses that have a gradient."""
        loss = factor * fs.gather(params)["w"].square().sum() + fs.pmean(torch.ones(()), axis)
        return loss, fs.pmean(loss, axis)

    (loss, mean), _ = fs.value_and_grad(of_this_replica, has_aux=True)(params)
    expected = (loss - 1) / factor * 1.5 + 1
    assert_trees_close(mean, expected, **within(expected, terms=24))
