"""Law 9 of jitted functions: a graph serves the calls that agree in all that its trace read, and no others."""

import math
import struct
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch.overrides import TorchFunctionMode

import fshard as fs
from tests.jit.steps import assert_alike, refused
from tests.ranks import on_ranks
from tests.trees import assert_same_bits, normal, one_axis

FIRST = "the first call"
X = torch.arange(1.0, 4.0)
C = torch.tensor([1 + 2j, 3 - 1j, 2j])


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclass(frozen=True)
class Settings:
    value: Any


@dataclass(frozen=True)
class Other:
    value: Any


class Named:
    """Equal by its name, to objects of other classes too."""

    def __init__(self, name):
        self.name = name

    def __eq__(self, other):
        return self.name == other.name

    def __hash__(self):
        return hash(self.name)


class Renamed(Named):
    pass


NAN, NEGATIVE_NAN = math.nan, struct.unpack("<d", struct.pack("<Q", 0xFFF8000000000000))[0]
# Values that Python calls equal, and which a function may tell apart.
TOLD_APART = {
    "int, float": (1, 1.0),
    "int, bool": (1, True),
    "float, complex": (1.0, 1 + 0j),
    "zeros": (0.0, -0.0),
    "complex zeros": (complex(0.0, 0.0), complex(0.0, -0.0)),
    "nans": (NAN, NEGATIVE_NAN),
    "in a tuple": ((1, ("a", 0.0)), (1, ("a", -0.0))),
    "in a NamedTuple": (Pair(1, 2), Pair(1, 2.0)),
    "a tuple, a NamedTuple": ((1, 2), Pair(1, 2)),
    "in a dataclass": (Settings((0, 0.0)), Settings((0, -0.0))),
    "dataclasses": (Settings(1), Other(1)),
    "in a frozenset": (frozenset({1}), frozenset({True})),
    "numpy's": (numpy.float32(0.0), numpy.float32(-0.0)),
    "numpy's and Python's": (numpy.float64(1.0), 1.0),
    "decimals": (Decimal("1.0"), Decimal("1.00")),
    "ranges": (range(0, 3, 2), range(0, 4, 2)),
    "classes": (Named("a"), Renamed("a")),
}


@pytest.mark.parametrize("name", TOLD_APART)
def test_values_that_python_calls_equal_have_a_graph_each(name):
    seen: list[Any] = []
    jitted = fs.jit(lambda x, value: seen.append(value) or x + len(seen), static_argnums=1)
    a, b = TOLD_APART[name]
    for value, number in ((a, 1), (b, 2), (a, 1), (b, 2)):
        assert jitted(X, value).equal(X + number)
    assert seen[0] is a
    assert seen[1] is b
    # One that is no static argument may not change at all.
    if not isinstance(a, tuple):
        jitted = fs.jit(lambda x, value: x)
        jitted(X, a)
        with pytest.raises(ValueError, match="leaves that are part of the graph have changed"):
            jitted(X, b)
        jitted(X, a)


ALIKE = {
    "nan": lambda: float("nan"),
    "a tuple": lambda: (1, 0.0, ("a", float("nan"))),
    "a dataclass": lambda: Settings((1.5, float("nan"))),
    "an object of the user's": lambda: Named("a" + str(len("b"))),
    "a dtype": lambda: torch.float32,
}


@pytest.mark.parametrize("name", ALIKE)
def test_equal_values_share_a_graph(name):
    static, leaf = fs.jit(lambda x, value: x + 1, static_argnums=1), fs.jit(lambda x, tree: x + 1)
    for _ in range(3):
        static(X, ALIKE[name]())
        leaf(X, {"value": ALIKE[name]()})
    assert static.traces == leaf.traces == [FIRST]


def test_numbers_give_the_dtypes_and_signs_of_eager_code():
    jitted, ints = fs.jit(lambda x, n: (x * n, x / n), static_argnums=1), X.int()
    for n in (1, 1.0, True, 1 + 0j, 1, 0.0, -0.0, 0.0):
        assert_same_bits(jitted(ints, n), (ints * n, ints / n))
    assert len(jitted.traces) == 6


