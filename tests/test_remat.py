"""remat: the same gradients, computed again rather than kept, under torch.func and inside value_and_grad."""

from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.func import grad, grad_and_value, hessian, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import _compat
from fshard.testing import assert_trees_close
from tests.ranks import on_ranks
from tests.trees import OF_EVERY_LEAF, assert_same_bits, normal, one_axis

# Derivatives of derivatives: a hundred products of numbers around one, in float64.
ATOL = 1e-12


def full_values():
    draw = normal()
    return {"blocks": [{"w": draw(5, 5), "b": draw(5)} for _ in range(3)]}


def block(params, x):
    return torch.tanh(x @ params["w"] + params["b"])


def chain(step, params, x):
    for part in params["blocks"]:
        x = step(part, x)
    return x.square().sum()


def transforms(step):
    """What is computed of a chain of steps by every transform that is stated to work."""
    params, x, t = full_values(), normal(1)(2, 5), normal(2)(2, 5)

    def of_x(x):
        return chain(step, params, x)

    return {
        "grad": lambda: grad(lambda p: chain(step, p, x))(params),
        "grad of an input": lambda: grad(of_x)(x),
        "grad and value": lambda: grad_and_value(lambda p: chain(step, p, x))(params),
        "vjp": lambda: vjp(lambda p, x: chain(step, p, x), params, x)[1](torch.tensor(2.0).double()),
        "jvp": lambda: jvp(of_x, (x,), (t,)),
        "jvp of parameters": lambda: jvp(
            lambda p: chain(step, p, x), (params,), (fs.tree_map(torch.ones_like, params),)
        ),
        "jacobian": lambda: jacrev(lambda x: step(params["blocks"][0], x))(x),
        "grad of grad": lambda: grad(lambda x: grad(of_x)(x).square().sum())(x),
        "jvp of grad": lambda: jvp(grad(of_x), (x,), (t,)),
        "grad of jvp": lambda: grad(lambda x: jvp(of_x, (x,), (t,))[1])(x),
        "hessian": lambda: hessian(of_x)(x),
        "vmap": lambda: vmap(lambda row: step(params["blocks"][0], row))(x),
        "vmap of grad": lambda: vmap(grad(of_x))(x),
        "grad of vmap": lambda: grad(lambda p: vmap(lambda row: chain(step, p, row))(x).sum())(params),
    }


@pytest.mark.parametrize("name", transforms(block))
def test_under_torch_func_it_is_the_function(name):
    found, expected = transforms(fs.remat(block))[name](), transforms(block)[name]()
    assert_trees_close(found, expected, rtol=ATOL, atol=ATOL)


def by_autograd(step, x):
    params = fs.tree_map(lambda tensor: tensor.requires_grad_(), full_values())
    value = chain(step, params, x)
    return value.detach(), *torch.autograd.grad(value, fs.tree_leaves(params))


def test_under_autograd_it_is_the_function():
    x = normal(1)(2, 5)
    assert_same_bits(by_autograd(fs.remat(block), x), by_autograd(block, x))


def by_func(step, x):
    return grad(lambda p: chain(step, p, x))(full_values())


@pytest.mark.parametrize("differentiate", (by_autograd, by_func))
def test_it_is_called_once_in_the_forward_and_once_in_the_backward(differentiate):
    """Also where nothing is differentiated: once."""
    counted = Mock(wraps=block)
    differentiate(fs.remat(counted), normal(1)(2, 5))
    assert counted.call_count == 2 * 3
    with torch.no_grad():
        chain(fs.remat(counted), full_values(), normal(1)(2, 5))
    assert counted.call_count == 3 * 3


@pytest.mark.parametrize("remat, kept", [(lambda f: f, True), (fs.remat, False)], ids=("as it is", "remat"))
def test_what_it_computes_on_the_way_is_not_kept(remat, kept):
    """When the forward has ended, what it saved is gone."""
    weight, x, found = normal()(5, 7), normal(1)(2, 5), []

    def wide(x):
        h = torch.tanh(x @ weight)
        found.append(_compat.StorageWeakRef(h.untyped_storage()))
        return h.sum()

    value = remat(wide)(x.requires_grad_())
    assert found[0].expired() is not kept
    value.backward()


def test_trees_flags_and_none_pass():
    """As arguments and as results, by position or by name."""

    def f(tree, flag, *, scale, nothing=None):
        x, (y, text) = tree["x"], tree["pair"]
        assert (flag, text, nothing) == (True, "text", None)
        return {"product": x * y * scale, "shape": x.shape, "nothing": None, "sums": [x.sum(), y.sum()]}

    def run(f, x):
        out = f({"x": x, "pair": (torch.arange(3), "text")}, True, scale=torch.tensor(2.0))
        assert (out["shape"], out["nothing"]) == (x.shape, None)
        return out["product"].sum() + out["sums"][0]

    x = normal()(3)
    for g in (f, fs.remat(f)):
        assert_trees_close(grad(lambda x, g=g: run(g, x))(x), 2.0 * torch.arange(3) + 1, rtol=ATOL, atol=ATOL)
    x.requires_grad_()
    run(fs.remat(f), x).backward()
    assert_trees_close(x.grad, 2.0 * torch.arange(3) + 1, rtol=ATOL, atol=ATOL)


