"""Operators that torch lays out otherwise on tensors without values: a trace has the eager bits."""

import torch

import fshard as fs
from tests.trees import assert_same_bits, normal

aten = torch.ops.aten


FIRST = (
    lambda a, b: aten.hardsigmoid_backward(a, b),
    lambda a, b: aten.hardtanh_backward(a, b, -1.0, 1.0),
    lambda a, b: aten.softplus_backward(a, b, 1, 20),
    lambda a, b: aten.hardswish_backward(a, b),
    lambda a, b: aten.logit_backward(a, b / 8),
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
