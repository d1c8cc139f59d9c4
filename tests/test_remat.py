"""remat: the same gradients, computed again rather than kept, under torch.func and inside value_and_grad."""

import itertools
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.func import grad, grad_and_value, hessian, jvp, vmap
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import _compat
from fshard.testing import assert_trees_close
from tests.bad_input import text_of
from tests.ranks import on_ranks
from tests.tolerance import within
from tests.trees import OF_EVERY_LEAF, assert_same_bits, normal, one_axis


def full_values():
    draw = normal()
    return {"blocks": [{"w": draw(5, 5), "b": draw(5)} for _ in range(3)]}


def block(params, x):
    return torch.tanh(x @ params["w"] + params["b"])


def chain(step, params, x):
    for part in params["blocks"]:
        x = step(part, x)
    return x.square().sum()


def transformed(step):
    """What is computed of a chain of steps by every transform that is stated to work."""
    params, x, t = full_values(), normal(1)(2, 5), normal(2)(2, 5)

    def of_x(x):
        return chain(step, params, x)

    return {
        "grad and value": grad_and_value(lambda p: chain(step, p, x))(params),
        "jvp of parameters": jvp(lambda p: chain(step, p, x), (params,), (fs.tree_map(torch.ones_like, params),)),
        "grad of jvp": grad(lambda x: jvp(of_x, (x,), (t,))[1])(x),
        "hessian": hessian(of_x)(x),
        "vmap of grad": vmap(grad(of_x))(x),
        "grad of vmap": grad(lambda p: vmap(lambda row: chain(step, p, row))(x).sum())(params),
    }


def by_autograd(step, x):
    params = fs.tree_map(lambda tensor: tensor.requires_grad_(), full_values())
    return torch.autograd.grad(chain(step, params, x), fs.tree_leaves(params))


def test_it_is_the_function_called_once_in_the_forward_and_once_in_the_backward():
    """Where nothing is differentiated: once."""
    expected = transformed(block)
    # Sums over a row and its columns, through three blocks, forward and backward and, of a derivative's, again.
    assert_trees_close(transformed(fs.remat(block)), expected, **within(expected, terms=5, steps=12))
    x, counted = normal(1)(2, 5), Mock(wraps=block)
    assert_same_bits(by_autograd(fs.remat(counted), x), by_autograd(block, x))
    assert counted.call_count == 2 * 3
    grad(lambda p: chain(fs.remat(counted), p, x))(full_values())
    assert counted.call_count == 4 * 3
    with torch.no_grad():
        chain(fs.remat(counted), full_values(), x)
    assert counted.call_count == 5 * 3
    w, found = normal()(3).requires_grad_(), []

    def square():
        h = torch.tanh(w * w)
        found.append(_compat.StorageWeakRef(h.untyped_storage()))
        return h.sum()

    value = fs.remat(square)()
    # When the forward has ended, what it saved is gone.
    assert found[0].expired()
    assert_same_bits(*(torch.autograd.grad(out, w) for out in (value, square())))


def test_trees_flags_and_random_numbers_pass():
    """As arguments and as results; an argument may be returned as it is, and masks are drawn again as they were."""

    def f(tree, flag, *, scale, nothing=None):
        x, (y, text) = tree["x"], tree["pair"]
        assert (flag, text, nothing) == (True, "text", None)
        return {"product": nn.functional.dropout(x * y * scale), "shape": x.shape, "nothing": None, "same": [x, y]}

    def run(f, x):
        torch.manual_seed(0)
        out = f({"x": x, "pair": (torch.arange(1000), "text")}, True, scale=torch.tensor(2.0))
        assert (out["shape"], out["nothing"]) == (x.shape, None)
        return out["product"].sum() + out["same"][0].sum()

    x = normal()(1000)
    with torch.random.fork_rng():
        found, expected = (grad(lambda x, g=g: run(g, x))(x) for g in (fs.remat(f), f))
    assert_same_bits(found, expected)


def test_what_is_differentiated_and_no_argument_is_refused_under_torch_func():
    """Its gradient would be lost; a tensor that is not differentiated may be anywhere."""
    text = r"remat: expected all that is differentiated among the arguments of f, got .* that f reaches"
    for closure in (
        lambda f, w: jvp(lambda w: f(w)(), (w,), (w,)),
        lambda f, w: vmap(grad(lambda w: f(w)().sum()))(w[None]),
    ):
        with pytest.raises(ValueError, match=text):
            closure(lambda w: fs.remat(lambda: w * w), normal()(3))
    other = normal(1)(3)
    assert_same_bits(grad(lambda w: fs.remat(lambda w: w * other)(w).sum())(normal()(3)), other)


def gathering(part, x):
    return block(fs.gather(part), x)


