"""custom_call: derivatives by its own backward, on the tape of the call that runs."""

import re

import pytest
import torch
from torch.func import grad, jvp, vmap

import fshard as fs
from fshard.extend import custom_call
from tests.checks import find_problems
from tests.ranks import on_ranks
from tests.trees import assert_same_bits, one_axis


def around(x, axis, back=False):
    pairs = [(rank, (rank + 1) % axis.size) for rank in range(axis.size)]
    return fs.ppermute(x, axis, [pair[::-1] for pair in pairs] if back else pairs)


def cubes(x, axis, plain=True):
    """The cube of the last rank's value."""

    def forward(tensors):
        received = around(tensors[0], axis)
        return [received**3], [tensors[0], received]

    def backward(saved, grads):
        return [around(3 * saved[1] ** 2 * grads[0], axis, back=True)]

    form = (lambda tensors: [around(tensors[0], axis) ** 3]) if plain else None
    return custom_call(forward, backward, [x], "cubes", axis, plain=form, remedy="use the plain form")[0]


def row(axis):
    return torch.arange(3, dtype=torch.float64) + 10 * fs.axis_index(axis)


TEXT = re.escape(
    "cubes supports first derivatives by value_and_grad or backward() only, and was used under torch.func, in a jvp or "
    "in a second derivative; "
    "use the plain form"
)


@on_ranks(1, 3)
def test_derivatives_of_any_order():
    """Of any order by torch.func, of the first order by autograd."""
    axis = fs.axis_of(one_axis())
    x, other = row(axis), around(row(axis), axis)
    leaf, ones = x.clone().requires_grad_(), torch.ones_like(x)
    out = cubes(leaf, axis)
    assert_same_bits([out.detach(), torch.autograd.grad(out.sum(), leaf)[0]], [other**3, 3 * x**2])
    gradient = grad(lambda x: cubes(x, axis).sum())
    assert_same_bits(jvp(gradient, (x,), (ones,)), (3 * x**2, 6 * x))
    assert_same_bits(vmap(gradient)(torch.stack([x, -x])), torch.stack([3 * x**2, 3 * x**2]))
    assert_same_bits(jvp(lambda x: cubes(x, axis), (x,), (ones,)), (other**3, 3 * other**2))
    with pytest.raises(ValueError, match=TEXT):
        torch.autograd.grad(cubes(leaf, axis).sum(), leaf, create_graph=True)
    with pytest.raises(ValueError, match=TEXT):
        grad(lambda x: cubes(x, axis, plain=False).sum())(x)
    with pytest.raises(ValueError, match=TEXT), torch.autograd.forward_ad.dual_level():
        cubes(torch.autograd.forward_ad.make_dual(x, x), axis, plain=False)


@on_ranks(3)
def test_ranks_need_no_use_for_the_result():
    """Nor does the order in which gradients of gathered leaves are reduced depend on it; jitted, the bits are equal."""
    axis = fs.axis_of(one_axis())
    full = {"w": torch.full((3,), 2.0), "v": torch.full((3,), 3.0)}
    params = fs.shard(full, fs.zero3(one_axis(), min_shard_elements=0))

    def loss_fn(params):
        w, v = fs.gather(params["w"]), fs.gather(params["v"])
        out = cubes(cubes(w, axis) * v, axis)
        return out.sum() if fs.axis_index(axis) == 1 else w.sum()

    step = fs.value_and_grad(loss_fn, reduce="sum")
    for run in (step, fs.jit(step)):
        # One rank's loss has (w^3 v)^3, the others' w.
        grads = fs.unshard(run(params)[1])
        assert_same_bits(grads, {"w": torch.full((3,), 62207.0 + axis.size), "v": torch.full((3,), 13824.0)})

    def loss_of_cast(params, axis):
        return fs.pcast(cubes(fs.gather(params["w"]), axis), axis, to="varying").sum()

    assert find_problems(loss_of_cast, params, axis) == ["superfluous cast"]
