"""What a jitted function may not do, each with the text of its error."""

import inspect
import math
import re

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


# Each looks in its first line.
def branch(x):
    return x if x.sum() > 0 else -x


def as_float(x):
    return x * (1 if float(x.sum()) > 0 else 2)


def asks(x):
    return x if len(x[x > 1]) else -x


def of_math(count):
    return 0.1 * math.cos(count)


def test_looking_at_values_names_the_line():
    """Also in a schedule; eagerly that may be one of numbers."""
    state, params = fs.TrainState.create({"w": X}, tx := fs.sgd(lr=of_math)), {"w": X}
    fs.update(tx, state, params)
    calls = {f: lambda f=f: fs.jit(f)(X) for f in (branch, as_float, asks)}
    for f, call in (calls | {of_math: lambda: fs.jit(lambda s, g: fs.update(tx, s, g))(state, params)}).items():
        line = inspect.getsource(f).splitlines()[1].strip()
        with pytest.raises(ValueError, match=rf"^{LOOK}{re.escape(__file__)}:\d+: ") as caught:
            call()
        assert str(caught.value).partition(': "')[2] == f'{line}"{NO_VALUES}'


ARITHMETIC = (
    lambda x: x * x.sum().item() + 1,
    lambda x: x * sum(x.tolist()),
    lambda x: x[x > 1],
    lambda x: (x - 1).nonzero(),
)


def test_values_may_be_used_in_arithmetic(capsys):
    """Where no branch depends on them: they are computed in each call. Prints show what a trace has, once."""
    for f in ARITHMETIC:
        jitted = fs.jit(f)
        for x in (X, X + 1, 2 * X):
            assert jitted(x).equal(f(x))
        assert jitted.traces == ["the first call"]
    jitted = fs.jit(lambda x: (print(x), x)[1])
    assert jitted(X).equal(jitted(X))
    assert capsys.readouterr().out.count("FakeTensor") == 1


CLOSED = torch.ones(3)


def writes_inside(x):
    CLOSED.add_(1)
    return x + CLOSED


def writes_argument(tree):
    tree["w"].mul_(2)
    tree["view"][0].zero_()
    return tree


def scale(x, by):
    return x * by


KEY_NEEDED = (
    "jit: expected random numbers with a key, got {} without one; pass model.apply(..., key=...) a key of each step by "
    "fs.fold_in(state.key, state.step)"
)
REMEDY = "return what is new; a jitted function writes to donated arguments alone."
NUMBERS = "argnums to be numbers of arguments by position, from 0"
DROPS = fs.functionalize(torch.nn.Dropout())
ROWS = [
    (
        lambda: fs.jit(writes_inside)(X),
        "jit: the function writes to tensors\n"
        "  (closure): expected a new tensor, got a write by aten.add_.Tensor\n"
        f"To fix: {REMEDY}",
    ),
    (
        lambda: fs.jit(writes_argument)({"w": X.clone(), "view": X.clone()}),
        "jit: the function writes to tensors\n"
        "  [0][0]['w']: expected a new tensor, got a write by aten.mul_.Tensor\n"
        "  [0][0]['view']: expected a new tensor, got a write by aten.zero_.default\n"
        f"To fix: {REMEDY}",
    ),
    (
        lambda: fs.jit(lambda x: {"x": x, "n": 3, "text": "text", "none": None})(X),
        "jit: the function returns what is no tensor\n"
        "  ['n']: expected a tensor, got an int\n"
        "  ['text']: expected a tensor, got a str\n"
        "To fix: return tensors; a graph computes nothing else, and a number would stay as it is in the first "
        "call.",
    ),
    (lambda: fs.jit(torch.nn.functional.dropout)(X), KEY_NEEDED.format("aten.bernoulli_.float")),
    # A key serves its own call alone, whether it comes before or behind.
    (lambda: fs.jit(lambda x: DROPS.apply({}, x, key=0) + torch.rand(3))(X), KEY_NEEDED.format("aten.rand.default")),
    (lambda: fs.jit(lambda x: torch.rand(3) + DROPS.apply({}, x, key=0))(X), KEY_NEEDED.format("aten.rand.default")),
    (lambda: fs.jit(scale, donate_argnums=-1), f"jit: expected donate_{NUMBERS}, got -1"),
    (lambda: fs.jit(scale, static_argnums=("by",)), f"jit: expected static_{NUMBERS}, got ('by',)"),
    (lambda: fs.jit(scale, donate_argnums=True), f"jit: expected donate_{NUMBERS}, got True"),
    (lambda: fs.jit(scale, static_argnames=1), "jit: expected static_argnames to be names of arguments, got 1"),
    (lambda: fs.jit(3), "jit: expected f to be a function, got an int"),
    (
        lambda: fs.jit(scale, backend="fast"),
        "jit: expected backend to be one of ('graph', 'inductor') or a function, got 'fast'",
    ),
    (
        lambda: fs.jit(lambda state, x: x, donate_argnums=0)({"a": X}, X.clone()),
        "jit: expected the result to have a part of its own with the structure of donated argument 0, got none; return "
        "its successor, such as the new state, or do not donate it",
    ),
]


def test_refusals():
    for run, text in ROWS:
        with refused(text):
            run()
    for call in (
        lambda: fs.jit(scale, static_argnums=1)(X, [2]),
        lambda: fs.jit(scale)(X, {1}),
        lambda: fs.jit(scale)(X, by={1}),
    ):
        with pytest.raises(TypeError, match=r"expected tensors, in dicts, .* can be hashed, got a (list|set)$"):
            call()


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
    """And what was donated whole."""

    def f(x):
        raise KeyError("mine")

    jitted, x = fs.jit(f, donate_argnums=0), X.clone()
    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            jitted(x)
    assert (jitted.traces, x.tolist()) == ([], X.tolist())


@on_ranks(2, timeout=3.0)
def test_a_trace_runs_no_collective_of_constants():
    axis = fs.axis_of(one_axis())

    # One rank alone may have to trace anew, and the others would not take part.
    assert fs.jit(lambda x: fs.psum(torch.tensor(3.0), axis) * x)(X).equal(6 * X)
