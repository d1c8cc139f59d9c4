"""Operators whose results torch lays out otherwise on tensors without values, checked on 2.13."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

# The operators that tensor.view() and tensor.reshape() end in. Checked on 2.13.
RESHAPES = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)

# Their kernels give the result the layout of the first operand, their Python forms that of the second.
_FIRST_DECIDES = tuple(
    getattr(torch.ops.aten, f"{name}_backward")
    for name in ("hardsigmoid", "hardswish", "hardtanh", "logit", "softplus")
)


@cache
def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Return what a trace writes down in the place of such operators: the same kernels, in layouts that it knows.

    A wrong layout makes views that the kernels' results do not allow. Checked on 2.13.
    """
    first = {operator.default: partial(_laid_out, operator) for operator in _FIRST_DECIDES}
    return MappingProxyType(dict.fromkeys(RESHAPES, _view) | first)


def _view(x: torch.Tensor, size: Sequence[int]) -> Any:
    """View as the kernel does, which gives dims of size 1 other strides than the form without values."""
    if 1 not in x.shape or any(isinstance(number, torch.SymInt) for number in (*x.shape, *x.stride(), *size)):
        return NotImplemented
    with _disable_current_modes():
        seen = x.view(size)
        strides = torch.empty_strided(x.shape, x.stride(), device="meta").view(size).stride()
    return NotImplemented if seen.stride() == strides else x.as_strided(seen.shape, strides)


def _laid_out(operator: Any, a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run the kernel on a result of the layout that it would make, which is that of the operands' sum."""
    if a.shape == b.shape and a.stride() == b.stride():
        return NotImplemented
    out = next(name for name in ("out", "grad_input") if name in operator.overloads())
    return getattr(operator, out)(a, b, *args, **kwargs, **{out: torch.empty_like(a + b)})
