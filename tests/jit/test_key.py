"""Law 9 of jitted functions: a graph serves the calls that agree in all that its trace read, and no others."""

import copy
import itertools
import math
import pickle
import struct
import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum, StrEnum
from functools import partial
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

import fshard as fs
from fshard.tree import flatten
from tests.jit.steps import refused
from tests.ranks import my_rank, on_ranks
from tests.trees import assert_alike, assert_same_bits, normal, one_axis

FIRST = "the first call"
X = torch.arange(1.0, 4.0)
C = torch.tensor([1 + 2j, 3 - 1j, 2j])


class Pair(NamedTuple):
    a: Any
    b: Any


# Arguments of calls, and why each but the first is traced again; None where it is not.
STRUCTURES = "PyTreeSpec((({'a': *},), {}), NoneIsLeaf) and is PyTreeSpec((({'a': *, 'b': *},), {}), NoneIsLeaf)"
CALLS = [
    [(X, None), (X + 1, None), (X.clone().requires_grad_().detach(), None)],
    [(X, None), (X[:2].clone(), "[0][0]: shape was torch.Size([3]) and is torch.Size([2])"), (X, None), (X[:2], None)],
    [({"a": X, "b": X + 1}, None), ({"a": X, "b": X.int()}, "[0][0]['b']: dtype was torch.float32 and is torch.int32")],
    [({"a": X}, None), ({"a": X, "b": X}, f"the structure of the arguments was {STRUCTURES}")],
    [(Pair(X, None), None), (Pair(X + 1, None), None)],
    [({"a": X, "b": X + 1}, None), ({"a": X, "b": None}, "[0][0]['b'] was a tensor and is None")],
    [({"a": X, "b": None}, None), ({"a": X, "b": X + 1}, "[0][0]['b'] was None and is a tensor")],
]


def test_traces():
    for calls in CALLS:
        jitted, whys = fs.jit(lambda tree: fs.tree_map(lambda leaf: 2 * leaf, tree)), [FIRST]
        for tree, why in calls:
            whys += [why] if why else []
            out = jitted(tree)
            assert_same_bits(fs.tree_leaves(out), [2 * x for x in fs.tree_leaves(tree)])
            assert (type(out), jitted.traces) == (type(tree), whys)


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    @partial(fs.jit, static_argnums=0)
    def apply(self, x):
        return x * self.factor


def test_a_method_is_bound_to_its_object():
    twice, thrice = Scaled(2), Scaled(3)
    for _ in range(2):
        assert twice.apply(X).equal(2 * X)
        assert thrice.apply(X).equal(3 * X)
    assert len(twice.apply.traces) == 2
    assert Scaled.apply(twice, X).equal(2 * X)


def test_static_arguments_may_be_named():
    def scale(x, n, *, mode="product"):
        return x**n if mode == "power" else x * n

    jitted = fs.jit(scale, static_argnames=("n", "mode"))
    for _ in range(2):
        assert jitted(X, 2).equal(2 * X)
        assert jitted(X, 3).equal(3 * X)
        assert jitted(X, n=3).equal(3 * X)
        assert jitted(X, n=3, mode="power").equal(X**3)
    # A trace for each value, and for each way to pass it.
    assert len(jitted.traces) == 4
    with pytest.raises(TypeError, match="static argument 'mode' is a list, which cannot be hashed"):
        jitted(X, 3, mode=["power"])


def test_a_static_name_means_no_argument_that_is_passed_by_position_alone():
    def scale(x, /, **options):
        return x * options["x"]

    jitted = fs.jit(scale, static_argnames="x")
    for value in (X, X + 1):
        assert jitted(value, x=2).equal(2 * value)
    assert jitted.traces == [FIRST]


def test_no_tensor_of_a_call_is_kept():
    given = torch.zeros(3)
    seen = weakref.ref(given)
    fs.jit(lambda x: x + 1)(given)
    del given
    assert seen() is None
    # An empty tensor that was donated has the shape of what donated ones are left with.
    jitted, first = fs.jit(lambda x: x * 2, donate_argnums=0), torch.zeros(0)
    jitted(jitted(first))
    with pytest.raises(ValueError, match="arguments were donated"):
        jitted(first)


@dataclass(frozen=True)
class Settings:
    value: Any


