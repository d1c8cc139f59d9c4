"""When a jitted function is traced anew, and what it takes and returns: JAX's rules."""

import re
import sys
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.func import grad, vmap

import fshard as fs
from fshard.jit.signature import signature
from tests.ranks import on_ranks
from tests.trees import assert_same_bits, normal, one_axis

FIRST = "the first call"
X = torch.arange(3.0)


def double(tree):
    return fs.tree_map(lambda x: 2 * x, tree)


class Pair(NamedTuple):
    a: Any
    b: Any


# Calls, and why each but the first is traced again; None where it is not.
CALLS = {
    "values": [((X,), None), ((X + 1,), None), ((X.clone().requires_grad_().detach(),), None)],
    "shapes": [
        ((X,), None),
        ((X[:2].clone(),), "[0][0]: shape was torch.Size([3]) and is torch.Size([2])"),
        ((X,), None),
        ((X[:2].clone(),), None),
    ],
    "dtypes": [((X,), None), ((X.double(),), "[0][0]: dtype was torch.float32 and is torch.float64")],
    "leaves": [
        (({"a": X, "b": X + 1},), None),
        (({"a": X, "b": X.int()},), "[0][0]['b']: dtype was torch.float32 and is torch.int32"),
    ],
    "structure": [
        (({"a": X},), None),
        (
            ({"a": X, "b": X},),
            "the structure of the arguments was PyTreeSpec((({'a': *},), {}), NoneIsLeaf) and is "
            "PyTreeSpec((({'a': *, 'b': *},), {}), NoneIsLeaf)",
        ),
    ],
    "none": [((Pair(X, None),), None), ((Pair(X + 1, None),), None)],
}


@pytest.mark.parametrize("name", CALLS)
def test_traces(name):
    jitted = fs.jit(double)
    whys = [FIRST]
    for (tree,), why in CALLS[name]:
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
    assert jitted.traces == [
        FIRST,
        "[0][1] was 2 and is 3",
        "[0][2] was 'power' and is 'product'",
    ]


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


def test_static_numbers_hold_by_keyword():
    jitted = fs.jit(lambda x, n: x**n, static_argnums=1)
    assert [jitted(X, n=n).equal(X**n) for n in (2, 3, 2)] == [True] * 3
    assert jitted.traces == [FIRST, "[1]['n'] was 2 and is 3"]


def test_a_transform_with_another_field_is_named():
    """Such as one that rounds by a key of each step."""
    mesh, full = one_axis(), {"w": normal()(4, 6)}
    jitted = fs.jit(lambda p: fs.tree_map(torch.sin, p))
    for merge_bytes in (0, 1):
        jitted(fs.shard(full, fs.zero3(mesh, merge_bytes=merge_bytes)))
    assert re.fullmatch(r"\[0\]\[0\]\['w'\]: spec was .*merge_bytes=0.* and is .*merge_bytes=1.*", jitted.traces[1])


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


def test_modes_have_a_trace_each():
    jitted = fs.jit(lambda x: x.exp() @ x)
    jitted(X)
    with torch.no_grad():
        jitted(X)
    with torch.autocast("cpu", torch.bfloat16):
        jitted(X)
    first, second, third = jitted.traces
    assert (first, second) == (FIRST, "is_grad_enabled was True and is False")
    # Builds of torch with an accelerator name its dtype too.
    assert re.fullmatch(r"is_grad_enabled was False .*; autocast was \(None,.*\) and is \(torch.bfloat16,.*\)", third)


def test_keywords_are_arguments():
    jitted = fs.jit(lambda x, *, scale, shift=None: x * scale if shift is None else x * scale + shift)
    assert jitted(X, scale=torch.tensor(2.0)).equal(2 * X)
    assert jitted(X, scale=torch.tensor(3.0)).equal(3 * X)
    assert jitted.traces == [FIRST]
    assert jitted(X, scale=torch.tensor(3.0), shift=X).equal(4 * X)
    assert len(jitted.traces) == 2


def test_any_tree_is_returned():
    def f(x):
        return {"scalar": x.sum(), "none": None, "pair": Pair([x, (x.int(),)], {}), "itself": x}

    jitted = fs.jit(f)
    for x in (X, X + 1):
        out, expected = jitted(x), f(x)
        assert_same_bits(fs.tree_leaves(out), fs.tree_leaves(expected))
        assert out["none"] is None
        assert type(out["pair"]) is Pair
        assert out["scalar"].shape == ()


