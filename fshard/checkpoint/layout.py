"""Which rank writes which part of a leaf, and which parts it reads."""

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fshard import comm
from fshard.errors import Problem, leaf_error
from fshard.shard import hash_of, local_ranges, without_padding
from fshard.tree import Axis, Sharded, Spec, is_sharded

Kind = tuple[Axis, ...]


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


def replicas(label: str, leaves: Mapping[str, Any], world: Axis) -> dict[Kind, list[int]]:
    """Find the ranks that hold the same part of a leaf as this one, and refuse where they hold different values.

    A part that several ranks hold is hashed by each of them, which takes less time than to copy it.

    Args:
        label: Who asks, for errors.
        leaves: Tensors and Sharded leaves by path, the same on every rank.
        world: All ranks.

    Returns:
        The ranks, by the axes that split a leaf.

    Raises:
        ValueError: on every rank alike, with the path of every leaf that differs.
    """
    kinds: dict[Kind, dict[str, str]] = {}
    for path, leaf in leaves.items():
        kind = kind_of(leaf)
        shared = math.prod(axis.size for axis in kind) < world.size
        kinds.setdefault(kind, {}).update({path: hash_of(piece_of(leaf).tensor)} if shared else {})
    places = [[comm.rank(axis) for axis in kind] for kind in kinds]
    digests = [f"{zlib.crc32(json.dumps(hashes).encode()):08x}" for hashes in kinds.values()]
    rows = [json.loads(text) for text in comm.texts(json.dumps([places, digests]), world, label)]
    found = {kind: [r for r, row in enumerate(rows) if row[0][k] == places[k]] for k, kind in enumerate(kinds)}
    # Known to every rank, whether or not it holds a part that differs.
    if any(
        len({(*row[0][k], row[1][k]) for row in rows}) > len({(*row[0][k],) for row in rows}) for k in range(len(kinds))
    ):
        _refuse_differences(label, kinds, [row[0] for row in rows], world)
    return found


def _refuse_differences(
    label: str, kinds: Mapping[Kind, Mapping[str, str]], places: Sequence[Sequence[Sequence[int]]], world: Axis
) -> None:
    """Name the leaves of which ranks in the same place have different hashes."""
    everybody = [json.loads(text) for text in comm.texts(json.dumps(list(kinds.values())), world, label)]
    problems = []
    for k, hashes in enumerate(kinds.values()):
        for path in hashes:
            first: dict[tuple[int, ...], int] = {}
            pairs = [(first.setdefault((*place[k],), rank), rank) for rank, place in enumerate(places)]
            differ = [(a, b) for a, b in pairs if everybody[a][k][path] != everybody[b][k][path]]
            if differ:
                a, b = differ[0]
                problems.append(Problem(path, f"other values on rank {b} than on rank {a}", "the same on both"))
    remedy = (
        "make them the same; or, where ranks of an axis differ on purpose, store a leaf with a row for each of them: "
        "fs.Sharded(local.unsqueeze(0), fs.Spec((ranks, *shape), fs.P(axis, *partition), axes))"
    )
    raise leaf_error(f"{label}: ranks hold different values of one leaf", problems, remedy)


def kind_of(leaf: Any) -> Kind:
    """The axes that split a leaf: ranks at the same place on them hold the same part."""
    return leaf.spec.partition_axes() if is_sharded(leaf) else ()


def writers(leaves: Sequence[Any], replicas: Mapping[Kind, Sequence[int]], rank: int) -> list[bool]:
    """Which leaves this rank writes its part of: one of the ranks that hold the same part, in turns by bytes.

    Args:
        leaves: Tensors and Sharded leaves, the same on every rank.
        replicas: Which ranks hold the same parts as this one.
        rank: This rank.

    Returns:
        For each leaf whether its part is this rank's to write.
    """
    loads = {kind: [0] * len(ranks) for kind, ranks in replicas.items()}
    out = []
    for leaf in leaves:
        kind = kind_of(leaf)
        load = loads[kind]
        turn = load.index(min(load))
        # The same number on every rank: parts differ in padding alone.
        load[turn] += local_of(leaf).nbytes
        out.append(replicas[kind][turn] == rank)
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