NAN, NEGATIVE_NAN = math.nan, struct.unpack("<d", struct.pack("<Q", 0xFFF8000000000000))[0]
# Values that Python calls equal, and which a function may tell apart.
TOLD_APART = [
    *((1, 1.0), (1, True), (0.0, -0.0), (complex(0.0, 0.0), complex(0.0, -0.0)), (NAN, NEGATIVE_NAN)),
    *(((1, ("a", 0.0)), (1, ("a", -0.0))), (Pair(1, 2), Pair(1, 2.0)), ((1, 2), Pair(1, 2))),
    *((Settings((0, 0.0)), Settings((0, -0.0))), (frozenset({1}), frozenset({True}))),
    *((numpy.float32(0.0), numpy.float32(-0.0)), (Decimal("1.0"), Decimal("1.00")), (range(0, 3, 2), range(0, 4, 2))),
]
ALIKE = [lambda: (1, 0.0, ("a", float("nan"))), lambda: Settings(1.5), lambda: torch.float32]


def test_values_that_python_calls_equal_have_a_graph_each_and_equal_ones_share_one():
    for a, b in TOLD_APART:
        seen: list[Any] = []
        jitted = fs.jit(lambda x, value, seen=seen: seen.append(value) or x + len(seen), static_argnums=1)
        for value, number in ((a, 1), (b, 2), (a, 1), (b, 2)):
            assert jitted(X, value).equal(X + number)
        assert (seen[0] is a, seen[1] is b) == (True, True)
        # One that is no static argument may not change at all.
        if not isinstance(a, tuple):
            jitted = fs.jit(lambda x, value: x)
            jitted(X, a)
            with pytest.raises(ValueError, match="values that the trace fixed have changed"):
                jitted(X, b)
    for make in ALIKE:
        static, leaf = fs.jit(lambda x, value: x + 1, static_argnums=1), fs.jit(lambda x, tree: x + 1)
        for _ in range(2):
            static(X, make())
            leaf(X, {"value": make()})
        assert static.traces == leaf.traces == [FIRST]


def test_numbers_in_keys_have_the_dtypes_and_signs_of_eager_code():
    def by_key(tree):
        return {key: leaf * key for key, leaf in tree.items()}

    keyed = fs.jit(by_key)
    for n in (1, 1.0, True, 0.0, -0.0) * 2:
        assert_same_bits(fs.tree_leaves(keyed({n: X.int()})), fs.tree_leaves(by_key({n: X.int()})))
    assert len(keyed.traces) == 5


class Second(str, Enum):  # noqa: UP042
    B = "b"


class Name(StrEnum):
    A = "a"


class Key(str, Enum):  # noqa: UP042
    A = "a"


def test_keys_that_python_calls_equal_have_a_graph_each():
    """Whichever comes first, and whether or not the call before looked the same."""
    for first, second in itertools.permutations(("a", Name.A, Key.A), 2):
        jitted = fs.jit(lambda tree: {"enum" if isinstance(key, Enum) else "text": x for key, x in tree.items()})
        for key in (first, first, second, second, first):
            expected = "enum" if isinstance(key, Enum) else "text"
            assert list(jitted({key: X})) == [expected]
        jitted = fs.jit(lambda tree, x: x + isinstance(next(iter(tree)), Enum))
        for key in (first, first, second, second, first):
            assert jitted({key: ()}, X).equal(X + isinstance(key, Enum))
    for first, second in itertools.permutations(((1, "1"), (True, "True"), ("b", "b"), (Second.B, "Second.B")), 2):
        for key, name in (first, second, first):
            assert flatten({key: X}).names == (name,)


def inference(tensor):
    with torch.inference_mode():
        return tensor.clone()


def is_same(tree):
    return tree["a"] is tree["b"]


def wrapped(tensor):
    return fs.Sharded(tensor, fs.Spec(tuple(tensor.shape)))


SAME, Y = wrapped(X), X.clone()
# What a function asks of its argument, and arguments of one shape and dtype that answer otherwise.
FACTS = [
    (lambda x: x.is_conj(), [C, C.conj(), C.conj().clone()]),
    (lambda x: x.is_neg(), [C.imag, C.conj().imag, torch._neg_view(X)]),
    (lambda x: x.requires_grad, [X, X.clone().requires_grad_()]),
    (lambda x: isinstance(x, torch.nn.Parameter), [X.clone().requires_grad_(), torch.nn.Parameter(X.clone())]),
    (lambda x: x.is_inference(), [X, inference(X)]),
    (lambda x: x.is_contiguous(), [X, X.repeat(2)[::2], X.flip(0)]),
    (lambda x: x._nnz() if x.is_sparse else 0, [X, torch.tensor([1.0, 0, 0]).to_sparse(), X.to_sparse()]),
    (is_same, [{"a": X, "b": X}, {"a": X, "b": X.clone()}, {"a": X, "b": X.detach()}]),
    (is_same, [{"a": SAME, "b": SAME}, {"a": SAME, "b": wrapped(X)}, {"a": SAME, "b": wrapped(X.clone())}]),
    (lambda tree: (tree[0] is tree[1]) + 2 * (tree[1] is tree[2]), [[X, X, X.clone()], [X, X.clone(), X], [X, Y, Y]]),
]


