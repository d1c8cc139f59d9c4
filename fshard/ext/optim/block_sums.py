"""Sums over all elements of a tensor, which convert one block of them to float64 at a time.

In a graph, each sum is one operator, however many blocks it takes. Operators have no derivative: what is differentiated
runs the same arithmetic in operators of torch.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from fshard.extend import any_dual, define_operator, is_differentiated, is_tracing, transforms_active

# A CPU is nine times faster if the float64 copies of a block stay in its cache: of a sum of powers, of an exact sum.
CPU_BLOCK = 1 << 16
EXACT_CPU_BLOCK = 1 << 14
# An accelerator converts more, because each kernel takes time to launch. Up to three copies are held at a time, 48 MB.
BLOCK = 1 << 21

# Tensors of at most SMALL elements are joined, at most MAX_JOINED of them.
SMALL = 1024
MAX_JOINED = 64

Sum = Callable[..., torch.Tensor]

# The bits of a digit. A float64 number has less than two digits. A sum of 2**26 first digits would not be exact.
BITS = 27


def _as_one_node(schema: str, make_fake: Callable[..., torch.Tensor]) -> Callable[[Sum], Sum]:
    """Let a sum be one operator of a graph where it is traced, and not differentiated or mapped.

    Args:
        schema: The operator's schema.
        make_fake: Makes the operator's result for tensors without values.
    """

    def define(run: Sum) -> Sum:
        run_as_one = define_operator(schema, run, make_fake)

        @functools.wraps(run)
        def sum_blocks(tensors: Any, *args: Any) -> torch.Tensor:
            inputs = tensors if isinstance(tensors, list) else [tensors]
            is_plain = is_tracing() and not (transforms_active() or any_dual(inputs))
            if is_plain and not any(map(is_differentiated, inputs)):
                return run_as_one(tensors, *args)
            return run(tensors, *args)

        return sum_blocks

    return define


@_as_one_node(
    "sum_powers(Tensor[] tensors, float p) -> Tensor",
    lambda tensors, p: tensors[0].new_empty((), dtype=torch.float64),
)
def sum_powers(tensors: Sequence[torch.Tensor], p: float) -> torch.Tensor:
    """Sum the p-th powers of the magnitudes of all elements of some tensors, or find the largest if p is infinite.

    Args:
        tensors: Tensors of one device, whose elements are taken in the order of their indices. Small ones are joined.
        p: The power, above 0.

    Returns:
        A number in float64.
    """
    # Join small tensors, because each operator takes time.
    small = [tensor.reshape(-1) for tensor in tensors if tensor.numel() <= SMALL]
    parts = []
    for start in range(0, len(small), MAX_JOINED):
        parts.append(torch.cat(small[start : start + MAX_JOINED]))
    parts += [tensor for tensor in tensors if tensor.numel() > SMALL]
    powers = []
    for part in parts:
        size = CPU_BLOCK if part.is_cpu else BLOCK
        powers += [_sum_block(block, p) for block in _cut_blocks(part, size)]
    stacked = torch.stack(powers)
    return stacked.amax() if math.isinf(p) else stacked.sum()


def _sum_block(block: torch.Tensor, p: float) -> torch.Tensor:
    if math.isinf(p):
        # The zero in front is the largest of no elements.
        return torch.cat([block.new_zeros(1), block]).abs().amax().double()
    # A complex number counts by its magnitude.
    numbers = block.to(torch.complex128).abs() if block.is_complex() else block.double()
    if p == 2:
        return numbers.dot(numbers)
    return (numbers.abs() ** p).sum()


def _cut_blocks(tensor: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """Cut a tensor into flat blocks of so many elements. Where it has gaps, only the rows of a block are copied."""
    if tensor.is_contiguous() or tensor.dim() < 2:
        yield from tensor.reshape(-1).split(size)
        return
    row_size = tensor[0].numel()
    for start in range(0, tensor.numel(), size):
        first_row = start // row_size
        end_row = math.ceil((start + size) / row_size)
        rows = tensor[first_row:end_row].reshape(-1)
        # A copy, because the bits of a dot product depend on where in a vector register its numbers begin.
        yield rows[start % row_size :][:size].clone()


@_as_one_node(
    "sum_digits(Tensor tensor, Tensor scale, int? dim, bool squares) -> Tensor",
    lambda tensor, scale, dim, squares: scale.new_empty((2, *scale.shape), dtype=torch.int64),
)
def sum_digits(tensor: torch.Tensor, scale: torch.Tensor, dim: int | None, squares: bool) -> torch.Tensor:
    """Sum both digits of each element, or of each square, which is exact in any order.

    Args:
        tensor: A real tensor of numbers that are not negative, or of any numbers with `squares`.
        scale: For each sum a power of two in float64. Terms times `scale` are below 1.
        dim: The dim to sum over, counted from the back; None sums over all of them.
        squares: Whether to sum squares.

    Returns:
        An int64 tensor with the sums of the high digits and those of the low ones. The dim is left out.
    """
    size = EXACT_CPU_BLOCK if tensor.is_cpu else BLOCK
    blocks: Iterable[torch.Tensor] = _cut_blocks(tensor, size)
    if dim is not None:
        rows = tensor.movedim(dim, 0)
        row_size = max(1, rows[:1].numel())
        blocks = rows.split(max(1, size // row_size))
    factor = scale * 2.0**BITS
    total = torch.zeros((2, *scale.shape), dtype=torch.int64, device=tensor.device)
    for block in blocks:
        rest = block.double()
        if squares:
            # A product, because kernels of powers round the last few elements differently.
            rest = rest * rest
        rest = rest * factor
        high = rest.floor()
        low = rest.sub_(high).mul_(2.0**BITS).floor_()
        digits = torch.stack([high.sum(0), low.sum(0)])
        total = total + digits.long()
        # Not beside the copies of the next block.
        del rest, high, low
    return total
