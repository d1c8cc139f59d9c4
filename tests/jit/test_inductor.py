"""The Inductor backend: the eager step within rounding, donated in place, with the same random numbers."""

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.testing import assert_trees_close, spmd
from tests.trees import normal, one_axis

# Inductor and what it imports warn of their own.
pytestmark = pytest.mark.filterwarnings("ignore")

FULL = {"w": normal(1)(6, 5), "b": normal(2)(5)}
X = normal(3)(4, 6)

# AdamW divides a gradient by its size: what rounds in it, in sums of some ten terms, moves a leaf by the rate times
# that, relative to the smallest gradient, here above a thousandth of the largest; and so in each of three steps.
ATOL = 3 * 0.1 * 10 * 1000 * torch.finfo(torch.float64).eps


def assert_close_to_eager():
    params = fs.shard(FULL, fs.zero3(one_axis(), min_shard_elements=0))
    tx = fs.chain(fs.clip_by_global_norm(1.0), fs.from_torch(torch.optim.AdamW, lr=0.1, fused=True))

    def loss(params, x):
        full = fs.gather(params)
        return torch.tanh(x @ full["w"] + full["b"]).square().mean()

    def step(state, x):
        value, grads = fs.value_and_grad(loss)(state.params, x)
        return fs.update(tx, state, grads), value

    jitted = fs.jit(step, donate_argnums=0, backend="inductor")
    eager, state = (fs.TrainState.create(params, tx) for _ in range(2))
    state = fs.tree_map(torch.clone, state)
    places = [leaf.data_ptr() for leaf in fs.tree_leaves(state)]
    for _ in range(3):
        (eager, expected), (state, value) = step(eager, X), jitted(state, X)
        assert_trees_close((fs.unshard(state.params), value), (fs.unshard(eager.params), expected), rtol=0.0, atol=ATOL)
    assert [leaf.data_ptr() for leaf in fs.tree_leaves(state)] == places
    assert jitted.traces == ["the first call"]


def test_one_rank():
    assert_close_to_eager()


@pytest.mark.slow
def test_processes(workers):
    spmd(assert_close_to_eager, workers(2), timeout=240.0)


def test_random_numbers_are_those_of_eager_code():
    model, key = fs.functionalize(nn.Sequential(nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.1))), fs.fold_in(0, 1)
    jitted = fs.jit(lambda x, key: model.apply({}, x, key=key).sin(), backend="inductor")
    # A few roundings of numbers below a few ones each.
    atol = 10 * torch.finfo(X.dtype).eps
    for n in range(2):
        expected = model.apply({}, X, key=fs.fold_in(key, n)).sin()
        torch.testing.assert_close(jitted(X, fs.fold_in(key, n)), expected, rtol=0.0, atol=atol)


def test_views_of_what_a_kernel_computes_share_its_memory():
    def write(x):
        y = x.sin() * 2
        columns = y.t()
        y.add_(1)
        return columns * 3 + columns.cos(), y

    found, expected = fs.jit(write, backend="inductor")(X), write(X)
    assert_trees_close(found, expected, rtol=0.0, atol=10 * torch.finfo(X.dtype).eps)


def test_views_into_arguments_begin_where_they_do():
    base = normal(4)(3, 10)

    def ahead(x):
        part = x[1, 1:].as_strided((5,), (2,))
        return part.sin() * part.cos() + 1

    found, expected = fs.jit(ahead, backend="inductor")(base), ahead(base)
    assert_trees_close(found, expected, rtol=0.0, atol=10 * torch.finfo(X.dtype).eps)