def test_decorators_and_names():
    @fs.jit
    def plain(x):
        """Doubles."""
        return 2 * x

    @fs.jit(static_argnums=1)
    def power(x, n):
        return x**n

    assert plain(X).equal(2 * X)
    assert power(X, 2).equal(X**2)
    assert (plain.__name__, plain.__doc__, power.__name__) == ("plain", "Doubles.", "power")


def test_a_jitted_function_inside_of_another_is_part_of_its_graph():
    inner = fs.jit(lambda x: 2 * x)
    outer = fs.jit(lambda x: inner(x) + inner(x[:2]).sum())
    assert outer(X).equal(2 * X + 2)
    assert (inner.traces, outer.traces) == ([], [FIRST])


TRANSFORMED = {
    "grad": lambda f: grad(lambda x: f(x).sum())(X),
    "vmap": lambda f: vmap(f)(torch.stack([X, X + 1])),
    "vmap of grad": lambda f: vmap(grad(lambda x: f(x).sum()))(torch.stack([X, X + 1])),
    "autograd": lambda f: torch.autograd.grad(f(leaf := X.clone().requires_grad_()).sum(), leaf)[0],
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_under_transforms_it_runs_as_it_is(name):
    def f(x):
        return x.sin() * x

    jitted = fs.jit(f)
    assert TRANSFORMED[name](jitted).equal(TRANSFORMED[name](f))
    assert jitted.traces == []


@pytest.mark.parametrize("transform", (grad, lambda f: lambda x: vmap(f)(x[None])[0]), ids=("grad", "vmap"))
def test_transforms_inside_are_traced(transform):
    def f(x):
        return transform(lambda x: (x.sin() * x).sum())(x)

    jitted = fs.jit(f)
    for x in (X, X + 1):
        assert jitted(x).equal(f(x))
    assert jitted.traces == [FIRST]


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


@on_ranks(2)
def test_a_recorder_sees_what_runs_and_not_the_trace():
    jitted = fs.jit(fs.gather)
    params = fs.shard({"w": torch.ones(4)}, fs.zero2(one_axis(), min_shard_elements=0))
    counts = []
    for _ in range(2):
        with fs.comm.record() as record:
            jitted(params)
        counts.append([entry.label for entry in record])
    # The ranks' message at the start of the call, in the first one also of what was traced, and the gather.
    assert counts == [["start", "start", "gather"], ["start", "gather"]]


def test_a_call_like_the_last_one_needs_no_signature(monkeypatch):
    asked = []
    monkeypatch.setattr(
        sys.modules["fshard.jit.jit"], "signature", lambda *args: asked.append(args) or signature(*args)
    )
    jitted = fs.jit(lambda tree, n: fs.tree_map(lambda x: x * n, tree), static_argnums=1)
    for n in (2, 2, 2, 3, 3, 2):
        tree = {"a": torch.ones(2) * n, "b": (torch.ones(3), None)}
        assert_same_bits(fs.tree_leaves(jitted(tree, n)), [tree["a"] * n, tree["b"][0] * n])
    assert len(asked) == 3
    assert len(jitted.traces) == 2


# Tensors that guards of shapes and strides alone would take for the one before.
LOOKS = {
    "is_conj": lambda: torch.zeros(3, dtype=torch.complex64).conj(),
    "is_neg": lambda: torch._neg_view(X),
    "a class": lambda: nn.Parameter(X, requires_grad=False),
    "strides": lambda: torch.zeros(6)[::2],
    "a number": lambda: 1.0,
    "another number": lambda: 1,
}


@pytest.mark.parametrize("name", LOOKS)
def test_a_call_unlike_the_last_one_is_not_taken_for_it(name):
    other, real = LOOKS[name](), torch.zeros(3, dtype=torch.complex64)
    plain = real if name == "is_conj" else 1.5 if "number" in name else X
    jitted = fs.jit(lambda x, y: y + 1)
    with torch.no_grad():
        for x in (plain, plain):
            jitted(x, X)
        if "number" in name:
            with pytest.raises(ValueError, match="leaves that are part of the graph have changed"):
                jitted(other, X)
        else:
            jitted(other, X)
            assert len(jitted.traces) == 2
        jitted(plain, X)


def test_no_tensor_of_a_call_is_kept():
    jitted = fs.jit(lambda x: x + 1)
    for _ in range(2):
        given = torch.zeros(3)
        seen = weakref.ref(given)
        jitted(given)
        del given
        assert seen() is None


def test_an_empty_tensor_that_was_donated_is_refused_after_calls_like_it():
    jitted = fs.jit(lambda x: x * 2, donate_argnums=0)
    first = torch.zeros(0)
    after = jitted(jitted(first))
    with pytest.raises(ValueError, match="arguments were donated"):
        jitted(first)
    jitted(after)
