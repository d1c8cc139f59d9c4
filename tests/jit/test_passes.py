"""Passes over a traced graph: views that differ from what they view in more than shape and strides stay."""

import pytest
import torch
from torch.nn import functional as F

import fshard as fs
from tests.trees import assert_same_bits

X = torch.arange(1.0, 4.0)
C = torch.tensor([1 + 2j, 3 - 1j, 2j])
VIEWS = {
    "conjugate": (lambda x: x.conj() * x, C),
    "negative": (lambda x: x.conj().imag + 0, C),
    "dtype": (lambda x: x.view(torch.int32) + 1, X),
    "there and back": (lambda x: x.view(torch.int32).view(torch.float32) + x.t().t(), X),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.rows(len(VIEWS))
def test_views_of_other_values_are_not_folded_away(name):
    f, x = VIEWS[name]
    assert_same_bits(fs.jit(f)(x), f(x))


def test_kernels_that_draw_in_training_alone_need_no_key_elsewhere():
    x = X - 2
    for f in (F.rrelu, lambda x: torch.native_dropout(x, 0.5, False)[0]):
        assert_same_bits(fs.jit(f)(x), f(x))
    # It draws unless train is False.
    for f in (lambda x: F.rrelu(x, training=True), lambda x: torch.native_dropout(x, 0.5, None)[0]):
        with pytest.raises(ValueError, match="draws random numbers without a key"):
            fs.jit(f)(x)
