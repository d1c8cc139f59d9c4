"""The part of a leaf that this rank holds, as a box of the leaf's elements, and the ranks that hold the same part."""

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fshard import comm
from fshard.errors import Problem, leaf_error
from fshard.shard import hash_of, local_ranges, without_padding
from fshard.tree import Axis, Sharded, is_sharded, tensor_of

# The axes that split a leaf: ranks at the same place on them hold the same part.
Split = tuple[Axis, ...]


class Piece(NamedTuple):
    """A box of a leaf: where it starts along each dim, and a tensor with its elements, a view of the leaf's."""

    offset: tuple[int, ...]
    tensor: torch.Tensor

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
    """This rank's part of a leaf, without padding; perhaps empty."""
    if not is_sharded(leaf):
        return Piece((0,) * leaf.dim(), leaf.detach())
    offset, tensor = tuple(start for start, _ in local_ranges(leaf.spec)), without_padding(leaf).detach()
    if not leaf.spec.shape and tensor.dim():
        # A leaf without dims that is split is stored with one, and one rank has the element.
        return Piece((), tensor.reshape(())) if tensor.numel() else Piece((0,), tensor)
    return Piece(offset, tensor)


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


def replicas(label: str, leaves: Mapping[str, Any], world: Axis) -> dict[Split, list[int]]:
    """Find the ranks that hold the same part of a leaf as this one, and refuse different values of one part.

    Each rank hashes the parts that several ranks hold, which takes less time than to copy them.

    Args:
        label: The public function, for errors.
        leaves: Tensors and Sharded leaves by path, the same on every rank.
        world: All ranks.

    Returns:
        The ranks, by the axes that split a leaf.

    Raises:
        ValueError: on every rank, with the path of every leaf that differs.
    """
    hashes: dict[Split, dict[str, str]] = {}
    for path, leaf in leaves.items():
        split = split_of(leaf)
        shared = math.prod(axis.size for axis in split) < world.size
        hashes.setdefault(split, {}).update({path: hash_of(piece_of(leaf).tensor)} if shared else {})
    places = [[comm.rank(axis) for axis in split] for split in hashes]
    digests = [f"{zlib.crc32(json.dumps(each).encode()):08x}" for each in hashes.values()]
    rows = comm.everyone([places, digests], [world], label)
    # By the place on a split's axes, the digest of the first rank there; every rank sees every difference.
    first: dict[str, str] = {}
    pairs = [(f"{i} {place}", each) for row in rows for i, (place, each) in enumerate(zip(*row, strict=True))]
    if any(first.setdefault(place, each) != each for place, each in pairs):
        _refuse_differences(label, list(hashes.values()), [row[0] for row in rows], world)
    return {split: [r for r, row in enumerate(rows) if row[0][i] == places[i]] for i, split in enumerate(hashes)}


def _refuse_differences(
    label: str, hashes: Sequence[Mapping[str, str]], places: Sequence[Sequence[Sequence[int]]], world: Axis
) -> None:
    """Name the leaves whose hashes differ between ranks in the same place."""
    everybody = comm.everyone(hashes, [world], label)
    problems: dict[str, Problem] = {}
    for i, paths in enumerate(hashes):
        first: dict[tuple[int, ...], int] = {}
        for b, place in enumerate(places):
            a = first.setdefault(tuple(place[i]), b)
            for path in paths:
                if everybody[a][i][path] != everybody[b][i][path]:
                    found = f"other values on rank {b} than on rank {a}"
                    problems.setdefault(path, Problem(path, found, "the same on both"))
    remedy = (
        "make them the same, buffers by fs.sync_buffers; where ranks differ on purpose, store a row for each: "
        "fs.Sharded(local.unsqueeze(0), fs.Spec((ranks, *shape), fs.P(axis, *partition), axes))"
    )
    ordered = [problems[path] for paths in hashes for path in paths if path in problems]
    raise leaf_error(f"{label}: ranks hold different values of one leaf", ordered, remedy)
