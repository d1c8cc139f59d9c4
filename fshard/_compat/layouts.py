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
_FIRST_DECIDES = (
    torch.ops.aten.hardsigmoid_backward,
    torch.ops.aten.hardswish_backward,
    torch.ops.aten.hardtanh_backward,
    torch.ops.aten.logit_backward,
    torch.ops.aten.softplus_backward,
)


@cache
def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Return what a trace writes down in the place of such operators: the same kernels, in layouts that it knows.

    A wrong layout makes views that the kernels' results do not allow. Checked on 2.13.
    """
    replacements: dict[Any, Callable[..., Any]] = dict.fromkeys(RESHAPES, _view)
    for operator in _FIRST_DECIDES:
        replacements[operator.default] = partial(_run_with_layout, operator)
    return MappingProxyType(replacements)


def _view(x: torch.Tensor, size: Sequence[int]) -> Any:
    """View as the kernel does, which gives dims of size 1 other strides than the form without values."""
    has_symbols = any(isinstance(number, torch.SymInt) for number in (*x.shape, *x.stride(), *size))
    if 1 not in x.shape or has_symbols:
        return NotImplemented
    with _disable_current_modes():
        view = x.view(size)
        kernel_view = torch.empty_strided(x.shape, x.stride(), device="meta").view(size)
    if view.stride() == kernel_view.stride():
        return NotImplemented
    return x.as_strided(view.shape, kernel_view.stride())


def _run_with_layout(operator: Any, a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run the kernel on a result of the layout that it would make, which is that of the operands' sum."""
    if a.shape == b.shape and a.stride() == b.stride():
        return NotImplemented
    # The overload that writes to a given result is named as its argument is.
    name = "out" if "out" in operator.overloads() else "grad_input"
    write = getattr(operator, name)
    result = torch.empty_like(a + b)
    return write(a, b, *args, **kwargs, **{name: result})
