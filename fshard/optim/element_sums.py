"""Sums over the elements of leaves that are exact, and so have the same bits however leaves are split.

Terms are cut in digits: whole numbers of few bits, counted from the largest term. float64 holds every sum of digits,
in whatever order they are added, and the sums of digits make up the sum of the terms. It has no derivative.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fshard import _compat, comm
from fshard.errors import expect
from fshard.shard import local_ranges
from fshard.tree import Axis, Spec, grouped, is_sharded

# So many elements become float64 numbers at a time, in a processor's cache.
PIECE = 1 << 14

# Bits of the largest term, at least, that digits make up: those of a float64.
BITS = 53

Terms = Callable[[torch.Tensor], torch.Tensor]


class Request(NamedTuple):
    """Elements to be summed over some dims.

    Attributes:
        leaf: A leaf, which says how the tensor is split.
        tensor: The elements that this rank has, in the shape of its shard.
        dims: The dims to sum over, counted from the front.
    """

    leaf: Any
    tensor: torch.Tensor
    dims: Sequence[int]


class _Part(NamedTuple):
    """A request without padding: the axes that split its dims, and the bits of a digit."""

    axes: tuple[Axis, ...]
    tensor: torch.Tensor
    dims: tuple[int, ...]
    bits: int


def element_sums(requests: Sequence[Request], terms: Terms) -> list[torch.Tensor]:
    """Sum terms of elements over dims, by two collectives over each axis for each set of axes that splits such dims.

    Args:
        requests: Tensors and their dims.
        terms: Maps a piece of a tensor to float64 numbers, element by element: 0 or more, 0 for 0, and no less for a
            number of larger magnitude.

    Returns:
        The sums in float64, of size 1 along their dims, equal on the ranks that split these dims.

    Raises:
        ValueError: if a tensor is differentiated.
    """
    tensors = [request.tensor for request in requests]
    differentiated = any(map(_compat.is_differentiated, tensors)) or _compat.any_dual(tensors)
    remedy = "leave out sums where updates are differentiated"
    expect(not differentiated, 'sums="tree"', "tensors without derivatives", "one that is differentiated", remedy)
    parts = [_part(request) for request in requests]
    sums: dict[int, torch.Tensor] = {}
    for axes, group in grouped(parts, lambda part: part.axes).items():
        bounds = [_bound(parts[i], terms) for i in group]
        for axis in axes:
            bounds = [rows.amax(0) for rows in comm.all_gather(bounds, axis, "largest terms")]
        # Powers of two above the bounds, within what their inverses can be.
        powers = [torch.frexp(bound).exponent.clamp(-1000, 1022).long() for bound in bounds]
        digits = [_digits(parts[i], _power_of_two(-power), terms) for i, power in zip(group, powers, strict=True)]
        for axis in axes:
            digits = comm.all_reduce(digits, axis, "sums of digits")
        for i, rows, power, bound in zip(group, digits, powers, bounds, strict=True):
            total = torch.zeros_like(bound)
            for row in reversed(rows.unbind()):
                total = (total + row) * 2.0 ** -parts[i].bits
            # Not a number, or infinity, is the bound itself.
            sums[i] = torch.where(bound.isfinite(), total * _power_of_two(power), bound)
    return [sums[i].reshape(_kept(request.tensor, request.dims)) for i, request in enumerate(requests)]


def _part(request: Request) -> _Part:
    leaf, tensor, dims = request
    spec = leaf.spec if is_sharded(leaf) else Spec(tuple(leaf.shape))
    ranges = local_ranges(spec)
    for dim in dims:
        tensor = tensor.narrow(dim, 0, ranges[dim][1])
    axes = tuple(axis for dim in dims for axis in spec.split_axes(dim) if axis.size > 1)
    count = math.prod(spec.full_shape[dim] for dim in dims)
    # The largest term may be twice the power of two twice over.
    bits = 51 - max(0, count - 1).bit_length()
    return (
        _Part(axes, tensor.reshape(-1), (0,), bits)
        if len(dims) == tensor.dim()
        else _Part(axes, tensor, (*dims,), bits)
    )


def _kept(tensor: torch.Tensor, dims: Sequence[int]) -> list[int]:
    return [1 if dim in dims else size for dim, size in enumerate(tensor.shape)]


def _bound(part: _Part, terms: Terms) -> torch.Tensor:
    """Find the largest term along the dims, or for complex numbers a larger one."""
    tensor, dims = part.tensor, part.dims
    if not tensor.numel():
        return tensor.new_zeros(_kept(tensor, dims), dtype=torch.float64)
    if tensor.is_complex():
        pairs = torch.view_as_real(tensor.resolve_conj())
        largest = _largest(pairs, (*dims, -1)).squeeze(-1)
        return terms(torch.complex(largest, largest))
    return terms(_largest(tensor, dims))


def _largest(tensor: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    return torch.maximum(tensor.amax(dims, keepdim=True), -tensor.amin(dims, keepdim=True))


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Make float64 numbers of their exponents alone, exact wherever an element stands."""
    return ((exponent + 1023) << 52).view(torch.float64)


def _digits(part: _Part, scale: torch.Tensor, terms: Terms) -> torch.Tensor:
    """Sum each of the digits of the terms along the dims, to (digits, *sums)."""
    _, tensor, dims, bits = part
    rows = max(1, PIECE // max(1, tensor[:1].numel())) if tensor.is_cpu else max(1, len(tensor))
    scales = itertools.repeat(scale) if 0 in dims else scale.split(rows)
    found = []
    for piece, factor in zip(tensor.split(rows), scales, strict=False):
        left, digits = terms(piece) * (factor * 2.0**bits), []
        for _ in range(-(-BITS // bits)):
            whole = left.floor()
            digits.append(whole.sum(dims, keepdim=True))
            left = left.sub_(whole).mul_(2.0**bits)
        found.append(torch.stack(digits))
    return torch.stack(found).sum(0) if 0 in dims else torch.cat(found, 1)
