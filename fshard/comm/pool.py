"""The buffer pool: memory that gathers may write to again, because the system is slow to hand out new pages."""

import math
from collections.abc import Sequence

import torch

from fshard import _compat

# From here on the allocator may give memory back to the system when it is freed; in bytes.
LARGE_BYTES = 256 * 1024


class Pool(list[torch.Tensor]):
    """Buffers that nobody uses."""

    def put(self, tensor: torch.Tensor) -> bool:
        """Take the memory of a donated tensor.

        Args:
            tensor: The caller may not use it afterwards.

        Returns:
            Whether the pool has all of its memory now: not where that is small, in use by anything else, or not the
            processor's.
        """
        if _compat.is_tracing():
            # A graph's memory is planned as a whole.
            return False
        nbytes = tensor.untyped_storage().nbytes()
        if tensor.device.type != "cpu" or nbytes < LARGE_BYTES or _compat.shares_memory(tensor):
            return False
        self.append(_over(tensor, 0, (nbytes // tensor.element_size(),), (1,)))
        return True

    def empty(self, like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Make a tensor to write to.

        Args:
            like: A tensor of the dtype and device that are wanted.
            shape: The shape that is wanted.

        Returns:
            A tensor over a buffer of this size if there is one, else over new memory.
        """
        size = math.prod(shape)
        for i, found in enumerate(self):
            if found.numel() == size and found.dtype is like.dtype and found.device == like.device:
                return self.pop(i).view(shape)
        return like.new_empty(shape)


def reusable(tensor: torch.Tensor) -> torch.Tensor:
    """Make a tensor hold its memory alone, where that is large enough for a pool.

    Args:
        tensor: It may be a view of another, which it then keeps alive.

    Returns:
        The same numbers in the same memory, not as a view of anything.
    """
    if tensor.nbytes < LARGE_BYTES or _compat.is_tracing():
        return tensor
    return _over(tensor, int(tensor.storage_offset()), tensor.shape, tensor.stride())


def _over(tensor: torch.Tensor, offset: int, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """Another tensor over the same memory, and no view of the first, which it would hold."""
    return tensor.new_empty(0).set_(tensor.untyped_storage(), offset, shape, stride)
