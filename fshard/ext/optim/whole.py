"""whole: optimizers that look across the elements of a leaf, each leaf stepped as a whole by one rank."""

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

import fshard as fs
from fshard.ext.optim.leaves import check_optimizer
from fshard.extend import (
    FullyShard,
    check_same_shards,
    flatten,
    is_trained,
    leaves_like,
    leaves_of,
    local_piece,
    map_leaves,
    refuse,
    refuse_donated,
    run_update,
    supports_cpu_messages,
    tensor_of,
    tensors_of,
)

# For each rank some tensors.
TensorLists = Sequence[Sequence[torch.Tensor]]
# For each rank the numbers of some rows.
RowNumbers = Sequence[Sequence[int]]


class WholeState(NamedTuple):
    """State of an optimizer made by `whole`.

    Attributes:
        leaves: For each leaf the state that the inner optimizer keeps for it alone. Its tensors are sharded, except for
            single numbers. None for a leaf that takes no gradient.
    """

    leaves: tuple[Any, ...]


def whole(tx: fs.Optimizer) -> fs.Optimizer:
    """Let one rank step each split leaf as a whole: for optimizers that look across its elements, such as Muon.

    The shards of a leaf, of its gradient and of its state are sent to the rank that owns the leaf, which steps it and
    sends the new shards back. Owners are chosen so that the work is balanced. A leaf of n bytes whose state has s bytes
    moves 3n + 2s bytes in all, of which each of N ranks sends an Nth. A leaf that is split over several axes is sent
    along one axis at a time, starting with the innermost. Between updates everything is sharded. Leaves that are not
    split are stepped by every rank. Follows the distributed Shampoo of Shi et al. (2023) and Liu et al., "Muon is
    Scalable for LLM Training" (2025).

    Args:
        tx: The optimizer, which must treat each leaf by itself, such as fs.from_torch(torch.optim.Muon, lr=0.02).

    Returns:
        The optimizer.

    Raises:
        ValueError: if `tx` is not an optimizer.

    >>> import torch, fshard as fs
    >>> def unit_step(grads, state, params):  # a step of length 1, which takes the norm of the whole leaf
    ...     return fs.tree_map(lambda p, g: p - g / g.norm(), params, grads), state
    >>> def program():
    ...     mesh = fs.init_mesh({"shard": -1}, device="cpu")
    ...     grads = fs.shard({"w": torch.tensor([3.0, 4.0])}, fs.fully_shard(mesh))
    ...     tx, params = fs.whole(fs.Optimizer(lambda params: (), unit_step)), fs.tree_map(torch.zeros_like, grads)
    ...     return tx.update(grads, tx.init(params), params)[0]["w"].local
    >>> fs.testing.spmd(program, world=2)
    [tensor([-0.6000]), tensor([-0.8000])]
    """
    check_optimizer("whole", tx)

    def init(params: Any) -> WholeState:
        flat = flatten(params)
        refuse_donated("whole", flat)
        return WholeState(tuple(map(partial(_init_leaf, tx), flat.names, flat.leaves)))

    return fs.Optimizer(init, partial(_update, tx))


def _update(tx: fs.Optimizer, grads: Any, state: WholeState, params: Any) -> tuple[Any, WholeState]:
    flat = flatten(params)
    leaves = list(flat.leaves)
    states = list(state.leaves)
    _check_states(flat, states)
    # By the axes over which leaves are joined the rows of these leaves, by the number of the leaf.
    rows_by_axes: dict[tuple[fs.Axis, ...], dict[int, Row]] = {}
    grad_leaves = leaves_like(flat, grads)
    check_same_shards(flat, grad_leaves)
    for i, (name, leaf, grad) in enumerate(zip(flat.names, flat.leaves, grad_leaves, strict=True)):
        if states[i] is None and not is_trained(leaf):
            continue
        if grad is None and leaf.shape and _split_axes(leaf):
            # The step is counted, and an average of the leaf moves; neither looks across elements. The state of a leaf
            # that is whole, or of a number, has no layout of its own.
            stepped, states[i] = run_update("whole", "tx", tx, {name: None}, states[i], {name: leaf})
            leaves[i] = stepped[name]
        else:
            row = Row({name: _wrap_like(leaf, tensor_of(grad))}, {name: leaf}, states[i])
            rows_by_axes.setdefault(_split_axes(row), {})[i] = row
    for axes, rows in rows_by_axes.items():
        device = _compute_device(leaves[min(rows)])
        for i, row in zip(rows, _step_at_owners(tx, axes, list(rows.values()), device), strict=True):
            (leaves[i],) = row.leaf.values()
            states[i] = row.state
    return flat.unflatten(leaves), WholeState(tuple(states))