def test_keys_of_dicts_are_told_apart():
    def f(tree):
        return {key: leaf * key for key, leaf in tree.items()}

    jitted, ints = fs.jit(f), X.int()
    for _ in range(2):
        for key in (1, 1.0, True, 0.0, -0.0):
            assert_same_bits(fs.tree_leaves(jitted({key: ints})), fs.tree_leaves(f({key: ints})))
    assert len(jitted.traces) == 5


@dataclass(frozen=True)
class Scale(fs.Wrapped):
    """Multiplies by a number, which says its own type and sign."""

    factor: Any = 1

    def gather(self, leaves, specs):
        return [full * self.factor for full in self.inner.gather(leaves, specs)]


@on_ranks(2)
def test_numbers_in_transforms_are_told_apart():
    jitted, full = fs.jit(fs.gather), {"w": torch.arange(4, dtype=torch.int32)}
    for _ in range(2):
        for factor in (1, 1.0, True, 0.0, -0.0):
            params = fs.shard(full, Scale(fs.fully_shard(one_axis()), factor))
            assert_same_bits(jitted(params)["w"], fs.gather(params)["w"])
    assert len(jitted.traces) == 5


def inference(tensor):
    with torch.inference_mode():
        return tensor.clone()


def is_same(tree):
    return tree["a"] is tree["b"]


def wrapped(tensor):
    return fs.Sharded(tensor, fs.Spec(tuple(tensor.shape)))


SAME = wrapped(X)
# What a function asks of its argument, and arguments of one shape and dtype that answer otherwise.
FACTS: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
    "is_conj": (lambda x: x.is_conj(), [C, C.conj(), C.conj().clone()]),
    "is_conj of mH": (lambda x: x.is_conj(), [C.reshape(1, 3).mT, C.reshape(1, 3).mH]),
    "is_neg": (lambda x: x.is_neg(), [X, torch._neg_view(X)]),
    "is_neg of imag": (lambda x: x.is_neg(), [C.imag, C.conj().imag]),
    "requires_grad": (lambda x: x.requires_grad, [X, X.clone().requires_grad_()]),
    "is_leaf": (lambda x: x.is_leaf, [X.clone().requires_grad_(), X.clone().requires_grad_() * 2]),
    "a parameter": (
        lambda x: isinstance(x, torch.nn.Parameter),
        [X.clone().requires_grad_(), torch.nn.Parameter(X.clone())],
    ),
    "is_inference": (lambda x: x.is_inference(), [X, inference(X)]),
    "stride": (lambda x: x.stride()[0], [normal()(3, 3), normal()(3, 3).T]),
    "is_contiguous": (lambda x: x.is_contiguous(), [X, X.repeat(2)[::2], X.flip(0)]),
    "memory format": (
        lambda x: x.is_contiguous(memory_format=torch.channels_last),
        [normal()(2, 3, 4, 4), normal()(2, 3, 4, 4).to(memory_format=torch.channels_last)],
    ),
    "layout": (lambda x: x.is_sparse, [X, X.to_sparse()]),
    "entries": (lambda x: x._nnz(), [torch.tensor([1.0, 0, 0]).to_sparse(), X.to_sparse()]),
    "is": (is_same, [{"a": X, "b": X}, {"a": X, "b": X.clone()}, {"a": X, "b": X.detach()}]),
    "is, of leaves": (
        is_same,
        [{"a": SAME, "b": SAME}, {"a": SAME, "b": wrapped(X)}, {"a": SAME, "b": wrapped(X.clone())}],
    ),
    "is, of shards": (
        lambda tree: tree["a"].local is tree["b"].local,
        [{"a": SAME, "b": wrapped(X)}, {"a": SAME, "b": wrapped(X.clone())}, {"a": SAME, "b": SAME}],
    ),
    "is, of three": (
        lambda tree: (tree[0] is tree[1]) + 2 * (tree[1] is tree[2]),
        [[X, X, X.clone()], [X, X.clone(), X.clone()], [X, (Y := X.clone()), Y]],
    ),
}


def dense(tree):
    return [leaf.to_dense().resolve_conj().resolve_neg() for leaf in fs.tree_leaves(tree)]


