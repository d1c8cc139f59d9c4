"""When a jitted function is traced anew, and what it takes and returns: JAX's rules."""

import re
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.func import grad, vmap

import fshard as fs
from tests.ranks import on_ranks
from tests.trees import assert_same_bits, normal, one_axis

FIRST = "the first call"
X = torch.arange(3.0)


def double(tree):
    return fs.tree_map(lambda x: 2 * x, tree)


class Pair(NamedTuple):
    a: Any
    b: Any


# Arguments of calls, and why each but the first is traced again; None where it is not.
CALLS = [
    [(X, None), (X + 1, None), (X.clone().requires_grad_().detach(), None)],
    [(X, None), (X[:2].clone(), "[0][0]: shape was torch.Size([3]) and is torch.Size([2])"), (X, None), (X[:2], None)],
    [(X, None), (X.double(), "[0][0]: dtype was torch.float32 and is torch.float64")],
    [({"a": X, "b": X + 1}, None), ({"a": X, "b": X.int()}, "[0][0]['b']: dtype was torch.float32 and is torch.int32")],
    [
        ({"a": X}, None),
        (
            {"a": X, "b": X},
            "the structure of the arguments was PyTreeSpec((({'a': *},), {}), NoneIsLeaf) and is "
            "PyTreeSpec((({'a': *, 'b': *},), {}), NoneIsLeaf)",
        ),
    ],
    [(Pair(X, None), None), (Pair(X + 1, None), None)],
]


def test_traces():
    for calls in CALLS:
        jitted, whys = fs.jit(double), [FIRST]
        for tree, why in calls:
            whys += [why] if why else []
            out = jitted(tree)
            assert_same_bits(fs.tree_leaves(out), fs.tree_leaves(double(tree)))
            assert type(out) is type(tree)
            assert jitted.traces == whys


def test_static_values_have_a_trace_each():
    calls = []

    def f(x, n, mode):
        calls.append((n, mode))
        return x**n if mode == "power" else x * n

    jitted = fs.jit(f, static_argnums=(1, 2))
    for _ in range(2):
        for n, mode in ((2, "power"), (3, "power"), (3, "product")):
            assert jitted(X, n, mode).equal(X**n if mode == "power" else X * n)
    assert calls == [(2, "power"), (3, "power"), (3, "product")]
    assert jitted.traces == [FIRST, "[0][1] was 2 and is 3", "[0][2] was 'power' and is 'product'"]


def test_static_names_hold_by_keyword_and_by_position():
    def f(x, mode="sin", *, times=1):
        return getattr(x, mode)() * times

    for options in ({"static_argnames": ("mode", "times")}, {"static_argnames": "times", "static_argnums": 1}):
        jitted = fs.jit(f, **options)
        for _ in range(2):
            assert jitted(X, mode="cos").equal(X.cos())
            assert jitted(X, mode="exp", times=2).equal(X.exp() * 2)
            assert jitted(X, "exp").equal(X.exp())
    assert jitted(X, "exp", times=3).equal(X.exp() * 3)
    assert jitted(X, "exp", times=4).equal(X.exp() * 4)
    assert jitted.traces[-1] == "[1]['times'] was 3 and is 4"
    assert [len(jitted.traces), len(set(jitted.traces))] == [5, 5]
    jitted = fs.jit(lambda x, n: x**n, static_argnums=1)
    assert [jitted(X, n=n).equal(X**n) for n in (2, 3, 2)] == [True] * 3
    assert jitted.traces == [FIRST, "[1]['n'] was 2 and is 3"]


@on_ranks(2)
def test_specs_have_a_trace_each():
    mesh, full = one_axis(), {"w": normal()(4, 6)}
    jitted = fs.jit(lambda p: fs.tree_map(torch.sin, p))
    for dim in (0, 1, 0, 1):
        params = fs.shard(full, fs.fully_shard(mesh, dim=dim))
        out = jitted(params)
        assert out["w"].spec == params["w"].spec
        assert_same_bits(fs.unshard(out)["w"], full["w"].sin())
    first, second = jitted.traces
    assert (first, second.count(";")) == (FIRST, 2)
    assert re.search(r"\['w'\]: spec was .*P\('shard'\).* and is .*P\(None, 'shard'\)", second)


def test_any_tree_is_returned():
    def f(x):
        return {"scalar": x.sum(), "none": None, "pair": Pair([x, (x.int(),)], {}), "itself": x}

    jitted = fs.jit(f)
    for x in (X, X + 1):
        out, expected = jitted(x), f(x)
        assert_same_bits(fs.tree_leaves(out), fs.tree_leaves(expected))
        assert (out["none"], type(out["pair"]), out["scalar"].shape) == (None, Pair, ())
        # What is undonated and returned stays the caller's tensor, as it is eagerly.
        assert out["itself"].data_ptr() == x.data_ptr()


def test_under_transforms_it_runs_as_it_is_and_transforms_inside_are_traced():
    def f(x):
        return x.sin() * x

    for transformed in (
        lambda f: grad(lambda x: f(x).sum())(X),
        lambda f: vmap(f)(torch.stack([X, X + 1])),
        lambda f: vmap(grad(lambda x: f(x).sum()))(torch.stack([X, X + 1])),
        lambda f: torch.autograd.grad(f(leaf := X.clone().requires_grad_()).sum(), leaf)[0],
    ):
        jitted = fs.jit(f)
        assert transformed(jitted).equal(transformed(f))
        assert jitted.traces == []
    inside = fs.jit(vmap(grad(f)))
    for x in (X, X + 1):
        assert inside(x).equal(vmap(grad(f))(x))
    assert inside.traces == [FIRST]


def test_a_backend_gets_the_graph_and_example_inputs():
    seen = []

    def backend(graph, inputs):
        seen.append((graph, inputs))
        return lambda *tensors: [2 * out for out in graph(*tensors)]

    jitted = fs.jit(lambda tree: {"y": tree["x"] + 1}, backend=backend)
    for x in (X, X + 1):
        assert jitted({"x": x})["y"].equal(2 * (x + 1))
    ((graph, inputs),) = seen
    assert isinstance(graph, torch.fx.GraphModule)
    assert [(tuple(x.shape), x.dtype) for x in inputs] == [((3,), torch.float32)]
    assert jitted.traces == [FIRST]


# Tensors that guards of shapes and strides alone would take for the one before.
ALMOST_ALIKE = [
    (torch.zeros(3, dtype=torch.complex64), lambda: torch.zeros(3, dtype=torch.complex64).conj()),
    (X, lambda: torch._neg_view(X)),
    (X, lambda: nn.Parameter(X, requires_grad=False)),
    (X, lambda: torch.zeros(6)[::2]),
]


def test_a_call_unlike_the_last_one_is_not_taken_for_it_and_no_tensor_of_it_is_kept():
    for plain, other in ALMOST_ALIKE:
        jitted = fs.jit(lambda x, y: y + 1)
        with torch.no_grad():
            for x in (plain, plain, other(), plain):
                jitted(x, X)
        assert len(jitted.traces) == 2
    jitted = fs.jit(lambda x: x + 1)
    for _ in range(2):
        given = torch.zeros(3)
        seen = weakref.ref(given)
        jitted(given)
        del given
        assert seen() is None
    # An empty tensor that was donated has the shape of what donated ones are left with.
    jitted, first = fs.jit(lambda x: x * 2, donate_argnums=0), torch.zeros(0)
    after = jitted(jitted(first))
    with pytest.raises(ValueError, match="arguments were donated"):
        jitted(first)
    jitted(after)