@on_ranks(1, 3)
def test_inside_value_and_grad_it_is_the_function(world_size):
    """Gathering inside, or passed what was gathered outside; and as torch's own checkpoint does."""
    spellings = [
        fs.remat(gathering),
        lambda part, x: checkpoint(gathering, part, x, use_reentrant=False),
        fs.remat(lambda part, x: fs.remat(block)(fs.gather(part), x)),
    ]
    mesh = one_axis()
    x = normal(1 + fs.comm.rank(fs.axis_of(mesh)))(2, 5)
    for strategy in OF_EVERY_LEAF.values():
        params = fs.shard(full_values(), strategy(mesh))
        expected = fs.value_and_grad(lambda p: chain(gathering, p, x))(params)
        whole = fs.remat(lambda p: chain(gathering, p, x))
        for f in (whole, *(lambda p, s=step: chain(s, p, x) for step in spellings)):
            assert_same_bits(fs.tree_leaves(fs.value_and_grad(f)(params)), fs.tree_leaves(expected))
    # The reference of value_and_grad, which keeps what it gathered, does not with remat.
    params, counts = fs.shard(full_values(), OF_EVERY_LEAF["zero3"](mesh)), []
    for step in (gathering, fs.remat(gathering)):
        with fs.comm.record() as record:
            grad(lambda p, s=step: fs.objective(chain(s, p, x), like=p))(params)
        counts.append([entry.label for entry in record].count("gather"))
    assert counts == ([3, 6] if world_size > 1 else [0, 0])


def waves(params, x):
    return block(params, x).sin().sin().sin()


@on_ranks(2)
def test_what_is_saved_holds_no_gathered_weight(world_size):
    """A transposed weight is a view of it: torch 2.14 lets the engine save a handle in its place, older ones do not."""
    # Without room to gather ahead only the last unit stays until the backward.
    params = fs.shard(full_values(), fs.zero3(one_axis(), min_shard_elements=0, merge_bytes=0))
    x, weights = normal(1)(2, 5), []

    def transposing(part, x):
        full = fs.gather(part)
        weights.append(_compat.StorageWeakRef(full["w"].untyped_storage()))
        return torch.tanh(x @ full["w"].t() + full["b"])

    def loss(p, step):
        value = chain(step, p, x)
        return value, torch.tensor(weights[0].expired())

    expected = fs.value_and_grad(partial(loss, step=transposing), has_aux=True)(params)
    weights.clear()
    found = fs.value_and_grad(partial(loss, step=fs.remat(transposing, save=["aten.t"])), has_aux=True)(params)
    assert_same_bits(fs.tree_leaves((found[0][0], found[1])), fs.tree_leaves((expected[0][0], expected[1])))
    assert bool(expected[0][1])
    assert bool(found[0][1]) == bool(_compat.honor_saved_tensor_hooks())


def test_what_is_saved_is_not_computed_again():
    """In a graph as in eager code: it holds no more than what is saved."""
    params, x = fs.shard(full_values(), fs.zero3(one_axis())), normal(1)(1000, 5)

    def loss(f, p):
        return chain(lambda part, x: f(fs.gather(part), x), p, x)

    peaks, expected = [], fs.value_and_grad(partial(loss, waves))(params)
    for f, times in ((waves, 3), (fs.remat(waves, save=["aten.tanh"]), 3), (fs.remat(waves), 6)):
        run = fs.value_and_grad(partial(loss, f))
        assert_same_bits(fs.tree_leaves(run(params)), fs.tree_leaves(expected))
        assert_same_bits(grad(partial(loss, f))(full_values()), fs.unshard(expected[1]))
        graph = fs.make_graph(run)(params)
        assert [moment.operator for moment in graph.moments].count("aten.tanh") == times
        peaks.append(graph.peak_bytes())
    assert peaks[0] > peaks[1] > peaks[2]
    times, x = itertools.count(), normal()(3)
    again = fs.remat(lambda x: (x + next(times)).exp().sum(), save=["aten.exp"])
    assert_same_bits(grad(again)(x), x.exp())
    assert next(times) == 2
    # Names with an overload, as a graph prints those that are no default, keep results too; others would keep nothing.
    rows = fs.remat(lambda x: (x + next(times)).sum(0, keepdim=True).exp().sum(), save=["aten.exp.default"])
    assert_same_bits(grad(rows)(x), (x + 3).sum(0, keepdim=True).exp().expand(3))
    for wrong in ("aten.tanh", ["tanh"], ["aten"], [None]):
        with pytest.raises(ValueError, match=r"^remat: expected save to be names as .\"aten.topk\"., got "):
            fs.remat(block, save=wrong)


def test_math_on_shards_is_done_before_a_checkpoint_or_refused():
    params = fs.shard({"w": normal(1)(4, 4), "a": normal(2)(4, 4)}, fs.zero3(one_axis(), min_shard_elements=0))

    def merge(p):
        return {"w": fs.tree_map(lambda w, a: 2 * w + a, p["w"], p["a"])}

    def square(p):
        return fs.gather(p)["w"].square().sum()

    expected = fs.value_and_grad(lambda p: square(merge(p)))(params)

    def merged_square(p):
        return square(merge(p))

    for remat in (fs.remat, lambda f: partial(checkpoint, f, use_reentrant=False)):
        again = remat(square)
        found = fs.value_and_grad(lambda p: again(merge(p)))(params)  # noqa: B023
        assert_same_bits(fs.tree_leaves(found), fs.tree_leaves(expected))
        assert text_of(partial(fs.value_and_grad(remat(merged_square)), params)) == (
            "value_and_grad: ['w'] is computed inside a checkpoint, so the backward cannot gather it again. Compute it "
            "outside of the checkpoint."
        )
    reference = grad_and_value(lambda p: fs.objective(fs.remat(merged_square)(p), like=p))(params)
    assert_same_bits(fs.tree_leaves(reference[::-1]), fs.tree_leaves(expected))
