"""The Inductor backend: the eager step within rounding, donated in place, whose kernels hold no collective."""

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.ext import _compat
from fshard.jit.nodes import find_inputs
from fshard.rounding import tolerance
from fshard.testing import assert_trees_close
from tests.ext.jit.test_graph import STARTS, UNITS, graph_of, is_wait, nodes_of
from tests.tolerance import within
from tests.trees import normal, one_axis

# Inductor and what it imports warn of their own.
pytestmark = pytest.mark.filterwarnings("ignore")

FULL = {"w": normal(1)(6, 5), "b": normal(2)(5)}
X = normal(3)(4, 6)

# AdamW divides a gradient by its size: what rounds in it, a sum over rows, moves a leaf by the rate times that,
# relative to the smallest gradient, here above a thousandth of the largest; and so in each step.
RATE, STEPS = 0.1, 3
ATOL = tolerance(torch.float64, len(X), scale=RATE * 1000, steps=STEPS)


# Without fused kernels, torch's class reads the number of steps, and computes with it on the host.
@pytest.mark.parametrize("hyper", [{"fused": True}, pytest.param({}, marks=pytest.mark.slow)], ids=str)
def test_a_step_is_the_eager_one_within_rounding(hyper):
    tx = fs.chain(fs.clip_by_global_norm(1.0), fs.from_torch(torch.optim.AdamW, lr=RATE, **hyper))

    def loss(params, x):
        full = fs.gather(params)
        return torch.tanh(x @ full["w"] + full["b"]).square().mean()

    def step(state, x):
        value, grads = fs.value_and_grad(loss)(state.params, x)
        return fs.update(tx, state, grads), value

    jitted = fs.jit(step, donate_argnums=0, backend="inductor")
    eager = fs.TrainState.create(fs.shard(FULL, fs.zero3(one_axis())), tx)
    state = fs.tree_map(torch.clone, eager)
    places = [leaf.data_ptr() for leaf in fs.tree_leaves(state)]
    for _ in range(STEPS):
        (eager, expected), (state, value) = step(eager, X), jitted(state, X)
        assert_trees_close((fs.unshard(state.params), value), (fs.unshard(eager.params), expected), rtol=0.0, atol=ATOL)
    assert [leaf.data_ptr() for leaf in fs.tree_leaves(state)] == places
    assert jitted.traces == ["the first call"]


def write(x):
    """Writes to what a view of a kernel's result looks at."""
    y = x.sin() * 2
    columns = y.t()
    y.add_(1)
    return columns * 3 + columns.cos(), y


def ahead(x):
    """A view into an argument, which Inductor must begin where it does."""
    part = x[1, 1:].as_strided((5,), (2,))
    return part.sin() * part.cos() + 1


@pytest.mark.slow
def test_views_share_memory_and_random_numbers_are_those_of_eager_code():
    model = fs.functionalize(nn.Sequential(nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.1)))
    drops = lambda x: model.apply({}, x, key=fs.fold_in(0, 1)).sin()  # noqa: E731
    for f, x in ((write, X), (ahead, normal(4)(3, 10)), (drops, X)):
        # Kernels of Inductor's own for sines and dropout.
        assert_trees_close(fs.jit(f, backend="inductor")(x), f(x), **within(f(x), terms=2))


def communication(nodes):
    return [str(node.target) for node in nodes if node.target in STARTS or is_wait(node)]


@pytest.mark.slow
def test_kernels_lie_between_the_collectives_of_the_graph():
    # Loaded here, because it takes a second, and each process of `make test` would load it at its beginning.
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    # Else there is no code where an earlier run has left its kernels.
    with config.patch(fx_graph_cache=False):
        (inductor, _), code = run_and_get_code(lambda: graph_of(backend="inductor", prefetch=1))
    assert code
    for text in code:
        assert not any(word in text for word in ("fshard", "_c10d_functional", "wait_tensor", "copy_(", "_fused_adamw"))
    nodes = nodes_of(inductor)
    assert communication(nodes) == communication(nodes_of(graph_of(prefetch=1)[0]))
    # Units alike share their kernels, and donated leaves are written in their place.
    compiled = _compat.compile_by_inductor.__module__
    pieces = [n.target for n in nodes if n.op == "call_function" and getattr(n.target, "__module__", "") == compiled]
    assert len(set(pieces)) <= len(pieces) - (UNITS - 2)
    given = find_inputs(inductor.traced.module.graph)
    assert len({out for out in nodes[-1].args[0] if out in given}) == len(given) - 1