def dense(tree):
    return [leaf.to_dense().resolve_conj().resolve_neg() for leaf in fs.tree_leaves(tree)]


def test_facts_of_tensors_are_those_of_the_call():
    for ask, trees in FACTS:

        def f(tree, ask=ask):
            return fs.tree_map(lambda leaf: leaf * (2 + ask(tree)), tree)

        jitted = fs.jit(f)
        with torch.no_grad():
            # Twice in a row, as what is like the last call takes a shorter way.
            for tree in [tree for tree in trees for _ in range(2)] * 2:
                assert_same_bits(dense(jitted(tree)), dense(f(tree)))
            assert len({ask(tree) for tree in trees}) > 1
            # What is sparse runs as it is.
            assert len(jitted.traces) <= len(trees)


def attention(x):
    return torch.nn.functional.scaled_dot_product_attention(*[x.outer(x).reshape(1, 1, 3, 3)] * 3)


def attention_in_bfloat16(x):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(*[x.outer(x.sin()).bfloat16()[None, None]] * 3)


@contextmanager
def low_precision():
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(False)


MODES = [
    (torch.no_grad, lambda x: x * (2 + torch.is_grad_enabled())),
    (torch.inference_mode, lambda x: x * (2 + torch.is_grad_enabled())),
    (lambda: torch.device("meta"), lambda x: x * (2 + (torch.ones(1).device.type == "meta"))),
    (lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), attention),
    (low_precision, attention_in_bfloat16),
    (parametrize.cached, lambda x: x * (2 + parametrize._cache_enabled)),
    (lambda: torch.autocast("cpu", torch.bfloat16), lambda x: x.outer(x) @ x),
]


def test_modes_and_settings_are_those_of_the_call():
    for mode, f in MODES:
        jitted = fs.jit(f)
        for context in (nullcontext, mode) * 2:
            with context():
                assert_same_bits(jitted(X), f(X))
        assert len(jitted.traces) == 2
    # One kind of autocast is told from the other.
    with torch.autocast("cpu", torch.float16):
        assert_same_bits(jitted(X), f(X))
    jitted = fs.jit(lambda x: x * torch.ones(3))
    try:
        for dtype in (torch.float32, torch.float64) * 2:
            torch.set_default_dtype(dtype)
            assert jitted(X).dtype == dtype
    finally:
        torch.set_default_dtype(torch.float32)
    assert jitted.traces == [FIRST, "get_default_dtype was torch.float32 and is torch.float64"]


class Doubled(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return 2 * out if func is torch.sin else out


def squared(x):
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        (leaf * leaf).sum().backward()
        return leaf.grad


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled", "ignore:Error detected in Sqrt")
def test_under_modes_and_hooks_of_the_users_it_runs_as_it_is():
    halved = lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x / 2, lambda x: x)  # noqa: E731
    for f, mode in ((torch.sin, Doubled), (squared, halved)):
        jitted = fs.jit(f)
        for context in (nullcontext, mode) * 2:
            with context():
                assert_same_bits(jitted(X), f(X))
        assert jitted.traces == [FIRST]
    # So it does where arguments require a gradient, also under no_grad, and in a search for anomalies.
    x = torch.nn.Parameter(X.clone())
    x.grad = torch.ones(3)
    jitted = fs.jit(lambda x: x * x.grad)
    with torch.no_grad():
        assert_same_bits(jitted(x), x * x.grad)
    search = fs.jit(lambda x: fs.value_and_grad(lambda p: p["w"].sqrt().sum())({"w": x}))
    with torch.autograd.detect_anomaly(check_nan=True), pytest.raises(RuntimeError, match="SqrtBackward0"):
        search(-torch.ones(2))
    assert jitted.traces == search.traces == []


