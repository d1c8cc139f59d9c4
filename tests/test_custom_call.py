"""custom_call: a function with a backward of its own, both of which communicate."""

import re
from functools import partial

import pytest
import torch
from torch.func import grad, jvp, vmap

import fshard as fs
from fshard.collectives import custom_call
from fshard.testing import check_varying
from tests.ranks import on_ranks
from tests.trees import assert_same_bits, one_axis


def around(x, axis, by=1):
    return fs.ppermute(x, axis, [(rank, (rank + by) % axis.size) for rank in range(axis.size)])


def forward(tensors, axis, label):
    (x,) = tensors
    received = around(x, axis)
    return [received**3], [x, received]


def backward(saved, grads, axis):
    return [around(3 * saved[1] ** 2 * grads[0], axis, -1)]


def cubes(x, axis, plain=True, what="cubes"):
    """The cube of the last rank's value."""
    run, back = partial(forward, axis=axis, label="ppermute"), partial(backward, axis=axis)
    form = (lambda tensors: [around(tensors[0], axis) ** 3]) if plain else None
    return custom_call(run, back, [x], what, axis, plain=form, remedy="use the plain form")[0]


def row(axis):
    return torch.arange(3, dtype=torch.float64) + 10 * fs.axis_index(axis)


@on_ranks(1, 3)
def test_derivatives_of_any_order():
    axis = fs.axis_of(one_axis())
    x, other = row(axis), around(row(axis), axis)
    leaf = x.clone().requires_grad_()
    out = cubes(leaf, axis)
    assert_same_bits(out.detach(), other**3)
    (first,) = torch.autograd.grad(out.sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), leaf)
    assert_same_bits((first.detach(), second), (3 * x**2, 6 * x))
    assert_same_bits(torch.autograd.grad(cubes(leaf, axis).sum(), leaf)[0], 3 * x**2)
    starts = torch.stack([torch.ones_like(x), 2 * torch.ones_like(x)])
    out = cubes(leaf, axis)
    rows = vmap(lambda start: torch.autograd.grad(out, leaf, start)[0])(starts)
    assert_same_bits(rows, torch.stack([3 * x**2, 6 * x**2]))

    def of(x):
        return cubes(x, axis).sum()

    assert_same_bits(grad(of)(x), 3 * x**2)
    assert_same_bits(jvp(grad(of), (x,), (torch.ones_like(x),))[1], 6 * x)
    assert_same_bits(vmap(grad(of))(torch.stack([x, -x])), torch.stack([3 * x**2, 3 * x**2]))
    assert_same_bits(jvp(of, (x,), (torch.ones_like(x),))[1], (3 * other**2).sum())
    with torch.no_grad():
        assert not cubes(leaf, axis).requires_grad


@on_ranks(2)
def test_what_has_no_plain_form_is_refused():
    axis = fs.axis_of(one_axis())
    x = row(axis).requires_grad_()
    text = re.escape(
        "cubes: expected first derivatives by value_and_grad or backward(), got torch.func, a jvp or a second "
        "derivative; use the plain form"
    )
    with pytest.raises(ValueError, match=text):
        grad(lambda x: cubes(x, axis, plain=False).sum())(x)
    with pytest.raises(ValueError, match=text), torch.autograd.forward_ad.dual_level():
        cubes(torch.autograd.forward_ad.make_dual(x.detach(), x.detach()), axis, plain=False)
    with pytest.raises(ValueError, match=text):
        torch.autograd.grad(cubes(x, axis, plain=False).sum(), x, create_graph=True)


@on_ranks(3, "2 processes")
def test_ranks_need_no_use_for_the_result():
    """Nor does the order in which gradients of gathered leaves are reduced depend on it; jitted, the bits are equal."""
    axis = fs.axis_of(one_axis())
    full = {"w": row(axis) * 0 + 2, "v": row(axis) * 0 + 3}
    params = fs.shard(full, fs.zero3(one_axis(), min_shard_elements=0))

    def loss_fn(params):
        w, v = fs.gather(params["w"]), fs.gather(params["v"])
        out = cubes(cubes(w, axis) * v, axis)
        return out.sum() if fs.axis_index(axis) == 1 else w.sum()

    step = fs.value_and_grad(loss_fn, reduce="sum")
    for run in (step, step, fs.jit(step)):
        # One rank's loss has (w^3 v)^3, the others' w.
        _, grads = run(params)
        assert_same_bits(fs.unshard(grads), {"w": full["w"] * 0 + 62207 + axis.size, "v": full["v"] * 0 + 13824})
    check_varying(lambda p: cubes(fs.gather(p["w"]), axis).sum(), params)
    with pytest.raises(AssertionError, match="ppermute over 'shard', whose result varies"):
        check_varying(lambda p: fs.pvary(cubes(fs.gather(p["w"]), axis), axis).sum(), params)


@on_ranks(2)
def test_ranks_that_call_other_functions_hear_of_it():
    axis = fs.axis_of(one_axis())
    params = fs.shard({"w": row(axis) * 0}, fs.zero3(one_axis(), min_shard_elements=0))

    def loss_fn(params):
        return cubes(fs.gather(params["w"]), axis, what=f"cubes {fs.axis_index(axis)}").sum()

    with pytest.raises(ValueError, match="cubes 0 over 'shard'"):
        fs.value_and_grad(loss_fn)(params)
