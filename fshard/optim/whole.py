"""whole: optimizers that look across the elements of a leaf, each leaf stepped as a whole by one rank."""

from typing import Any, NamedTuple

import torch

from fshard import comm
from fshard.checks import kind
from fshard.optim.leaves import check_state, like, partition_axes, tensor_of, trained
from fshard.optim.owners import assign, flops_of, from_owners, split_axis, to_owners
from fshard.shard import local_piece, unshard
from fshard.tree import Axis, Flat, Sharded, Spec, Tree, flatten, is_sharded, unflatten
from fshard.update import Optimizer


class WholeState(NamedTuple):
    """State of an optimizer made by `whole`.

    Attributes:
        leaves: For each leaf that takes a gradient the state of the optimizer inside for it alone, every tensor of it
            sharded, but for single numbers.
    """

    leaves: tuple[Tree, ...]


def whole(tx: Optimizer) -> Optimizer:
    """Let one rank step each split leaf as a whole: for optimizers that look across its elements, such as Muon.

    The shards of a leaf, of its gradient and of its state go to the rank that owns it, which steps it, and come back.
    Owners are chosen so that the work is balanced. A leaf of n bytes whose state has s bytes moves 3n + 2s bytes in
    all, of which each of N ranks sends an Nth. Between updates everything is sharded; leaves that are whole already are
    stepped by every rank. Follows the distributed Shampoo of Shi et al. (2023) and Liu et al., "Muon is Scalable for
    LLM Training" (2025).

    Args:
        tx: The optimizer, which must treat each leaf by itself, such as fs.from_torch(torch.optim.Muon, lr=0.02).

    Returns:
        The optimizer.

    Raises:
        ValueError: if `tx` is no optimizer; from init, if a leaf is split over several axes.
    """
    if not isinstance(tx, Optimizer):
        raise ValueError(
            f"whole: expected tx to be an Optimizer, such as fs.from_torch(torch.optim.Muon), got {kind(tx)}"
        )

    def init(params: Tree) -> WholeState:
        flat = flatten(params)
        chosen = trained(flat)
        _axis("whole", flat, chosen)
        states = []
        for i in chosen:
            leaf = flat.leaves[i]
            # One leaf at a time is whole, on every rank, because a state may start from its values.
            (full,) = flatten(unshard([leaf])).leaves
            flat_state = flatten(tx.init({"leaf": full}))
            states.append(unflatten(flat_state.treedef, [_cut(value, leaf) for value in flat_state.leaves]))
        return WholeState(tuple(states))

    def update(grads: Tree, state: WholeState, params: Tree) -> tuple[Tree, WholeState]:
        check_state("whole", state, WholeState)
        flat, gradients = flatten(params), flatten(grads).leaves
        chosen = trained(flat)
        axis = _axis("whole", flat, chosen)
        leaves, states = list(flat.leaves), list(state.leaves)
        used = [(i, n) for n, i in enumerate(chosen) if gradients[i] is not None]
        travelling = [(i, n) for i, n in used if partition_axes(leaves[i])]
        for n, i in enumerate(chosen):
            if gradients[i] is None:
                # The update counts, and a leaf may have an average; neither looks across elements.
                own, states[n] = tx.update({"leaf": None}, states[n], {"leaf": leaves[i]})
                leaves[i] = own["leaf"]
            elif (i, n) not in travelling:
                grad, own = ({"leaf": _full(leaf)} for leaf in (gradients[i], leaves[i]))
                new, states[n] = tx.update(grad, states[n], own)
                leaves[i] = like(leaves[i], new["leaf"].reshape(tensor_of(leaves[i]).shape))
        if axis is not None:
            _step_at_owners(tx, axis, travelling, gradients, leaves, states)
        return unflatten(flat.treedef, leaves), WholeState(tuple(states))

    return Optimizer(init, update)


def _full(leaf: Any) -> torch.Tensor:
    """A leaf that this rank holds whole, in its own shape: a split 0-d leaf is stored with one dim."""
    return leaf.local.reshape(leaf.spec.shape) if is_sharded(leaf) else leaf