@pytest.mark.parametrize("name", FACTS)
def test_facts_of_tensors_are_those_of_the_call(name):
    ask, trees = FACTS[name]

    def f(tree):
        return fs.tree_map(lambda leaf: leaf * (2 + ask(tree)), tree)

    jitted = fs.jit(f)
    with torch.no_grad():
        for _ in range(2):
            for tree in trees:
                assert_same_bits(dense(jitted(tree)), dense(f(tree)))
        answers = len({ask(tree) for tree in trees})
        assert answers > 1
        # What is sparse runs as it is.
        assert len(jitted.traces) <= len(trees)


def test_reasons_name_the_fact():
    jitted = fs.jit(lambda a, b: a + b)
    for args in ((C, C.clone()), (C.conj(), C.clone()), (C.clone(), C.clone()), (C, C)):
        jitted(*args)
    jitted(torch.ones(2, 3), torch.ones(2, 3))
    jitted(torch.ones(3, 2).T, torch.ones(2, 3))
    assert jitted.traces[:3] == [
        FIRST,
        "[0][0]: is_conj was False and is True",
        "[0][0]: is_conj was True and is False; repeated arguments was () and is (0, 0)",
    ]
    assert jitted.traces[4] == "[0][0]: stride was (3, 1) and is (1, 2)"


ON_CONJUGATES = {
    "arithmetic": lambda x: x * 2 + x.conj(),
    "views": lambda x: x[1:] + x[:-1].conj(),
    "real": lambda x: torch.view_as_real(x.resolve_conj()),
    "as it is": lambda x: x,
    "gradient": lambda x: torch.func.grad(lambda y: (y * x.conj()).abs().sum())(x),
}


@pytest.mark.parametrize("name", ON_CONJUGATES)
def test_conjugated_arguments_have_the_values_of_eager_code(name):
    f, jitted = ON_CONJUGATES[name], fs.jit(ON_CONJUGATES[name])
    for x in (C, C.conj(), C[:].conj().conj(), C.conj(), C):
        assert_same_bits(jitted(x).resolve_conj(), f(x).resolve_conj())


def test_conjugated_arguments_may_be_donated():
    jitted = fs.jit(lambda x: x * 2, donate_argnums=0)
    for make in (C.clone, lambda: C.clone().conj(), lambda: torch._neg_view(X.clone()), lambda: C.clone().conj().imag):
        given = make()
        found = jitted(given)
        assert_same_bits(dense(found), dense(make() * 2))


MODES = {
    "grad mode": (torch.no_grad, lambda x: x * (2 + torch.is_grad_enabled())),
    "inference mode": (torch.inference_mode, lambda x: x * (2 + torch.is_grad_enabled())),
    "default device": (lambda: torch.device("meta"), lambda x: x * (2 + (torch.ones(1).device.type == "meta"))),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), lambda x: x.outer(x) @ x),
    "autocast in float16": (lambda: torch.autocast("cpu", torch.float16), lambda x: x.outer(x) @ x),
    "attention kernels": (
        lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        lambda x: torch.nn.functional.scaled_dot_product_attention(*[x.outer(x).reshape(1, 1, 3, 3)] * 3),
    ),
}
SETTINGS = {
    "get_default_dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float64, lambda x: x * torch.ones(3)),
    "get_deterministic_debug_mode": (
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
        1,
        lambda x: x * (2 + torch.are_deterministic_algorithms_enabled()),
    ),
    "get_float32_matmul_precision": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
        "medium",
        lambda x: x * len(torch.get_float32_matmul_precision()),
    ),
    "oneDNN": (
        lambda: torch.backends.mkldnn.enabled,
        torch.backends.mkldnn.set_flags,
        False,
        lambda x: x * (2 + torch.backends.mkldnn.enabled),
    ),
}


@pytest.mark.parametrize("name", MODES)
def test_modes_are_those_of_the_call(name):
    mode, f = MODES[name]
    jitted = fs.jit(f)
    for context in (nullcontext, mode) * 2:
        with context():
            assert_same_bits(jitted(X), f(X))
    assert len(jitted.traces) == 2


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_those_of_the_call(name):
    get, put, value, f = SETTINGS[name]
    jitted, before = fs.jit(f), get()
    try:
        for setting in (before, value, before, value):
            put(setting)
            assert_same_bits(jitted(X), f(X))
    finally:
        put(before)
    assert len(jitted.traces) == 2
    assert jitted.traces[1].startswith(f"{name} was ")


