"""What a jitted function may not do, each with the text of its error."""

import inspect
import math
import re
from functools import partial

import pytest
import torch

import fshard as fs
from tests.jit.steps import refused
from tests.ranks import on_ranks
from tests.trees import one_axis

LOOK = "jit: expected no look at the value of a tensor, which a trace does not have, got one in "
NO_VALUES = (
    "; use torch.where in the place of a branch, a tensor in the place of item(), fs.schedules or "
    "fs.from_torch_scheduler for a learning rate"
)
X = torch.arange(3.0)


def branch(x):
    return x if x.sum() > 0 else -x


def loop(x):
    while x.sum() < 3:
        x = x + 1
    return x


def as_float(x):
    return x * (1 if float(x.sum()) > 0 else 2)


def asks(x):
    return x if len(x[x > 1]) else -x


LSTM = torch.nn.LSTM(4, 5)


def recurs(x):
    with torch.enable_grad():
        parameters = {name: p.detach().requires_grad_() for name, p in LSTM.named_parameters()}
        out = torch.func.functional_call(LSTM, parameters, (x.detach(),))[0].sum()
        return dict(zip(parameters, torch.autograd.grad(out, parameters.values())))


# Each in its first line.
LOOKS = (branch, loop, as_float, asks)


@pytest.mark.parametrize("f", LOOKS, ids=lambda f: f.__name__)
def test_looking_at_values_names_the_line(f):
    line = inspect.getsource(f).splitlines()[1].strip()
    place = re.escape(f"{__file__}:") + r"\d+" + re.escape(f': "{line}"{NO_VALUES}')
    with pytest.raises(ValueError, match=f"^{LOOK}{place}$"):
        fs.jit(f)(X)


def branching(count):
    return 0.1 if count < 10 else 0.01


def of_math(count):
    return 0.1 * math.cos(count)


@pytest.mark.parametrize("schedule", (branching, of_math))
@pytest.mark.parametrize("make", (fs.sgd, partial(fs.from_torch, torch.optim.SGD)))
def test_a_schedule_of_numbers_names_the_line_and_schedules_of_tensors(make, schedule):
    tx, params = make(lr=schedule), {"w": torch.ones(2)}
    state = fs.TrainState.create(params, tx)
    fs.update(tx, state, params)
    line = inspect.getsource(schedule).splitlines()[1].strip()
    with pytest.raises(ValueError, match=f"^{LOOK}") as caught:
        fs.jit(lambda state, grads: fs.update(tx, state, grads))(state, params)
    assert str(caught.value).partition(': "')[2] == f'{line}"{NO_VALUES}'


def prints(x):
    print(x, x.sum().item())
    return x


def test_prints_show_what_a_trace_has_once(capsys):
    """As in JAX: no values."""
    jitted = fs.jit(prints)
    for _ in range(2):
        assert jitted(X).equal(X)
    assert capsys.readouterr().out.count("FakeTensor") == 1


