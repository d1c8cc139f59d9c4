"""The part of a leaf that this rank holds, as a box of the leaf's elements."""

import math
from typing import Any, NamedTuple

import torch

from fshard.shard import local_ranges, without_padding
from fshard.tree import Axis, Sharded, is_sharded, tensor_of

# The axes that split a leaf: ranks at the same place on them hold the same part.
Split = tuple[Axis, ...]


class Piece(NamedTuple):
    """A box of a leaf: where it starts along each dim, a tensor with its elements, and the leaf's global shape."""

    offset: tuple[int, ...]
    tensor: torch.Tensor
    full_shape: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of the box along each dim."""
        return tuple(self.tensor.shape)


def is_tensor(leaf: Any) -> bool:
    """Whether a leaf holds elements: a tensor, or Sharded."""
    return is_sharded(leaf) or isinstance(leaf, torch.Tensor)


def shape_of(leaf: Any) -> tuple[int, ...]:
    """The global shape of a leaf."""
    return leaf.spec.shape if is_sharded(leaf) else tuple(leaf.shape)


def nbytes_of(leaf: Any) -> int:
    """The bytes of a full leaf."""
    return tensor_of(leaf).element_size() * math.prod(shape_of(leaf))


def dtype_name(tensor: Any) -> str:
    """The name in torch of a tensor's dtype."""
    return str(tensor.dtype).removeprefix("torch.")


def described(leaf: Any) -> str:
    """The dtype and global shape of a leaf, as errors write them."""
    return f"{dtype_name(tensor_of(leaf))}{list(shape_of(leaf))}"


def layout_of(leaf: Any) -> str:
    """Describe the properties of a leaf that ranks must agree on before they gather it."""
    return described(leaf) + (f" split by {leaf.spec.partition!r}" if is_sharded(leaf) else "")


def split_of(leaf: Any) -> Split:
    """The axes that split a leaf."""
    return leaf.spec.partition_axes() if is_sharded(leaf) else ()


def piece_of(leaf: Any) -> Piece:
    """This rank's part of a leaf, a view without padding; perhaps empty."""
    shape = shape_of(leaf)
    if not is_sharded(leaf):
        return Piece((0,) * leaf.dim(), leaf.detach(), shape)
    offset, tensor = tuple(start for start, _ in local_ranges(leaf.spec)), without_padding(leaf).detach()
    if not shape and tensor.dim():
        # A leaf without dims that is split is stored with one, and one rank has the element.
        return Piece((), tensor.reshape(()), shape) if tensor.numel() else Piece((0,), tensor, shape)
    return Piece(offset, tensor, shape)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The elements of a tensor as bytes on the host."""
    return byte_view(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous())


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    # A single element counts as contiguous whatever its stride, which a view as bytes does not allow.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def empty_like(leaf: Any) -> Any:
    """Return a leaf of the same type and place with room for values; its padding is zero."""
    local = tensor_of(leaf)
    device = torch.get_default_device() if local.is_meta else local.device
    made = torch.empty(local.shape, dtype=local.dtype, device=device)
    return padded_with_zeros(Sharded(made, leaf.spec) if is_sharded(leaf) else made)


def padded_with_zeros(leaf: Any) -> Any:
    """Return the leaf, with zeros where it is padded."""
    if piece_of(leaf).tensor.numel() < tensor_of(leaf).numel():
        tensor_of(leaf).zero_()
    return leaf