def _axis(what: str, flat: Flat, chosen: list[int]) -> Axis | None:
    sharded = [i for i in chosen if is_sharded(flat.leaves[i])]
    return split_axis(what, [flat.paths[i] for i in sharded], [flat.leaves[i] for i in sharded])


def _cut(value: Any, leaf: Any) -> Any:
    """This rank's piece of a part of a leaf's state: as the leaf is split where it is like it, else along dim 0."""
    axes = partition_axes(leaf)
    if not axes or not isinstance(value, torch.Tensor) or not value.dim():
        return value
    same = value.shape == leaf.spec.shape
    spec = leaf.spec if same else Spec(tuple(value.shape), transform=leaf.spec.transform).split(axes[0], 0)
    return Sharded(local_piece(value, spec), spec)


def _step_at_owners(
    tx: Optimizer, axis: Axis, places: list[tuple[int, int]], gradients: list[Any], leaves: list[Any], states: list[Any]
) -> None:
    """Step leaves at their owners, and put the new ones and their states in the place of the old ones."""
    comm.same_call("update", (axis,))
    owners = assign([flops_of(leaves[i].spec.shape) for i, _ in places], axis.size)
    flats = [flatten(states[n]) for _, n in places]
    parts = [
        [leaves[i], *(value for value in flat.leaves if is_sharded(value))]
        for (i, _), flat in zip(places, flats, strict=True)
    ]
    specs = [[part.spec for part in row] for row in parts]
    sent = [[gradients[i].local, *(part.local for part in row)] for (i, _), row in zip(places, parts, strict=True)]
    with_grads = [[row[0], *row] for row in specs]
    stepped, numbers = {}, {}
    for m, (grad, full, *slots) in to_owners(sent, with_grads, owners, axis).items():
        given = iter(slots)
        values = [next(given) if is_sharded(value) else value for value in flats[m].leaves]
        new, after = tx.update({"leaf": grad}, unflatten(flats[m].treedef, values), {"leaf": full})
        found = list(zip(flats[m].leaves, flatten(after).leaves, strict=True))
        stepped[m] = [new["leaf"], *(value for old, value in found if is_sharded(old))]
        numbers[m] = [value for old, value in found if not is_sharded(old)]
    dtypes = [[part.local.dtype for part in row] for row in parts]
    returned = from_owners(stepped, specs, dtypes, owners, axis)
    counted = _shared(numbers, flats, owners, axis)
    for m, (i, n) in enumerate(places):
        param, *slots = returned[m]
        leaves[i] = Sharded(param, leaves[i].spec)
        given, rest = iter(slots), iter(counted[m])
        values = [Sharded(next(given), v.spec) if is_sharded(v) else next(rest) for v in flats[m].leaves]
        states[n] = unflatten(flats[m].treedef, values)


def _shared(numbers: dict[int, list[Any]], flats: list[Flat], owners: list[int], axis: Axis) -> list[list[Any]]:
    """Tell every rank the single numbers of states, which only owners have counted on."""
    kept = [[value for value in flat.leaves if not is_sharded(value)] for flat in flats]
    tensors = [[torch.as_tensor(value) for value in row if value is not None] for row in kept]
    mine = [torch.as_tensor(value) for m in numbers for value in numbers[m] if value is not None]
    kinds = [
        [(t.shape, t.dtype) for row, owner in zip(tensors, owners, strict=True) if owner == rank for t in row]
        for rank in range(axis.size)
    ]
    rows = [iter(row) for row in comm.all_to_all([mine] * axis.size, kinds, axis, "whole")]
    return [
        [None if value is None else _as(value, next(rows[owner])) for value in row]
        for row, owner in zip(kept, owners, strict=True)
    ]


def _as(value: Any, found: torch.Tensor) -> Any:
    return found if isinstance(value, torch.Tensor) else type(value)(found.item())
