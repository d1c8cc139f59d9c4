"""The Inductor backend: the eager step within rounding, donated in place, and refused where order matters."""

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


def test_random_numbers_are_refused():
    model = fs.functionalize(nn.Dropout(0.5))
    text = (
        "^jit: the function draws random numbers, whose order Inductor does not keep; "
        'needed backend="graph", which keeps the order of what seeds and what draws$'
    )
    with pytest.raises(ValueError, match=text):
        fs.jit(lambda x, key: model.apply({}, x, key=key), backend="inductor")(X, fs.fold_in(0, 1))
