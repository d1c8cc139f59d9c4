"""Operators that torch lays out otherwise, or refuses, on tensors without values: a trace has the eager bits."""

import pytest
import torch
import torch.nn.functional as F

import fshard as fs
from tests.trees import assert_same_bits, normal

aten = torch.ops.aten
OFFS = torch.tensor([2, 3, 5, 6], dtype=torch.int32)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_grouped_products(dtype):
    """As mixtures of experts of transformers make them; torch's form without values takes bfloat16 alone."""
    draw = normal()

    def run(a, b):
        with torch.enable_grad():
            a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
            out = F.grouped_mm(a, b, offs=OFFS)
            return out, *torch.autograd.grad(out.sin().sum(), (a, b))

    given = draw(6, 16, dtype=dtype), draw(4, 16, 24, dtype=dtype)
    assert_same_bits(list(fs.jit(run)(*given)), list(run(*given)))


FIRST = (
    lambda a, b: aten.hardsigmoid_backward(a, b),
    lambda a, b: aten.hardtanh_backward(a, b, -1.0, 1.0),
    lambda a, b: aten.softplus_backward(a, b, 1, 20),
    # Rightly laid out by torch.
    lambda a, b: aten.silu_backward(a, b),
)


def test_results_lie_as_the_first_operand():
    """Were they laid out as the second, the view would fail when it runs."""
    draw = normal()
    a, b = draw(2, 4, 9).transpose(1, 2).abs(), draw(2, 9, 4).abs()
    for f in FIRST:

        def run(a, b, f=f):
            return [f(*given).reshape(18, 4) for given in ((a, b), (b, a), (b, b))]

        assert_same_bits(fs.jit(run)(a, b), run(a, b))
