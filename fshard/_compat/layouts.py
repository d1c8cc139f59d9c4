"""Operators whose results torch lays out otherwise on tensors without values, checked on 2.13."""

from collections.abc import Callable, Mapping
from functools import partial
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


def correct_strides(x: torch.Tensor, *views: torch.Tensor) -> None:
    """Give reshaped tensors without values the strides that the kernel gives to dims of size 1. Checked on 2.13.

    They change in place: an operator that states strides would read other elements where a kernel has laid out `x`
    otherwise than a trace knows.
    """
    shape = views[0].shape
    if 1 not in x.shape or any(isinstance(number, torch.SymInt) for number in (*x.shape, *x.stride(), *shape)):
        return
    with _disable_current_modes():
        strides = torch.empty_strided(x.shape, x.stride(), device="meta").view(shape).stride()
        for view in views:
            if view.stride() != strides:
                view.as_strided_(shape, strides)


def _run_with_layout(operator: Any, a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run the kernel on a result of the layout that it would make, which is that of the operands' sum."""
    if a.shape == b.shape and a.stride() == b.stride():
        return NotImplemented
    # The overload that writes to a given result is named as its argument is.
    name = "out" if "out" in operator.overloads() else "grad_input"
    write = getattr(operator, name)
    result = torch.empty_like(a + b)
    return write(a, b, *args, **kwargs, **{name: result})


# What a trace writes down in the place of such operators: the same kernels, in layouts that it knows. A wrong layout
# makes views that the kernels' results do not allow. Checked on 2.13.
DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {operator.default: partial(_run_with_layout, operator) for operator in _FIRST_DECIDES}
)
