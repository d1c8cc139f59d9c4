"""Which rank writes which part of a leaf, and which parts it reads."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fshard import comm
from fshard.shard import local_ranges, without_padding
from fshard.tree import Axis, Sharded, Spec, is_sharded


class Piece(NamedTuple):
    """A box of a leaf and the tensor that has its elements.

    Attributes:
        offset: Where the box starts along each dim of the leaf.
        tensor: Its elements, a view of the leaf's.
    """

    offset: tuple[int, ...]
    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """How far the box goes along each dim."""
        return tuple(self.tensor.shape)


def shape_of(leaf: Any) -> tuple[int, ...]:
    """The global shape of a leaf."""
    return leaf.spec.shape if is_sharded(leaf) else tuple(leaf.shape)


def local_of(leaf: Any) -> torch.Tensor:
    """What this rank holds of a leaf."""
    return leaf.local if is_sharded(leaf) else leaf


def piece_of(leaf: Any) -> Piece:
    """This rank's part of a leaf, without padding; perhaps empty."""
    if not is_sharded(leaf):
        return Piece((0,) * leaf.dim(), leaf.detach())
    offset, tensor = _offset(leaf.spec), without_padding(leaf).detach()
    if not leaf.spec.shape and tensor.dim():
        # A leaf without dims that is split is stored with one, of which one rank has the element.
        return Piece((), tensor.reshape(())) if tensor.numel() else Piece((0,), tensor)
    return Piece(offset, tensor)


def writers(leaves: Sequence[Any], world: Axis) -> list[bool]:
    """Which leaves this rank writes its part of: one of the ranks that hold the same part, in turns by bytes.

    Args:
        leaves: Tensors and Sharded leaves, the same on every rank.
        world: All ranks.

    Returns:
        For each leaf whether its part is this rank's to write.
    """
    axes = [leaf.spec.partition_axes() if is_sharded(leaf) else () for leaf in leaves]
    kinds = list(dict.fromkeys(axes))
    mine = [[comm.rank(axis) for axis in kind] for kind in kinds]
    ranks = [json.loads(text) for text in comm.texts(json.dumps(mine), world, "checkpoint")]
    replicas = {kind: [r for r, row in enumerate(ranks) if row[k] == mine[k]] for k, kind in enumerate(kinds)}
    loads = {kind: [0] * len(replicas[kind]) for kind in kinds}
    out = []
    for leaf, kind in zip(leaves, axes, strict=True):
        load = loads[kind]
        turn = load.index(min(load))
        # The same number on every rank: parts differ in padding alone.
        load[turn] += local_of(leaf).nbytes
        out.append(replicas[kind][turn] == comm.rank(world))
    return out


def overlap(
    offset: tuple[int, ...], shape: tuple[int, ...], other: tuple[int, ...], other_shape: tuple[int, ...]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Where two boxes of a leaf overlap, as slices of each; None where they do not."""
    first, second = [], []
    for a, n, b, m in zip(offset, shape, other, other_shape, strict=True):
        start, stop = max(a, b), min(a + n, b + m)
        if start >= stop:
            return None
        first.append(slice(start - a, stop - a))
        second.append(slice(start - b, stop - b))
    return tuple(first), tuple(second)


def empty_like(leaf: Any) -> Any:
    """A leaf of the same kind and place with room for values; what pads it is zero."""
    local = local_of(leaf)
    device = torch.get_default_device() if local.is_meta else local.device
    made = torch.empty(local.shape, dtype=local.dtype, device=device)
    return padded_with_zeros(Sharded(made, leaf.spec) if is_sharded(leaf) else made)


def padded_with_zeros(leaf: Any) -> Any:
    """The leaf, with zeros where it is padded."""
    if piece_of(leaf).tensor.numel() < local_of(leaf).numel():
        local_of(leaf).zero_()
    return leaf


def _offset(spec: Spec) -> tuple[int, ...]:
    return tuple(start for start, _ in local_ranges(spec))
