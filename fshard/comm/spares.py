"""Spare buffers: memory that gathers may write to again, because the system is slow to hand out new pages."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from fshard import _compat

# From here on the allocator may give memory back to the system when it is freed; in bytes.
LARGE_BYTES = 256 * 1024

_spares: ContextVar[list[torch.Tensor] | None] = ContextVar("fshard_spares", default=None)


@contextmanager
def reusing(spares: list[torch.Tensor]) -> Iterator[None]:
    """Let gathers that start inside the context write to spare buffers of their size, rather than to new ones.

    Args:
        spares: From `spare`; those that are not taken are gone when the context ends.

    Yields:
        Nothing.
    """
    token = _spares.set(spares)
    try:
        yield
    finally:
        _spares.reset(token)
        spares.clear()


def reusable(tensor: torch.Tensor) -> torch.Tensor:
    """Make a tensor hold its memory alone, where that is large enough to be a spare.

    Args:
        tensor: It may be a view of another, which it then keeps alive.

    Returns:
        The same numbers in the same memory, not as a view of anything.
    """
    if tensor.numel() * tensor.element_size() < LARGE_BYTES or _compat.is_tracing():
        return tensor
    return _over(tensor, int(tensor.storage_offset()), tensor.shape, tensor.stride())


def spare(tensor: torch.Tensor) -> torch.Tensor | None:
    """Take the memory of a tensor that is given up.

    Args:
        tensor: Nobody may use it afterwards.

    Returns:
        All of its memory as one dim; None where that is small, in use by anything else, or not the processor's.
    """
    if _compat.is_tracing():
        # A graph's memory is planned as a whole.
        return None
    nbytes = tensor.untyped_storage().nbytes()
    if tensor.device.type != "cpu" or nbytes < LARGE_BYTES or _compat.shares_memory(tensor):
        return None
    return _over(tensor, 0, (nbytes // tensor.element_size(),), (1,))


def _over(tensor: torch.Tensor, offset: int, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """Another tensor over the same memory, and no view of the first, which it would hold."""
    return tensor.new_empty(0).set_(tensor.untyped_storage(), offset, shape, stride)


def empty(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Make a tensor to write to.

    Args:
        like: A tensor of the dtype and device that are wanted.
        shape: The shape that is wanted.

    Returns:
        A tensor over a spare of this size if there is one, else over new memory.
    """
    spares, size = _spares.get() or [], math.prod(shape)
    for i, found in enumerate(spares):
        if found.numel() == size and found.dtype is like.dtype and found.device == like.device:
            return spares.pop(i).view(shape)
    return like.new_empty(shape)