@on_ranks(2)
def test_bits_do_not_depend_on_where_tensors_lie():
    """Batches are slices of one tensor, and states may be: one graph serves them all."""
    for ask in (lambda x: x * x.storage_offset(), lambda x: x if x.untyped_storage().nbytes() > 12 else -x):
        with pytest.raises(ValueError, match=r"^jit: Tensor\.\w+ needs the data or the memory of a tensor"):
            fs.jit(ask)(X)

    step = fs.value_and_grad(lambda params, x: (x @ fs.gather(params["w"])[1:].T).tanh().sum())
    jitted, params = fs.jit(step), fs.shard({"w": normal(1)(6, 4)}, fs.zero3(one_axis()))
    local = params["w"].local
    for batch in normal()(6, 4).split(3):
        held = torch.cat([torch.zeros(5, dtype=torch.float64), local.flatten()])
        for shard in (local, held[5:].view_as(local)):
            moved = {"w": fs.Sharded(shard, params["w"].spec)}
            assert_alike(jitted(moved, batch), step(moved, batch))
    assert jitted.traces == [FIRST]


class DoubledTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        return 2 * out if func is torch.sin else out


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_with_functions_or_layouts_of_their_own_run_as_they_are():
    jitted = fs.jit(torch.sin)
    for tensor in (X.as_subclass(DoubledTensor), X) * 2:
        assert jitted(tensor).tolist() == torch.sin(tensor).tolist()
    assert jitted.traces == [FIRST]
    nested = torch.nested.nested_tensor([X, X[:2]])
    assert_same_bits(list(jitted(nested).unbind()), [X.sin(), X[:2].sin()])


def test_a_copy_has_no_programs_of_its_origin():
    """They compute with the captured tensors and the passes of the origin."""
    jitted = fs.jit(torch.sin)
    jitted(X)
    for other in (copy.copy(jitted), copy.deepcopy(jitted), pickle.loads(pickle.dumps(jitted))):
        assert other.traces == []
        assert_same_bits(other(X), X.sin())
    assert jitted.traces == [FIRST]


READS = [
    lambda x, c: x * c.item(),
    lambda x, c: x if c else -x,
    lambda x, c: x if torch.equal(c, torch.tensor(2.0)) else -x,
    lambda x, c: x * c,
]
REFUSED = [lambda x, c: x if c.sqrt().sum() > 1 else -x, lambda x, c: x * c.tolist(), lambda x, c: x * min(c, 3)]
# What counts as no write, but changes what is computed.
CHANGES = [
    lambda closed: setattr(closed, "data", torch.ones(2)),
    lambda closed: setattr(closed, "data", torch.ones(3).bfloat16()),
    lambda closed: closed.requires_grad_(),
    fs.jit(torch.neg, donate_argnums=0),
]
CLOSED = (
    "jit: the function closes over a float32 Tensor of shape (), which was modified after the trace, so the graph may "
    "be out of date. Pass it as an argument, such as state.buffers."
)


def test_values_that_a_function_closes_over_do_not_go_stale():
    """They are refused at once where the trace has none of what is computed, and elsewhere once they are written to."""
    for read in READS:
        closed = torch.tensor(2.0)
        jitted = fs.jit(lambda x, read=read, closed=closed: read(x, closed))
        for x in (X, X + 1):
            assert_same_bits(jitted(x), read(x, closed))
        closed.fill_(0.0)
        with refused(CLOSED):
            jitted(X)
    for change in CHANGES:
        closed = torch.ones(3)
        jitted = fs.jit(lambda x, closed=closed: (x * closed.double().mean() / closed.shape[0]).sum())
        jitted(X)
        change(closed)
        with pytest.raises(ValueError, match="which was modified after the trace, so the graph may be out of date"):
            jitted(X)
    for read in REFUSED:
        with pytest.raises(ValueError, match=r"reads the value of a tensor|needs the data or the memory of a tensor"):
            fs.jit(lambda x, read=read, closed=torch.tensor(2.0): read(x, closed))(X)  # noqa: B008


SENT = fs.jit(lambda x, axis: fs.ppermute(x, axis, [(0, 1)]), static_argnums=1)


@on_ranks(2)
def test_ranks_that_share_a_function_have_a_graph_each():
    """Though no argument tells them apart: what a rank sends is part of its graph."""
    axis = fs.axis_of(one_axis())
    for _ in range(3):
        value = SENT(torch.tensor(1.0 + my_rank()), axis)
        assert value == float(my_rank())


@on_ranks(2)
def test_tangents_go_through_collectives():
    """A graph has no derivatives, so the function runs as it is."""
    params = fs.shard({"w": torch.arange(4.0)}, fs.fully_shard(one_axis()))
    jitted = fs.jit(lambda params: fs.gather(params)["w"].square())
    jitted(params)
    with forward_ad.dual_level():
        dual = fs.tree_map(lambda shard: forward_ad.make_dual(shard, torch.ones(2)), params)
        tangent = forward_ad.unpack_dual(jitted(dual)).tangent
    assert tangent.tolist() == [0.0, 2.0, 4.0, 6.0]
