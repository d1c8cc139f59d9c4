"""The state of transforms: threaded through the verbs, kept and moved."""

import io
from functools import partial

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.shard import local_piece
from tests.ranks import my_rank, on_ranks
from tests.test_law_purity import unchanged
from tests.transforms.laws import SGD
from tests.trees import assert_same_bits, every_bit, normal, one_axis, two_axes
from tests.unit_models import filled

ROWS = 4


def full_tree():
    draw = normal()
    return {"w": draw(5, 3), "b": [draw(3)], "fixed": draw(2), "none": None}


def make_params(mesh, **options):
    transform = fs.quantize(mesh, gather=False, scatter=True, block=4, **options)
    return fs.shard(full_tree(), transform, frozen=lambda path: "fixed" in path)


def loss(params, x):
    full = fs.gather(params)
    return torch.tanh(x @ full["w"] + full["b"][0]).square().sum()


def microbatches(count):
    draw = normal(my_rank() + 1)
    return [draw(ROWS, 5) for _ in range(count)]


@on_ranks(1, 2, 3, 4)
def test_accumulate_hands_the_state_from_microbatch_to_microbatch():
    params, batches = make_params(one_axis()), microbatches(3)
    state = fs.transform_state(params)
    with unchanged(params, state):
        _, grads, after = fs.accumulate(loss, reduce="sum", communicate="each", transform_state=state)(params, batches)
    expected, last = None, state
    for batch in batches:
        _, part, last = fs.value_and_grad(loss, reduce="sum", transform_state=last)(params, batch)
        expected = part if expected is None else fs.tree_map(torch.add, expected, part)
    assert_same_bits(fs.tree_leaves((grads, after)), fs.tree_leaves((expected, last)))
    _, grads, after = fs.accumulate(loss, reduce="sum", communicate="once", transform_state=state)(params, batches)
    full = fs.gather(params)
    local = [torch.func.grad(loss)({k: full[k] for k in ("w", "b")}, batch) for batch in batches]
    total = fs.tree_map(lambda a, b, c: a + b + c, *local) | {"fixed": None, "none": None}
    expected = fs.scatter_grads(total, like=params, reduce="sum", transform_state=state)
    assert_same_bits(fs.tree_leaves((grads, after)), fs.tree_leaves(expected))


def step_of(state, x, donate=False):
    _, grads, after = fs.value_and_grad(loss, transform_state=state.transform_state)(state.params, x)
    return fs.update(SGD, state, grads, donate=donate, transform_state=after)


@pytest.mark.parametrize("donate", (False, True))
@on_ranks(2)
def test_a_train_state_holds_it(donate):
    (x,) = microbatches(1)
    first = fs.TrainState.create(make_params(one_axis()), SGD)
    assert_same_bits(fs.tree_leaves(first.transform_state), fs.tree_leaves(fs.transform_state(first.params)))
    assert not any(row.any() for row in fs.tree_leaves(first.transform_state))
    assert [first.transform_state[name] for name in ("fixed", "none")] == [None, None]
    second = step_of(first, x)
    third = step_of(second, x)
    again = step_of(step_of(fs.TrainState.create(make_params(one_axis()), SGD), x, donate), x, donate)
    assert_same_bits(fs.tree_leaves(again), fs.tree_leaves(third))
    assert not fs.unshard(second.transform_state)["w"].equal(fs.unshard(third.transform_state)["w"])
    # Where update is given none, the state stays what it was.
    kept = fs.update(SGD, second, fs.tree_map(torch.zeros_like, trained(second.params)))
    assert_same_bits(fs.tree_leaves(kept.transform_state), fs.tree_leaves(second.transform_state))


def trained(params):
    return {**params, "fixed": None}


@pytest.mark.rows(1)
@on_ranks(2, 4)
def test_it_survives_a_round_trip_and_training_goes_on_with_the_same_bits(world_size):
    """To full tensors and back, on one axis and on two, and through a file."""
    mesh, (x,) = two_axes(world_size), microbatches(1)
    inner = fs.quantize(mesh["shard"], gather=False, scatter=True, block=4)
    outer = fs.quantize(mesh["replicate"], gather=False, scatter=True, block=4)
    for transform in (inner, fs.compose(fs.replicate(mesh["replicate"]), inner), fs.compose(outer, inner)):
        params = fs.shard(full_tree(), transform, frozen=lambda path: "fixed" in path)
        state = step_of(fs.TrainState.create(params, SGD), x)
        rows, whole = state.transform_state, fs.unshard(state.transform_state)
        pairs = zip(sharded_leaves(rows), fs.tree_leaves(whole), strict=True)
        for row, full in pairs:
            assert full.shape[0] == row.spec.shape[0]
            assert_same_bits(local_piece(full, row.spec), row.local)
        file = io.BytesIO()
        torch.save(fs.tree_leaves(state), file)
        file.seek(0)
        loaded = fs.tree_map(partial(next_of, iter(torch.load(file))), state)
        assert_same_bits(fs.tree_leaves(step_of(loaded, x)), fs.tree_leaves(step_of(state, x)))


def next_of(leaves, _):
    return next(leaves)


def sharded_leaves(tree):
    if isinstance(tree, fs.Sharded):
        return [tree]
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    # In the order of tree_leaves, which sorts keys.
    children = [tree[key] for key in sorted(tree)] if isinstance(tree, dict) else children
    return [leaf for child in children for leaf in sharded_leaves(child)]


@on_ranks(2)
def test_without_a_stateful_transform_there_is_none():
    for transform in (fs.zero2(one_axis()), fs.quantize(one_axis(), scatter=True, error_feedback=False)):
        params, (x,) = fs.shard({"w": normal()(5, 3), "b": [normal()(3)]}, transform), microbatches(1)
        assert fs.transform_state(params) is None
        value, grads, state = fs.value_and_grad(loss, transform_state=None)(params, x)
        assert state is None
        assert_same_bits(fs.tree_leaves((value, grads)), fs.tree_leaves(fs.value_and_grad(loss)(params, x)))
        found, state = fs.scatter_grads(fs.gather(params), like=params, transform_state=None)
        assert state is None
        assert_same_bits(fs.tree_leaves(found), fs.tree_leaves(fs.scatter_grads(fs.gather(params), like=params)))


@on_ranks("2 processes")
def test_processes():
    (x,) = microbatches(1)
    state = fs.TrainState.create(make_params(one_axis()), SGD)
    for _ in range(3):
        state = step_of(state, x)
    return every_bit(fs.unshard(state))


@on_ranks(2)
def test_a_module_trains_with_it_by_units():
    """Two steps, each rank's own batch; the tree of a model's parameters is that of its state."""
    model = fs.functionalize(filled(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))), nn.Linear)
    layout = fs.quantize(one_axis(), scatter=True, block=4)
    state = fs.TrainState.create(model.init(fs.zero3(one_axis(), layout=layout, merge_bytes=0)), SGD)
    assert list(state.transform_state) == list(state.params)
    (x,), last = microbatches(1), None
    for _ in range(2):
        run = fs.value_and_grad(lambda p: model.apply(p, x).square().mean(), transform_state=state.transform_state)
        value, grads, after = run(state.params)
        state = fs.update(SGD, state, grads, transform_state=after)
        assert last is None or value < last
        last = value
