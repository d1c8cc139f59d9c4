"""Operators that are there for what they do: asserts and callbacks run in every call of a jitted function."""

import re

import pytest
import torch

import fshard as fs
from tests.trees import normal

SEEN: list[float] = []
# Inductor's modules warn when they are imported.
INDUCTOR = pytest.param("inductor", marks=(pytest.mark.slow, pytest.mark.filterwarnings("ignore")))
BACKENDS = ("graph", INDUCTOR)


@torch.library.custom_op("fshard_tests::note", mutates_args=())
def note(x: torch.Tensor) -> None:
    """Note a value."""
    SEEN.append(float(x))


@note.register_fake
def _(x):
    return None


@pytest.mark.parametrize("backend", BACKENDS)
def test_callbacks_run_in_every_call(backend):
    def f(x):
        note(x.sum())
        return x * 2

    jitted = fs.jit(f, backend=backend)
    SEEN.clear()
    for n in range(3):
        assert jitted(torch.ones(2) * n).equal(2 * torch.ones(2) * n)
    assert SEEN == [0.0, 2.0, 4.0]
    assert len(jitted.traces) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_asserts_raise(backend):
    def f(x):
        torch._assert_async(x.isfinite().all(), "not finite")
        return x * 2

    jitted = fs.jit(f, backend=backend)
    jitted(torch.ones(2))
    with pytest.raises(RuntimeError, match="not finite"):
        jitted(torch.tensor([1.0, torch.nan]))


def test_effects_of_a_step_stay_before_its_early_updates():
    """A step that notes its loss and updates in place has the eager step's bits, and notes what it notes."""
    tx = fs.from_torch(torch.optim.AdamW, lr=1e-2)
    params = {f"w{n}": normal(n)(5, 5) for n in range(3)}

    def step(state, x):
        def loss(params):
            out = x
            for w in fs.gather(params).values():
                out = (out @ w).tanh()
            return out.square().mean()

        value, grads = fs.value_and_grad(loss)(state.params)
        note(value)
        return fs.update(tx, state, grads), value

    sharded = fs.shard(params, fs.zero3(fs.init_mesh({"shard": 1}, device="cpu")))
    values, x = [], normal(7)(4, 5)
    for f in (step, fs.jit(step, donate_argnums=0)):
        SEEN.clear()
        state = fs.TrainState.create(fs.tree_map(torch.clone, sharded), tx)
        for _ in range(3):
            state, value = f(state, x)
            values.append(float(value))
        assert values[-3:] == SEEN
    assert values[:3] == values[3:]


def test_ranges_of_the_profiler_are_left_out():
    def f(x):
        with torch.profiler.record_function("double"):
            return x * 2

    graph = fs.make_graph(f)(torch.ones(2))
    assert [moment.operator for moment in graph.moments] == ["aten.mul"]


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled", "ignore:Error detected in Sqrt")
def test_a_search_for_anomalies_runs_the_function_as_it_is():
    """It looks at every value, and its report names the operator of the eager function."""
    jitted = fs.jit(lambda x: fs.value_and_grad(lambda p: p["w"].sqrt().sum())({"w": x}))
    with torch.autograd.detect_anomaly(check_nan=True), pytest.raises(RuntimeError, match="SqrtBackward0"):
        jitted(-torch.ones(2))
    assert jitted.traces == []


def choose(x, w):
    return torch.cond(x.sum() > 0, lambda x: (x @ w).sin(), lambda x: x * w - 1, (x,))


def double(x, w):
    return torch.while_loop(lambda n, x: n < 3, lambda n, x: (n + 1, x * w), (torch.zeros((), dtype=torch.int64), x))[1]


# Eager calls of torch's control flow compile.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("f", (choose, double), ids=lambda f: f.__name__)
def test_control_flow_of_torch_is_part_of_a_graph(f):
    def step(params, x):
        def loss(params, x):
            return f(x, fs.gather(params)["w"]).square().mean()

        return fs.value_and_grad(loss)(params, x) if f is not double else loss(params, x)

    params = fs.shard({"w": normal()(3, 3)}, fs.zero3(fs.init_mesh({"shard": 1}, device="cpu")))
    jitted = fs.jit(step)
    for sign in (1, -1):
        x = sign * normal(1)(3, 3).abs()
        out, expected = jitted(params, x), step(params, x)
        for a, b in zip(fs.tree_leaves(out), fs.tree_leaves(expected), strict=True):
            torch.testing.assert_close(*(fs.unshard(given) for given in (a, b)), rtol=1e-12, atol=1e-12)
    assert len(jitted.traces) == 1


@pytest.mark.filterwarnings("ignore")
def test_a_branch_that_draws_needs_a_key_too():
    def f(x):
        return torch.cond(x.sum() > 0, lambda x: x + torch.rand(3), lambda x: -x, (x,))

    expected = (
        "jit: expected random numbers with a key, got aten.rand.default without one; pass model.apply(..., key=...) a "
        "key of each step by fs.fold_in(state.key, state.step)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        fs.jit(f)(torch.ones(3))


def test_a_key_serves_its_own_call_alone():
    drops = fs.functionalize(torch.nn.Dropout())
    for f in (lambda x: drops.apply({}, x, key=0) + torch.rand(3), lambda x: torch.rand(3) + drops.apply({}, x, key=0)):
        with pytest.raises(ValueError, match=r"expected random numbers with a key, got aten\.rand\.default"):
            fs.jit(f)(torch.ones(3))
