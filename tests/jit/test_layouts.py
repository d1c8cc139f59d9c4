"""Operators that torch lays out otherwise, or refuses, on tensors without values: a trace has the eager bits."""

import pytest
import torch
import torch.nn.functional as F

import fshard as fs
from fshard import _compat
from tests.trees import assert_same_bits, normal

aten = torch.ops.aten


def grouped(a, b, offs):
    return F.grouped_mm(a, b, offs=offs)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
def test_grouped_products(dtype):
    """As mixtures of experts of transformers make them; torch's form without values takes bfloat16 alone."""
    draw, offs = normal(), torch.tensor([2, 3, 5, 6], dtype=torch.int32)

    def run(a, b):
        with torch.enable_grad():
            a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
            out = grouped(a, b, offs)
            return out, *torch.autograd.grad(out.sin().sum(), (a, b))

    given = draw(6, 16, dtype=dtype), draw(4, 16, 24, dtype=dtype)
    assert_same_bits(list(fs.jit(run)(*given)), list(run(*given)))


@pytest.mark.parametrize(
    "shapes",
    (
        ((6, 8), (4, 6, 8), True, True),
        ((6, 16), (4, 16, 24), True, False),
        ((8, 6), (6, 16), True, False),
        ((4, 5, 8), (4, 8, 12), False, False),
    ),
    ids=("rows padded", "rows", "columns", "batches"),
)
def test_grouped_products_lie_as_their_kernel_lays_them(shapes):
    draw = normal()
    left, right, has_offs, transposed = shapes
    a, b = draw(*left, dtype=torch.float32), draw(*right, dtype=torch.float32)
    a = draw(*left[::-1], dtype=torch.float32).t() if left == (8, 6) else a
    b = b.transpose(-2, -1) if transposed else b
    offs = torch.tensor([2, 3, 5, 6], dtype=torch.int32) if has_offs else None
    out = grouped(a, b, offs)
    strides = []

    def run(a, b):
        result = grouped(a, b, offs)
        strides.append(result.stride())
        return result

    assert_same_bits(fs.jit(run)(a, b), out)
    assert strides == [out.stride()]


FIRST = {
    "hardsigmoid": lambda a, b: aten.hardsigmoid_backward(a, b),
    "hardswish": lambda a, b: aten.hardswish_backward(a, b),
    "hardtanh": lambda a, b: aten.hardtanh_backward(a, b, -1.0, 1.0),
    "logit": lambda a, b: aten.logit_backward(a, b),
    "softplus": lambda a, b: aten.softplus_backward(a, b, 1, 20),
    # Rightly laid out by torch.
    "silu": lambda a, b: aten.silu_backward(a, b),
}


@pytest.mark.parametrize("name", FIRST)
def test_results_lie_as_the_first_operand(name):
    """Were they laid out as the second, the view would fail when it runs."""
    draw = normal()
    a, b = draw(2, 4, 9).transpose(1, 2).abs(), draw(2, 9, 4).abs()

    def run(a, b):
        return FIRST[name](a, b).reshape(18, 4), FIRST[name](b, a).reshape(18, 4), FIRST[name](b, b).reshape(18, 4)

    assert_same_bits(list(fs.jit(run)(a, b)), list(run(a, b)))


def test_equal_layouts_keep_torchs_own_operators():
    a = normal()(3, 4)
    text = str(fs.make_graph(lambda a, b: FIRST["softplus"](a, b))(a, a.clone()))
    assert "aten.softplus_backward" in text
    assert set(_compat.layouts.decompositions()) >= {aten.softplus_backward.default, aten._grouped_mm.default}


VIEWED = {
    "same shape": (torch.Size((3, 1, 5)), (3, 1, 5)),
    "a dim of size 1 in front": (torch.Size((1, 5)), (1, 1, 5)),
    "one dim less": (torch.Size((4, 1, 1)), (4, 1)),
    "joined": (torch.Size((2, 1, 6)), (12,)),
    "split": (torch.Size((1, 12)), (3, 1, 4)),
}


@pytest.mark.parametrize("name", VIEWED)
def test_views_have_the_strides_of_the_kernel_at_dims_of_size_1(name):
    """Kernels of products are chosen by them, and round differently."""
    shape, viewed = VIEWED[name]
    strides = []

    def run(x):
        # Of a size 1 that steps by 1, as a slice of one column has it.
        odd = x.as_strided(shape, [1 if size == 1 else stride for size, stride in zip(shape, x.stride(), strict=True)])
        for given in (x, odd):
            strides.append(given.view(viewed).stride())
        return odd.view(viewed) + 0, aten._unsafe_view(odd, viewed) + 0

    x = normal()(*shape)
    out = run(x)
    assert_same_bits(list(fs.jit(run)(x)), list(out))
    assert strides[:2] == strides[2:]


def test_products_of_columns_in_two_vmaps_have_the_eager_bits():
    """Which kernel multiplies depends on strides of dims of size 1."""
    draw = normal()
    weight, x = draw(3, 33, 1), draw(3, 5, 33)

    def loss(weight, x):
        return torch.func.vmap(lambda x: (x @ weight).tanh().square().mean())(x).mean()

    step = torch.func.vmap(torch.func.grad_and_value(loss), in_dims=(0, None))
    assert_same_bits(list(fs.jit(step)(weight, x)), list(step(weight, x)))