def test_an_argument_may_be_returned_as_it_is():
    def f(x, y):
        return x, y, x * y

    x = normal()(3)
    found = grad(lambda x: sum(out.sum() for out in fs.remat(f)(x, 2 * x)))(x)
    assert_trees_close(found, 3 + 4 * x, rtol=ATOL, atol=ATOL)


def test_random_numbers_are_drawn_again_as_they_were():
    """So that the gradient of a mask is the mask."""
    x = torch.ones(1000, dtype=torch.float64)

    def masked(x):
        return nn.functional.dropout(x, 0.5)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        found, out = grad_and_value(lambda x: (fs.remat(masked)(x) * torch.arange(1000)).sum())(x)
        torch.manual_seed(0)
        expected = masked(x)
    assert_trees_close(found, expected * torch.arange(1000), rtol=ATOL, atol=ATOL)
    assert_trees_close(out, (expected * torch.arange(1000)).sum(), rtol=ATOL, atol=ATOL)


CLOSURES = {
    "grad": lambda f, w: grad(lambda w: f(w)().sum())(w),
    "vjp": lambda f, w: vjp(lambda w: f(w)(), w)[1](torch.ones(3).double()),
    "jvp": lambda f, w: jvp(lambda w: f(w)(), (w,), (w,)),
    "vmap of grad": lambda f, w: vmap(grad(lambda w: f(w)().sum()))(w[None]),
}


@pytest.mark.parametrize("name", CLOSURES)
def test_what_is_differentiated_and_no_argument_is_refused_under_torch_func(name):
    """Its gradient would be lost; a tensor that is not differentiated may be anywhere."""
    with pytest.raises(
        ValueError, match=r"remat: expected all that is differentiated among the arguments of f, got .* that f reaches"
    ):
        CLOSURES[name](lambda w: fs.remat(lambda: w * w), normal()(3))
    other = normal(1)(3)
    found = grad(lambda w: fs.remat(lambda w: w * other)(w).sum())(normal()(3))
    assert_same_bits(found, other)


def test_a_closure_is_fine_under_autograd():
    w = normal()(3).requires_grad_()
    fs.remat(lambda: w * w)().sum().backward()
    assert_same_bits(w.grad, 2 * w)


def gathering(part, x):
    return block(fs.gather(part), x)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("strategy", OF_EVERY_LEAF)
def test_inside_value_and_grad_it_is_the_function(strategy):
    """Gathering inside, or passed what was gathered outside; and as torch's own checkpoint does."""

    def outside(step):
        return lambda part, x: step(fs.gather(part), x)

    spellings = {
        "remat around": fs.remat(gathering),
        "remat inside": outside(fs.remat(block)),
        "checkpoint around": lambda part, x: checkpoint(gathering, part, x, use_reentrant=False),
        "remat twice": fs.remat(lambda part, x: fs.remat(gathering)(part, x)),
        "remat in remat": fs.remat(outside(fs.remat(block))),
    }
    mesh = one_axis()
    x = normal(1 + fs.comm.rank(fs.axis_of(mesh)))(2, 5)
    params = fs.shard(full_values(), OF_EVERY_LEAF[strategy](mesh))
    expected = fs.value_and_grad(lambda p: chain(gathering, p, x))(params)
    for step in spellings.values():
        found = fs.value_and_grad(lambda p, s=step: chain(s, p, x))(params)
        assert_same_bits(fs.tree_leaves(found), fs.tree_leaves(expected))
    whole = fs.value_and_grad(fs.remat(lambda p: chain(gathering, p, x)))(params)
    assert_same_bits(fs.tree_leaves(whole), fs.tree_leaves(expected))


@on_ranks(1, 2, 3)
def test_gathering_under_torch_func_is_computed_and_gathered_again(world_size):
    """The reference of value_and_grad, which keeps what it gathered, does not with remat."""
    mesh = one_axis()
    x = normal(1 + fs.comm.rank(fs.axis_of(mesh)))(2, 5)
    params = fs.shard(full_values(), OF_EVERY_LEAF["zero3"](mesh))
    counts, results = [], []
    for step in (gathering, fs.remat(gathering)):
        with fs.comm.record() as record:
            found = grad_and_value(lambda p, s=step: fs.objective(chain(s, p, x), like=p))(params)
        counts.append([entry.label for entry in record].count("gather"))
        results.append(found)
    assert_trees_close(results[1], results[0], rtol=ATOL, atol=ATOL)
    assert counts == ([3, 6] if world_size > 1 else [0, 0])