def _init_leaf(tx: fs.Optimizer, name: str, leaf: Any) -> Any:
    """Make the state for one leaf. In it the leaf has its own name, by which `reshard` finds the new layout."""
    if not is_trained(leaf):
        return None
    # A state may depend on the values of the whole leaf. Every rank gathers it, one leaf at a time.
    if tensor_of(leaf).is_meta:
        full = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
    else:
        (full,) = fs.unshard([leaf])
    return map_leaves(partial(_take_local_piece, leaf), tx.init({name: full}))


def _check_states(flat: Any, states: Sequence[Any]) -> None:
    """Refuse leaves that were frozen when the state was made."""

    def describe_misfit(leaf: Any, state: Any) -> str | None:
        return "was frozen when the state was made" if is_trained(leaf) and state is None else None

    # An optimizer may keep no state for any leaf.
    if any(state is not None for state in states):
        problems = flat.problems(describe_misfit, states)
        refuse("whole: leaves have no optimizer state", problems, "make the state again with fs.TrainState.create")


def _split_axes(tree: Any) -> tuple[fs.Axis, ...]:
    """List the axes that split leaves, in the order in which their pieces are joined: innermost first in each dim."""
    axes_of_dims: list[Sequence[fs.Axis]] = []
    for leaf in flatten(tree).sharded:
        axes_of_dims += map(leaf.spec.split_axes, range(len(leaf.spec.partition)))
    axes: dict[fs.Axis, None] = {}
    # A state may be split along one dim over axes that split its leaf along two.
    for axes_of_dim in sorted(axes_of_dims, key=len, reverse=True):
        axes |= dict.fromkeys(reversed(axes_of_dim))
    return tuple(axis for axis in axes if axis.size > 1)


def _take_local_piece(leaf: Any, value: Any) -> Any:
    """Cut out this rank's piece of a value in a leaf's state.

    A tensor of the leaf's shape is split as the leaf is, and another one along its first dim.
    """
    axes = _split_axes(leaf)
    if not axes or not isinstance(value, torch.Tensor) or not value.dim():
        return value
    spec = leaf.spec
    if value.shape != spec.shape:
        spec = fs.Spec(tuple(value.shape), transform=spec.transform)
        for axis in reversed(axes):
            spec = spec.split(axis, 0, owned=axis in leaf.spec.owned)
    return fs.Sharded(local_piece(value, spec), spec)


def _wrap_like(leaf: Any, tensor: Any) -> Any:
    """Wrap a tensor as another leaf is, in that leaf's stored shape; None stays None."""
    if tensor is None or not isinstance(leaf, fs.Sharded):
        return tensor
    return fs.Sharded(tensor.reshape(leaf.local.shape), leaf.spec)


def _full(leaf: Any) -> Any:
    """Return a leaf that this rank holds whole, in its own shape: a split 0-d leaf is stored with one dim."""
    if not isinstance(leaf, fs.Sharded):
        return leaf
    return leaf.local.reshape(leaf.spec.shape)


class Row(NamedTuple):
    """A leaf that is to be stepped, with its gradient, each in a dict by its name, and the optimizer's state for it.

    The gradient is None after the step.
    """

    grad: Any
    leaf: Any
    state: Any