class Doubled(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return 2 * out if func is torch.sin else out


def test_under_modes_of_the_users_it_runs_as_it_is():
    jitted = fs.jit(torch.sin)
    for context in (nullcontext, Doubled) * 2:
        with context():
            assert_same_bits(jitted(X), torch.sin(X))
    assert jitted.traces == [FIRST]


def test_under_hooks_on_what_autograd_saves_it_runs_as_it_is():
    def f(x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad((x * x).sum(), x)[0]

    jitted, halved = fs.jit(f), lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x / 2, lambda x: x)
    for context in (nullcontext, halved) * 2:
        with context():
            assert_same_bits(jitted(X), f(X))
    assert jitted.traces == [FIRST]


PLACES = {
    "offset": lambda x: x * x.storage_offset(),
    "storage": lambda x: x if x.untyped_storage().nbytes() > 12 else -x,
}


@pytest.mark.parametrize("name", PLACES)
def test_where_a_tensor_lies_is_not_asked(name):
    with pytest.raises(ValueError, match=r"expected no look at what a trace does not have, got Tensor\."):
        fs.jit(PLACES[name])(X)


def test_arguments_that_require_a_gradient_run_as_they_are():
    """Under no_grad too; and gradients made inside are the function's own."""
    x = torch.nn.Parameter(X.clone())
    x.grad = torch.ones(3)
    for f, traces in ((lambda x: x * x.grad, []), (squared, [FIRST])):
        jitted = fs.jit(f)
        with torch.no_grad():
            given = x.detach() if traces else x
            assert_same_bits(jitted(given), f(given))
        assert jitted.traces == traces


def squared(x):
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        (leaf * leaf).sum().backward()
        return leaf.grad


@on_ranks(1, 2)
def test_bits_do_not_depend_on_where_tensors_lie():
    """Batches are slices of one tensor, and states may be: one graph serves them all."""

    def loss(params, x):
        w = fs.gather(params["w"])
        return (x @ w[1:].T).tanh().sum() + (w.T[2] * w.T[2]).sum()

    for strategy in (fs.ddp, fs.zero3):
        step = fs.value_and_grad(loss)
        jitted, data = fs.jit(step), normal()(12, 4)
        params = fs.shard({"w": normal(1)(6, 4)}, strategy(one_axis()))
        local = params["w"].local
        for batch in data.split(3):
            held = torch.cat([torch.zeros(5, dtype=torch.float64), local.flatten()])
            for shard in (local, held[5:].view_as(local)):
                moved = {"w": fs.Sharded(shard, params["w"].spec)}
                assert_alike(jitted(moved, batch), step(moved, batch))
        assert jitted.traces == [FIRST]


READS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "item": lambda x, c: x * c.item(),
    "float": lambda x, c: x * float(c),
    "int": lambda x, c: x * int(c),
    "bool": lambda x, c: x if c else -x,
    "an index": lambda x, c: x[c.long()],
    "a number for an operator": lambda x, c: torch.add(x, x, alpha=c),
    "equal": lambda x, c: x if torch.equal(c, torch.tensor(2.0)) else -x,
    "what is computed of it": lambda x, c: x * (c + 1).item(),
    "a branch": lambda x, c: x if c.sqrt().sum() > 1 else -x,
    "a list": lambda x, c: x * c.tolist(),
    "an operand": lambda x, c: x * c,
    "a function": lambda x, c: x * min(c, 3),
}
REFUSED = ("a branch", "a list", "a function")


@pytest.mark.parametrize("name", READS)
def test_values_that_a_function_closes_over_do_not_go_stale(name):
    """They are refused at once where the trace has none of what is computed, and elsewhere once they are written to."""
    closed = torch.tensor(2.0)
    jitted = fs.jit(lambda x: READS[name](x, closed))
    if name in REFUSED:
        with pytest.raises(ValueError, match="expected no look at"):
            jitted(X)
        return
    assert_same_bits(jitted(X), READS[name](X, closed))
    assert_same_bits(jitted(X + 1), READS[name](X + 1, closed))
    closed.fill_(0.0)
    with refused(
        "jit: expected nothing written to what the function closes over, got a write to a float32 Tensor of shape () "
        "since the trace; pass it as an argument"
    ):
        jitted(X)
