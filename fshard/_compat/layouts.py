"""Operators whose results torch lays out otherwise on tensors without values, or refuses there, checked on 2.13."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

_GROUPED = torch.ops.aten._grouped_mm.default
# Rows of its result start at multiples of this.
_ALIGNMENT_BYTES = 16

# The operators that tensor.view() and tensor.reshape() end in. Checked on 2.13.
RESHAPES = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)

# Their kernels give the result the layout of the first operand, their Python forms that of the second.
_FIRST_DECIDES = tuple(
    getattr(torch.ops.aten, f"{name}_backward").default
    for name in ("hardsigmoid", "hardswish", "hardtanh", "logit", "softplus")
)


@cache
def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Return what a trace writes down in the place of such operators: the same kernels, whose layouts it knows.

    torch's kernel of grouped products takes float32 and float16, its form without values bfloat16 alone. A wrong layout
    makes views that the kernels' results do not allow. Checked on 2.13.
    """
    library = torch.library.Library("fshard_compat", "DEF")

    def own(operator: Any, name: str, fake: Callable[..., Any]) -> Any:
        schema = str(operator._schema).removeprefix("aten::")
        library.define(name + schema[schema.index("(") :])
        library.impl(name, lambda *args, **kwargs: operator(*args, **kwargs), "CompositeExplicitAutograd")
        torch.library.register_fake(f"fshard_compat::{name}", fake, lib=library)
        made = getattr(torch.ops.fshard_compat, name).default
        # Operators are gone when their library is.
        made.__dict__["library"] = library
        return made

    product = own(_GROUPED, "grouped_mm", _product)

    def grouped_mm(a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return NotImplemented if a.dtype == torch.bfloat16 or a.dtype != b.dtype else product(a, b, *args, **kwargs)

    found: dict[Any, Callable[..., Any]] = {_GROUPED: grouped_mm, **dict.fromkeys(RESHAPES, _view)}
    for operator in _FIRST_DECIDES:
        found[operator] = _where_layouts_differ(own(operator, operator.__name__.partition(".")[0], _as_first))
    return MappingProxyType(found)


def _view(x: torch.Tensor, size: Sequence[int]) -> Any:
    """View as the kernel does, which gives dims of size 1 other strides than the form without values."""
    if 1 not in x.shape or any(isinstance(number, torch.SymInt) for number in (*x.shape, *x.stride(), *size)):
        return NotImplemented
    with _disable_current_modes():
        seen = x.view(size)
        strides = torch.empty_strided(x.shape, x.stride(), device="meta").view(size).stride()
    return NotImplemented if seen.stride() == strides else x.as_strided(seen.shape, strides)


def _where_layouts_differ(operator: Any) -> Callable[..., Any]:
    def run(a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        same = a.shape == b.shape and a.stride() == b.stride()
        return NotImplemented if same else operator(a, b, *args, **kwargs)

    return run


def _as_first(a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Make the result without values, as sums of two tensors have it."""
    return torch.empty_like(a + b)


def _product(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, *args: Any) -> torch.Tensor:
    """Make the result without values: rows of a by group, columns of b by group, or a product for each group."""
    products = () if a.dim() != b.dim() else a.shape[:-2] if offs is None else offs.shape
    rows, columns, step = a.shape[-2], b.shape[-1], _ALIGNMENT_BYTES // a.element_size()
    width = -(-columns // step) * step
    strides = (rows * width, width, 1) if products else (width, 1)
    return a.new_empty_strided((*products, rows, columns), strides)
