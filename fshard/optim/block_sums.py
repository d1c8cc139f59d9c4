"""Sums over all elements of a tensor, which convert one block of them to float64 at a time.

In a graph, each sum is one operator, however many blocks it takes. Operators have no derivative: what is differentiated
runs the same arithmetic in operators of torch.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from fshard import _compat
from fshard.comm import ops

# A CPU is nine times faster if the float64 copies of a block stay in its cache: of a sum of powers, of an exact sum.
CPU_BLOCK = 1 << 16
EXACT_CPU_BLOCK = 1 << 14
# An accelerator converts more, because each kernel takes time to launch. Up to three copies are held at a time, 48 MB.
BLOCK = 1 << 21

# The bits of a digit. A float64 number has less than two digits. A sum of 2**26 first digits would not be exact.
BITS = 27


def sum_powers(tensor: torch.Tensor, p: float) -> torch.Tensor:
    """Sum the p-th powers of the magnitudes in each block of a tensor, or find the largest one if p is infinite.

    Args:
        tensor: Any tensor, whose elements are taken in the order of its indices.
        p: The power, above 0.

    Returns:
        A float64 tensor with a number for each block.
    """
    run: Callable[..., torch.Tensor] = _OPERATOR_OF_POWERS if _is_one_node(tensor) else _sum_powers
    return run(tensor, p)


def _sum_powers(tensor: torch.Tensor, p: float) -> torch.Tensor:
    return torch.stack([_sum_block(block, p) for block in _cut_blocks(tensor, _power_block(tensor))])


def _sum_block(block: torch.Tensor, p: float) -> torch.Tensor:
    if math.isinf(p):
        # The zero in front is the largest of no elements.
        return torch.cat([block.new_zeros(1), block]).abs().amax().double()
    # A complex number counts by its magnitude.
    numbers = block.to(torch.complex128).abs() if block.is_complex() else block.double()
    if p == 2:
        return numbers.dot(numbers)
    return (numbers.abs() ** p).sum()


def _power_block(tensor: torch.Tensor) -> int:
    return CPU_BLOCK if tensor.device.type == "cpu" else BLOCK


def _cut_blocks(tensor: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """Cut a tensor into flat blocks of so many elements. Where it has gaps, only the rows of a block are copied."""
    if tensor.is_contiguous() or tensor.dim() < 2:
        yield from tensor.reshape(-1).split(size)
        return
    row_size = tensor[0].numel()
    for start in range(0, tensor.numel(), size):
        end = min(start + size, tensor.numel())
        first_row = start // row_size
        rows = tensor[first_row : math.ceil(end / row_size)].reshape(-1)
        # A copy, because the bits of a dot product depend on where in a vector register its numbers begin.
        yield rows[start - first_row * row_size : end - first_row * row_size].clone()


def sum_digits(tensor: torch.Tensor, scale: torch.Tensor, dim: int | None, *, squares: bool) -> torch.Tensor:
    """Sum both digits of each element, or of each square, which is exact in any order.

    Args:
        tensor: A real tensor of numbers that are not negative, or of any numbers with `squares`.
        scale: For each sum a power of two in float64. Terms times `scale` are below 1.
        dim: The dim to sum over, counted from the back; None sums over all of them.
        squares: Whether to sum squares.

    Returns:
        An int64 tensor with the sums of the high digits and those of the low ones. The dim is left out.
    """
    run: Callable[..., torch.Tensor] = _OPERATOR_OF_DIGITS if _is_one_node(tensor) else _sum_digits
    return run(tensor, scale, dim, squares)


def _sum_digits(tensor: torch.Tensor, scale: torch.Tensor, dim: int | None, squares: bool) -> torch.Tensor:
    size = EXACT_CPU_BLOCK if tensor.device.type == "cpu" else BLOCK
    blocks: Iterable[torch.Tensor]
    if dim is None:
        blocks = _cut_blocks(tensor, size)
    else:
        rows = tensor.movedim(dim, 0)
        blocks = rows.split(max(1, size // max(1, rows[:1].numel())))
    factor = scale * 2.0**BITS
    total = torch.zeros((2, *scale.shape), dtype=torch.int64, device=tensor.device)
    for block in blocks:
        total = total + _sum_digits_of_block(block, factor, squares)
    return total


def _sum_digits_of_block(block: torch.Tensor, factor: torch.Tensor, squares: bool) -> torch.Tensor:
    rest = block.double()
    if squares:
        # A product, because kernels of powers round the last few elements differently.
        rest = rest * rest
    rest = rest * factor
    high = rest.floor()
    low = rest.sub_(high).mul_(2.0**BITS).floor_()
    return torch.stack([high.sum(0), low.sum(0)]).long()


def _is_one_node(tensor: torch.Tensor) -> bool:
    """Whether a sum becomes one operator of a graph: it is traced, and not differentiated or mapped."""
    if not _compat.is_tracing() or _compat.transforms_active():
        return False
    return not _compat.is_differentiated(tensor) and not _compat.any_dual([tensor])


def _make_fake_powers(tensor: torch.Tensor, p: float) -> torch.Tensor:
    blocks = max(1, math.ceil(tensor.numel() / _power_block(tensor)))
    return tensor.new_empty(blocks, dtype=torch.float64)


def _make_fake_digits(tensor: torch.Tensor, scale: torch.Tensor, dim: int | None, squares: bool) -> torch.Tensor:
    return scale.new_empty((2, *scale.shape), dtype=torch.int64)


_OPERATOR_OF_POWERS: Any = ops.operator(
    "sum_powers(Tensor tensor, float p) -> Tensor",
    _sum_powers,
    _make_fake_powers,
)
_OPERATOR_OF_DIGITS: Any = ops.operator(
    "sum_digits(Tensor tensor, Tensor scale, int? dim, bool squares) -> Tensor",
    _sum_digits,
    _make_fake_digits,
)
