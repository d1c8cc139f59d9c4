"""What varies between ranks and what agrees: wrong uses of psum, psum_invariant, pvary and whole leaves are named."""

import re

import pytest
import torch

import fshard as fs
from fshard.testing import assert_trees_close
from tests.ranks import on_ranks
from tests.trees import normal, one_axis, two_axes

FULL = {"w": normal(1)(6, 3), "b": normal(2)(5)}
STRATEGIES = {
    "ddp": lambda mesh: fs.ddp(mesh),
    "zero3": lambda mesh: fs.zero3(mesh, min_shard_elements=6),
}


def squares(params):
    full = fs.gather(params)
    return full["w"].square().sum() + full["b"].square().sum()


def refused(f, params, text, **options):
    with pytest.raises(ValueError, match=re.escape(text)):
        fs.value_and_grad(f, **options)(params)


@pytest.mark.parametrize("strategy", ("ddp", "zero3"))
@on_ranks(3)
def test_a_loss_that_is_reduced_already(strategy):
    """Its gradients would be too small by the number of ranks."""
    text = (
        "value_and_grad: expected the loss to be this rank's own, got one reduced over 'shard' already, by "
        "fs.objective or fs.psum_invariant; return the loss of its batch, which is reduced for you, or sum parts "
        "of it by fs.psum"
    )
    mesh = one_axis()
    axis, params = fs.axis_of(mesh), fs.shard(FULL, STRATEGIES[strategy](mesh))
    refused(lambda p: fs.objective(squares(p), like=p), params, text)
    refused(lambda p: 0.5 * fs.psum_invariant(squares(p), axis) / 2 + 1, params, text, reduce="sum")
    refused(lambda p: (fs.psum_invariant(squares(p), axis), torch.tensor(2)), params, text, reduce="weighted")


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(3)
def test_sums_that_a_rank_goes_on_with_are_right(strategy):
    """psum is its own transpose, and pvary hands back what psum_invariant gave: every rank's loss has the sum."""
    mesh = one_axis()
    axis, params = fs.axis_of(mesh), fs.shard(FULL, STRATEGIES[strategy](mesh))
    value, grads = fs.value_and_grad(lambda p: fs.psum(squares(p), axis))(params)
    again = fs.value_and_grad(lambda p: fs.pvary(fs.psum_invariant(squares(p), axis), axis))(params)
    assert_trees_close((value, fs.unshard(grads)), (again[0], fs.unshard(again[1])))
    assert_trees_close(fs.unshard(grads), fs.tree_map(lambda x: 2 * 3 * x, FULL))


@on_ranks(2)
def test_maths_on_a_whole_leaf():
    """Its gradient would stay this rank's own part of a sum."""
    text = (
        "value_and_grad: gradients would stay unsummed\n"
        "  ['b']: expected gather or pvary, got maths on a leaf that ranks of 'shard' hold whole\n"
        "To fix: gather these leaves, or hand them to each rank's own maths by fs.pvary, so that gradients are "
        "summed."
    )
    mesh = one_axis()
    axis = fs.axis_of(mesh)
    for name, strategy in STRATEGIES.items():
        params = fs.shard(FULL, strategy(mesh))

        def loss_of(p, b):
            return squares(p) + (b * (1 + mesh.get_rank())).sum()

        refused(lambda p: loss_of(p, p["b"].local), params, text)
        value, grads = fs.value_and_grad(lambda p: loss_of(p, fs.pvary(p["b"].local, axis)))(params)
        expected = fs.value_and_grad(lambda p: loss_of(p, fs.gather(p)["b"]))(params)
        assert_trees_close((value, grads), expected)
        if name != "ddp":
            # A rank's own rows are its own part of the sum.
            fs.value_and_grad(lambda p: squares(p) + p["w"].local.sum())(params)


@on_ranks(4)
def test_a_loss_that_differs_over_an_axis_that_stays_split():
    mesh = two_axes(4)
    tp = fs.axis_of(mesh["replicate"])
    layout = fs.compose(fs.fully_shard(mesh["shard"]), fs.split_dim(tp, dim=1))
    params = fs.shard({"w": normal(1)(6, 4)}, layout)
    text = "value_and_grad: expected a loss that agrees between ranks of 'replicate', over which it is not reduced"
    refused(lambda p: fs.gather(p)["w"].square().sum(), params, text)
    value, grads = fs.value_and_grad(lambda p: fs.psum_invariant(fs.gather(p)["w"].square().sum(), tp))(params)
    assert_trees_close(value, normal(1)(6, 4).square().sum())
    assert_trees_close(fs.unshard(grads), {"w": 2 * normal(1)(6, 4)})


@on_ranks(2)
def test_collectives_of_sharded_leaves_that_mean_something_else():
    mesh = one_axis()
    params = fs.shard(FULL, fs.zero2(mesh, min_shard_elements=6))
    whole = "expected one that varies between ranks, got a leaf that ranks hold whole"
    split = "expected one that agrees between ranks, got a leaf that is split over the axis"
    for collective, leaf, text in ((fs.psum_invariant, "b", whole), (fs.pmean, "b", whole), (fs.pvary, "w", split)):
        with pytest.raises(ValueError, match=re.escape(f"['{leaf}']: {text}")):
            collective({leaf: params[leaf]}, fs.axis_of(mesh))