ARITHMETIC = {
    "item": lambda x: x * x.sum().item() + 1,
    "a list": lambda x: x * sum(x.tolist()),
    "a selection": lambda x: x[x > 1],
    "places": lambda x: (x - 1).nonzero(),
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_values_may_be_used_in_arithmetic(name):
    """Where no branch depends on them: they are computed in each call."""
    f = ARITHMETIC[name]
    jitted = fs.jit(f)
    for x in (X, X + 1, 2 * X):
        assert jitted(x).equal(f(x))
    assert jitted.traces == ["the first call"]


CLOSED = torch.ones(3)


def writes_inside(x):
    CLOSED.add_(1)
    return x + CLOSED


def writes_argument(tree):
    tree["w"].mul_(2)
    tree["view"][0].zero_()
    return tree


def drops(x):
    return torch.nn.functional.dropout(x, 0.5)


def scale(x, by):
    return x * by


REMEDY = "return what is new; a jitted function writes to donated arguments alone."
ROWS = {
    "a write to a closure": (
        lambda: fs.jit(writes_inside)(X),
        "jit: the function writes to tensors\n"
        "  (closure): expected a new tensor, got a write by aten.add_.Tensor\n"
        f"To fix: {REMEDY}",
    ),
    "writes to arguments": (
        lambda: fs.jit(writes_argument)({"w": X.clone(), "view": X.clone()}),
        "jit: the function writes to tensors\n"
        "  [0][0]['w']: expected a new tensor, got a write by aten.mul_.Tensor\n"
        "  [0][0]['view']: expected a new tensor, got a write by aten.zero_.default\n"
        f"To fix: {REMEDY}",
    ),
    "results that are no tensors": (
        lambda: fs.jit(lambda x: {"x": x, "n": 3, "text": "text", "none": None})(X),
        "jit: the function returns what is no tensor\n"
        "  ['n']: expected a tensor, got an int\n"
        "  ['text']: expected a tensor, got a str\n"
        "To fix: return tensors; a graph computes nothing else, and a number would stay as it is in the first "
        "call.",
    ),
    "no key": (
        lambda: fs.jit(drops)(X),
        "jit: expected random numbers with a key, got aten.bernoulli_.float without one; pass "
        "model.apply(..., key=...) a key of each step by fs.fold_in(state.key, state.step)",
    ),
    "negative argnums": (
        lambda: fs.jit(scale, donate_argnums=-1),
        "jit: expected donate_argnums to be numbers of arguments by position, from 0, got -1",
    ),
    "argnums that are no numbers": (
        lambda: fs.jit(scale, static_argnums=("by",)),
        "jit: expected static_argnums to be numbers of arguments by position, from 0, got ('by',)",
    ),
    "argnums of a bool": (
        lambda: fs.jit(scale, donate_argnums=True),
        "jit: expected donate_argnums to be numbers of arguments by position, from 0, got True",
    ),
    "a name that is no name": (
        lambda: fs.jit(scale, static_argnames=1),
        "jit: expected static_argnames to be names of arguments, got 1",
    ),
    "no function": (lambda: fs.jit(3), "jit: expected f to be a function, got an int"),
    "no successor": (
        lambda: fs.jit(lambda state, x: x, donate_argnums=0)({"a": X}, X.clone()),
        "jit: expected the result to have a part of its own with the structure of donated argument 0, got none; return "
        "its successor, such as the new state, or do not donate it",
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_refusals(name):
    run, text = ROWS[name]
    with refused(text):
        run()


def test_values_that_cannot_be_hashed_are_refused():
    for call in (
        lambda: fs.jit(scale, static_argnums=1)(X, [2]),
        lambda: fs.jit(scale)(X, {1}),
        lambda: fs.jit(scale)(X, by={1}),
    ):
        with pytest.raises(
            TypeError, match=r"expected tensors, in dicts, .* values that can be hashed, got a (list|set)$"
        ):
            call()


def test_an_unknown_backend_is_refused():
    with pytest.raises(
        ValueError, match=r"^jit: expected backend to be one of \(.*'graph'.*\) or a function, got 'fast'$"
    ):
        fs.jit(scale, backend="fast")


def test_a_number_that_changes_is_refused_and_the_old_one_still_serves():
    jitted = fs.jit(scale)
    assert jitted(X, 2.0).equal(2 * X)
    text = (
        "jit: leaves that are part of the graph have changed\n"
        "  [0][1]: expected a tensor, got 3.0, a leaf that is no tensor and was 2.0 before\n"
        "To fix: pass tensors, which may change, or make it a static argument: each value has its own trace."
    )
    with refused(text):
        jitted(X, 3.0)
    assert jitted(X, 2.0).equal(2 * X)
    assert len(jitted.traces) == 1


def test_an_error_of_the_function_is_its_own_and_leaves_no_trace():
    def f(x):
        raise KeyError("mine")

    jitted = fs.jit(f)
    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            jitted(X)
    assert jitted.traces == []


@on_ranks(2, timeout=3.0)
def test_a_trace_runs_no_collective_of_constants():
    params = fs.shard({"w": torch.ones(3, 2)}, fs.zero3(one_axis(), min_shard_elements=0))
    axis = fs.axis_of(one_axis())

    # One rank alone may have to trace anew, and the others would not take part.
    def f(x):
        return fs.psum(torch.tensor(3.0), axis) * x

    assert fs.jit(f)(params["w"].local).sum() >= 0


def test_a_recurrent_network_is_jitted_without_onednn():
    before = torch.backends.mkldnn.set_flags(False)
    try:
        expected, found = (f(torch.ones(2, 3, 4)) for f in (recurs, fs.jit(recurs)))
    finally:
        torch.backends.mkldnn.set_flags(before[0])
    assert all(found[name].equal(grad) for name, grad in expected.items())
