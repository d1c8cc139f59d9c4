"""Owners: whole leaves on one rank each, for maths that looks across the elements of a leaf."""

import math
from collections.abc import Sequence

import torch

from fshard import comm
from fshard.errors import Problem, leaf_error
from fshard.optim.leaves import partition_axes
from fshard.tree import Axis, Sharded, Spec


def assign(costs: Sequence[float], ranks: int) -> list[int]:
    """Give each piece of work to a rank, so that the rank with most has little more than the others.

    Args:
        costs: Of each piece.
        ranks: How many ranks there are.

    Returns:
        A rank for each piece: the costliest pieces go first, each to the rank that has least so far.

    >>> assign([1, 5, 3, 3], 2)
    [0, 0, 1, 1]
    """
    loads, owners = [0.0] * ranks, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owners[i] = min(range(ranks), key=lambda rank: loads[rank])
        loads[owners[i]] += costs[i]
    return owners


def split_axis(what: str, paths: Sequence[str], leaves: Sequence[Sharded]) -> Axis | None:
    """The one axis that leaves are split over; None where all are whole.

    Args:
        what: Who asks, for the error.
        paths: The leaves' paths.
        leaves: Sharded leaves.

    Raises:
        ValueError: if a leaf is split over several axes, or leaves over different ones.
    """
    found = [partition_axes(leaf) for leaf in leaves]
    axes = dict.fromkeys(axis for several in found for axis in several)
    needed = next(iter(axes), None)
    problems = [
        Problem(path, f"a split over {[axis.name for axis in several]}", f"a split over {needed.name!r} alone")
        for path, several in zip(paths, found, strict=True)
        if needed is not None and several not in ((), (needed,))
    ]
    if problems:
        remedy = "split these leaves over one axis, or keep them out by fs.partition"
        raise leaf_error(f"{what}: leaves cannot be sent to an owner", problems, remedy)
    return needed


def to_owners(
    tensors: Sequence[Sequence[torch.Tensor]], specs: Sequence[Sequence[Spec]], owners: Sequence[int], axis: Axis
) -> dict[int, list[torch.Tensor]]:
    """Send every rank's shards to the leaves' owners.

    Args:
        tensors: For each leaf this rank's shards of one tensor or several.
        specs: Their specs, each split over `axis` in one dim.
        owners: For each leaf the rank that gets it.
        axis: The axis.

    Returns:
        The full tensors of the leaves that this rank owns, by the leaves' numbers.
    """
    own = comm.rank(axis)
    mine = [i for i, owner in enumerate(owners) if owner == own]
    send = [[t for i, o in enumerate(owners) if o == rank for t in tensors[i]] for rank in range(axis.size)]
    shapes = [(tensor.shape, tensor.dtype) for i in mine for tensor in tensors[i]]
    rows = comm.all_to_all(send, [shapes] * axis.size, axis, "whole")
    pieces = zip(*rows, strict=True)
    return {i: [_joined(next(pieces), spec, axis) for spec in specs[i]] for i in mine}


def from_owners(
    fulls: dict[int, list[torch.Tensor]],
    specs: Sequence[Sequence[Spec]],
    dtypes: Sequence[Sequence[torch.dtype]],
    owners: Sequence[int],
    axis: Axis,
) -> list[list[torch.Tensor]]:
    """Send shards of full tensors back from the leaves' owners.

    Args:
        fulls: The full tensors of the leaves that this rank owns.
        specs: For each leaf the specs of its tensors.
        dtypes: And their dtypes.
        owners: For each leaf the rank that has it.
        axis: The axis.

    Returns:
        For each leaf this rank's shards.
    """
    cut = {i: [_pieces(full, spec, axis) for full, spec in zip(fulls[i], specs[i], strict=True)] for i in fulls}
    send = [[pieces[rank] for i in fulls for pieces in cut[i]] for rank in range(axis.size)]
    order = [[i for i, owner in enumerate(owners) if owner == rank] for rank in range(axis.size)]
    shapes = [
        [(torch.Size(spec.local_shape), dtype) for i in some for spec, dtype in zip(specs[i], dtypes[i], strict=True)]
        for some in order
    ]
    rows = comm.all_to_all(send, shapes, axis, "whole")
    found: dict[int, list[torch.Tensor]] = {}
    for some, row in zip(order, rows, strict=True):
        received = iter(row)
        for i in some:
            found[i] = [next(received) for _ in specs[i]]
    return [found[i] for i in range(len(owners))]


def _joined(pieces: Sequence[torch.Tensor], spec: Spec, axis: Axis) -> torch.Tensor:
    dim = spec.dim_of(axis)
    assert dim is not None
    full = torch.cat(list(pieces), dim).narrow(dim, 0, spec.full_shape[dim])
    return full.reshape(spec.shape).contiguous()


def _pieces(full: torch.Tensor, spec: Spec, axis: Axis) -> Sequence[torch.Tensor]:
    dim = spec.dim_of(axis)
    assert dim is not None
    full = full.reshape(spec.full_shape)
    missing = spec.padded_shape[dim] - full.shape[dim]
    padded = torch.nn.functional.pad(full, (0, 0) * (full.dim() - dim - 1) + (0, missing)) if missing else full
    size = spec.local_shape[dim]
    return [padded.narrow(dim, rank * size, size) for rank in range(axis.size)]


def flops_of(shape: Sequence[int]) -> float:
    """What a step of a matrix method costs, but for a factor: products of the matrix with its own transpose."""
    return math.prod(shape) * min(shape) if shape else 1.0