def _step_at_owners(
    tx: fs.Optimizer,
    axes: Sequence[fs.Axis],
    rows: Sequence[Row],
    device: torch.device,
) -> list[Row]:
    """Step leaves as a whole, each on the rank that owns it.

    The leaves are joined over one axis after another. For each axis there are three exchanges: shards travel to their
    owners, stepped shards travel back, and single numbers of the state are sent to all ranks.

    Args:
        tx: The optimizer.
        axes: The axes that the leaves are still split over, in the order in which they are joined.
        rows: The leaves, gradients and states, split over these axes.
        device: The device that sends.

    Returns:
        The stepped leaves and states, split as before.
    """
    if not axes:
        return [_step_row(tx, row) for row in rows]
    axis, *other_axes = axes
    owned = assign([flops_of(leaf.shape) for row in rows for leaf in row.leaf.values()], axis.size)
    joined = _collect_at_owners(rows, owned, axis, device)
    stepped = _step_at_owners(tx, other_axes, joined, device)
    return _return_to_ranks(rows, owned, stepped, axis, device)


def _step_row(tx: fs.Optimizer, row: Row) -> Row:
    """Step a leaf whose pieces have all been joined."""
    full = map_leaves(_full, row)
    stepped = run_update("whole", "tx", tx, full.grad, full.state, full.leaf)
    return Row(None, *map_leaves(_wrap_like, (row.leaf, row.state), stepped))


def _collect_at_owners(
    rows: Sequence[Row],
    owned: RowNumbers,
    axis: fs.Axis,
    device: torch.device,
) -> list[Row]:
    """Send the shards of every row to its owner, and join those that arrive here."""
    # For each owner its rows as one flat tree.
    flats = [flatten([rows[i] for i in row_numbers]) for row_numbers in owned]
    send = [tensors_of(flat.sharded) for flat in flats]
    local_rank = fs.comm.rank(axis)
    # Shards have the same shapes on all ranks.
    expected = [send[local_rank]] * axis.size
    received = _exchange(send, expected, axis, device)
    # One tuple for each tensor of this rank's rows, with the shards of all ranks.
    shards_of_tensors = zip(*received, strict=True)
    values = list(flats[local_rank].leaves)
    for i, value in enumerate(values):
        if isinstance(value, fs.Sharded):
            values[i] = _join_shards(next(shards_of_tensors), value, axis)
    return flats[local_rank].unflatten(values)


def _return_to_ranks(
    rows: Sequence[Row],
    owned: RowNumbers,
    stepped: Sequence[Row],
    axis: fs.Axis,
    device: torch.device,
) -> list[Row]:
    """Send every rank its shards of the stepped rows, and the numbers of their states.

    Args:
        rows: All rows before the step.
        owned: The numbers of the rows that each rank steps.
        stepped: The rows that this rank has stepped.
        axis: The axis.
        device: The device that sends.

    Returns:
        All rows after the step.
    """
    # For each owner its rows without gradients, as one flat tree.
    flats = [flatten([rows[i]._replace(grad=None) for i in row_numbers]) for row_numbers in owned]
    new_values = leaves_of(stepped)
    # For each tensor its shards for all ranks.
    shards_of_tensors = []
    for old, new in zip(flats[fs.comm.rank(axis)].leaves, new_values, strict=True):
        if isinstance(old, fs.Sharded):
            shards_of_tensors.append(_split_into_shards(new.local, old, axis))
    send = [[shards[rank] for shards in shards_of_tensors] for rank in range(axis.size)]
    expected_shards = [tensors_of(flat.sharded) for flat in flats]
    shards_of_owners = _exchange(send, expected_shards, axis, device)

    # Optimizers keep step counts on the CPU. They travel with the leaves where only accelerators can send.
    expected_numbers = [_numbers_in(flat.leaves) for flat in flats]
    are_on_cpu = all(number.is_cpu for number in itertools.chain(*expected_numbers))
    if are_on_cpu and supports_cpu_messages(axis):
        device = torch.device("cpu")
    numbers_of_owners = _exchange([_numbers_in(new_values)] * axis.size, expected_numbers, axis, device)

    returned = list(rows)
    for owner, flat in enumerate(flats):
        shards = iter(shards_of_owners[owner])
        numbers = iter(numbers_of_owners[owner])
        values = [_take_next(old, shards, numbers) for old in flat.leaves]
        for i, row in zip(owned[owner], flat.unflatten(values), strict=True):
            returned[i] = row
    return returned


def _take_next(old: Any, shards: Iterator[torch.Tensor], numbers: Iterator[torch.Tensor]) -> Any:
    """Take the next new shard, or the next new number, in the place of an old value."""
    if old is None:
        return None
    if isinstance(old, fs.Sharded):
        return fs.Sharded(next(shards), old.spec)
    number = next(numbers)
    return number if isinstance(old, torch.Tensor) else type(old)(number.item())


