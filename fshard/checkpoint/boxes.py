"""Boxes: rectangular regions of full tensors, which ranks hold, files have, and restored leaves are made of."""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fshard.shard import local_ranges, without_padding
from fshard.tree import is_sharded


class Box(NamedTuple):
    """A rectangular region of a full tensor.

    Attributes:
        offsets: Where it starts along each dim.
        shape: How many elements it has along each dim.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, ...]:
        """Where it ends along each dim."""
        return tuple(map(operator.add, self.offsets, self.shape))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index of the full tensor."""
        return tuple(map(slice, self.offsets, self.ends))

    def inside(self, outer: "Box") -> "Box":
        """The box as one of a tensor that has the elements of a box around it."""
        offsets = map(operator.sub, self.offsets, outer.offsets)
        return Box(tuple(offsets), self.shape)

    def intersect(self, other: "Box") -> "Box":
        """The box of the elements that are in both; its shape has a 0 or less if there are none."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, self.ends, other.ends)
        return Box(offsets, tuple(map(operator.sub, ends, offsets)))


class LocalBox(NamedTuple):
    """The box of a leaf that this rank holds.

    Attributes:
        offsets: Where it starts along each dim of the leaf.
        tensor: Its elements.
    """

    offsets: tuple[int, ...]
    tensor: torch.Tensor

    @property
    def box(self) -> Box:
        """The box without its elements."""
        return Box(self.offsets, tuple(self.tensor.shape))


class Entry(NamedTuple):
    """A full tensor of some format to read from.

    Attributes:
        dtype: Its dtype.
        shape: Its shape.
        read: Returns a box of it, given as one slice for each dim, in memory that nothing else holds.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[tuple[slice, ...]], torch.Tensor]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Entry":
        """An entry that copies from a tensor."""
        return cls(tensor.dtype, tuple(tensor.shape), lambda slices: tensor.detach()[slices].clone())


def has_elements(leaf: Any) -> bool:
    """Whether a leaf is a tensor, or Sharded."""
    return is_sharded(leaf) or torch.is_tensor(leaf)


def local_box(leaf: Any) -> LocalBox:
    """Return the box of a leaf that this rank holds, perhaps empty; its tensor is a view without padding."""
    if not is_sharded(leaf):
        return LocalBox((0,) * leaf.dim(), leaf.detach())
    dims = len(leaf.spec.shape)
    tensor = without_padding(leaf).detach()
    if not dims and tensor.numel():
        # A leaf without dims that is split is stored with one dim, and one rank has the element.
        tensor = tensor.reshape(())
    starts = [start for start, _ in local_ranges(leaf.spec)]
    return LocalBox(tuple(starts[:dims]), tensor)