def _numbers_in(values: Sequence[Any]) -> list[torch.Tensor]:
    """List the values that are the same on every rank, such as a count of steps."""
    return [torch.as_tensor(value) for value in values if not isinstance(value, fs.Sharded | None)]


def _compute_device(leaf: Any) -> Any:
    """Find the device that computes with a leaf, which may be stored on another one."""
    transform = isinstance(leaf, fs.Sharded) and leaf.spec.transform
    storage: Any = transform and transform.storage
    return storage.compute_device if storage else tensor_of(leaf).device


def _exchange(
    send: TensorLists,
    expected: TensorLists,
    axis: fs.Axis,
    device: torch.device,
) -> TensorLists:
    """Send each rank tensors of any dtypes, as bytes, and wait for those of the other ranks.

    Args:
        send: For each rank the tensors that it is sent.
        expected: For each rank tensors of the shapes and dtypes of those that it sends here.
        axis: The axis.
        device: The device that sends; the tensors may be on another one.

    Returns:
        For each rank the tensors that it has sent.
    """
    storage_device = next((tensor.device for tensor in itertools.chain(*send, *expected)), device)
    parts = [torch.empty(0, dtype=torch.uint8, device=storage_device)]
    for tensor in itertools.chain(*send):
        # shape -> [*shape, 1], so that a 0-d tensor has a dim -> [*shape, element size] -> [bytes]
        parts.append(tensor.contiguous().unsqueeze(-1).view(torch.uint8).flatten())
    (received,) = fs.comm.all_to_all(
        [torch.cat(parts).to(device)],
        list(map(_count_bytes, send)),
        list(map(_count_bytes, expected)),
        axis,
        "whole",
    )
    sizes = [tensor.nbytes for tensor in itertools.chain(*expected)]
    next_parts = iter(received.to(storage_device).split(sizes))
    # A part may begin at any byte. Its copy is aligned, and does not keep the other parts alive.
    return [[next(next_parts).clone().view(each.dtype).view(each.shape) for each in tensors] for tensors in expected]


def _count_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _join_shards(
    shards: Sequence[torch.Tensor],
    shard: fs.Sharded,
    axis: fs.Axis,
) -> fs.Sharded:
    """Join the shards of an axis's ranks; other axes may still split the result."""
    dim = shard.spec.dim_of(axis)
    if dim is None:
        # After a reshard, what has another shape than the leaf may be whole where that is split, or the reverse.
        return shard
    size = shard.spec.shared_out(dim, axis)
    joined = torch.cat(list(shards), dim).narrow(dim, 0, size)
    return fs.Sharded(joined.contiguous(), shard.spec)


def _split_into_shards(
    joined: torch.Tensor,
    shard: fs.Sharded,
    axis: fs.Axis,
) -> Sequence[torch.Tensor]:
    """Split again a tensor that `_join_shards` made, with padding at the end."""
    dim = shard.spec.dim_of(axis)
    if dim is None:
        return [joined] * axis.size
    # Of a number the rows have one dim more; `_exchange` sends their elements alone.
    return FullyShard(axis, dim, 0).stack(joined, shard.spec, dim).unbind()


def assign(
    costs: Sequence[float],
    ranks: int,
) -> RowNumbers:
    """Give each piece of work to a rank, so that the rank with most has little more than the others.

    Args:
        costs: The cost of each piece.
        ranks: How many ranks there are.

    Returns:
        For each rank the numbers of its pieces, in ascending order. The costliest pieces go first, each to the rank
        that has least so far.

    >>> assign([1, 5, 3, 3], 2)
    [[0, 1], [2, 3]]
    """
    loads = [0.0] * ranks
    owned: list[list[int]] = [[] for _ in range(ranks)]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owner = loads.index(min(loads))
        owned[owner].append(i)
        loads[owner] += costs[i]
    return [sorted(numbers) for numbers in owned]


def flops_of(shape: Sequence[int]) -> float:
    """Count the operations of a matrix method, up to a factor: products of the matrix with its own transpose."""
    return math.prod(shape) * min(shape) if shape else 1.0
