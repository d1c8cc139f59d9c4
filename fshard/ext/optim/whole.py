"""whole: optimizers that look across the elements of a leaf, each leaf stepped as a whole by one rank."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

import fshard as fs
from fshard.extend import describe, expect, flatten, is_trained, local_piece, refuse, run_update, supports_cpu_messages


class WholeState(NamedTuple):
    """State of an optimizer made by `whole`.

    Attributes:
        leaves: For each leaf the state of the optimizer inside for it alone, every tensor of it sharded, but for single
            numbers; None for a leaf that takes no gradient.
    """

    leaves: tuple[Any, ...]


def whole(tx: fs.Optimizer) -> fs.Optimizer:
    """Let one rank step each split leaf as a whole: for optimizers that look across its elements, such as Muon.

    The shards of a leaf, of its gradient and of its state go to the rank that owns it, which steps it, and come back.
    Owners are chosen so that the work is balanced. A leaf of n bytes whose state has s bytes moves 3n + 2s bytes in
    all, of which each of N ranks sends an Nth; where it is split over several axes, it travels over one after another,
    minor ones first. Between updates everything is sharded; leaves that are whole already are stepped by every rank.
    Follows the distributed Shampoo of Shi et al. (2023) and Liu et al., "Muon is Scalable for
    LLM Training" (2025).

    Args:
        tx: The optimizer, which must treat each leaf by itself, such as fs.from_torch(torch.optim.Muon, lr=0.02).

    Returns:
        The optimizer.

    Raises:
        ValueError: if `tx` is no optimizer.

    >>> import torch, fshard as fs
    >>> def unit_step(grads, state, params):  # a step as long as 1, whose norm must be that of the whole leaf
    ...     return fs.tree_map(lambda p, g: p - g / g.norm(), params, grads), state
    >>> def program():
    ...     mesh = fs.init_mesh({"shard": -1}, device="cpu")
    ...     grads = fs.shard({"w": torch.tensor([3.0, 4.0])}, fs.fully_shard(mesh))
    ...     tx, params = fs.whole(fs.Optimizer(lambda params: (), unit_step)), fs.tree_map(torch.zeros_like, grads)
    ...     return tx.update(grads, tx.init(params), params)[0]["w"].local
    >>> fs.testing.spmd(program, world=2)
    [tensor([-0.6000]), tensor([-0.8000])]
    """
    known = isinstance(tx, fs.Optimizer)
    expect(known, "whole", "tx to be an Optimizer, such as fs.from_torch(torch.optim.Muon)", describe(tx))

    def init(params: Any) -> WholeState:
        return WholeState(tuple(map(begin, flatten(params).leaves)))

    def begin(leaf: Any) -> Any:
        if not is_trained(leaf):
            return None
        # One leaf at a time is whole, on every rank, because a state may start from its values.
        (full,) = fs.unshard([leaf])
        made = flatten(tx.init({"leaf": full}))
        return made.unflatten([_take_local_piece(value, leaf) for value in made.leaves])

    def update(grads: Any, state: WholeState, params: Any) -> tuple[Any, WholeState]:
        flat = flatten(params)
        leaves, states = list(flat.leaves), list(state.leaves)
        each = zip(flat.paths, leaves, states, strict=True)
        late = [path for path, leaf, kept in each if is_trained(leaf) and kept is None]
        # An optimizer may keep nothing for any leaf.
        problems = [(path, "none", "a state") for path in late if any(kept is not None for kept in states)]
        refuse("whole: leaves were frozen until now", problems, "make the state anew by fs.TrainState.create")
        travelling: dict[tuple[fs.Axis, ...], list[tuple[int, Any]]] = {}
        for i, grad in enumerate(flatten(grads).leaves):
            leaf = leaves[i]
            if states[i] is None and not is_trained(leaf):
                continue
            if grad is None:
                # The update counts, and a leaf may have an average; neither looks across elements.
                new, states[i] = run_update("whole", "tx", tx, {"leaf": None}, states[i], {"leaf": leaf})
                leaves[i] = new["leaf"]
            elif axes := _route(leaf):
                travelling.setdefault(axes, []).append((i, grad))
            else:
                new, states[i] = run_update("whole", "tx", tx, {"leaf": _full(grad)}, states[i], {"leaf": _full(leaf)})
                leaves[i] = _like(leaf, new["leaf"])
        for axes, rows in travelling.items():
            device = _device_of(leaves[rows[0][0]])
            done = _step_at_owners(tx, axes, [(grad, leaves[i], states[i]) for i, grad in rows], device)
            for (i, _), (leaf, kept) in zip(rows, done, strict=True):
                leaves[i], states[i] = leaf, kept
        return flat.unflatten(leaves), WholeState(tuple(states))

    return fs.Optimizer(init, update)


def _like(leaf: Any, tensor: torch.Tensor) -> Any:
    """Return a tensor as a leaf like another, in its stored shape."""
    return fs.Sharded(tensor.reshape(leaf.local.shape), leaf.spec) if isinstance(leaf, fs.Sharded) else tensor


def _full(leaf: Any) -> torch.Tensor:
    """Return a leaf that this rank holds whole, in its own shape: a split 0-d leaf is stored with one dim."""
    return leaf.local.reshape(leaf.spec.shape) if isinstance(leaf, fs.Sharded) else leaf


def _route(leaf: Any) -> tuple[fs.Axis, ...]:
    """List the axes over which the pieces of a leaf are put together, minor ones of a dim first."""
    dims = range(len(leaf.spec.partition)) if isinstance(leaf, fs.Sharded) else ()
    return tuple(axis for dim in dims for axis in reversed(leaf.spec.split_axes(dim)) if axis.size > 1)


def _take_local_piece(value: Any, leaf: Any) -> Any:
    """Cut this rank's piece of a part of a leaf's state: as the leaf is split where it is like it, else along dim 0."""
    axes = _route(leaf)
    if not axes or not isinstance(value, torch.Tensor) or not value.dim():
        return value
    spec = leaf.spec
    if value.shape != spec.shape:
        spec = fs.Spec(tuple(value.shape), transform=spec.transform)
        for axis in reversed(axes):
            spec = spec.split(axis, 0, owned=axis in leaf.spec.owned)
    return fs.Sharded(local_piece(value, spec), spec)


Lists = Sequence[Sequence[torch.Tensor]]
Row = tuple[Any, Any, Any]  # a leaf's gradient, the leaf, and its state


def _step_at_owners(tx: fs.Optimizer, axes: Sequence[fs.Axis], rows: Sequence[Row], device: torch.device) -> list[Any]:
    """Step leaves at their owners: for each axis three exchanges, of shards there and back, and of single numbers.

    Args:
        tx: The optimizer.
        axes: The axes that the leaves are still split over, in the order in which pieces are put together.
        device: The device that sends.
        rows: The leaves, as Sharded ones of those axes.

    Returns:
        Each leaf with its state afterwards.
    """
    if not axes:
        return [_stepped(tx, *row) for row in rows]
    axis, *rest = axes
    owners = assign([flops_of(leaf.spec.shape) for _, leaf, _ in rows], axis.size)
    owned = [[m for m, owner in enumerate(owners) if owner == rank] for rank in range(axis.size)]
    mine = owned[fs.comm.rank(axis)]
    flats = [flatten((leaf, kept)) for _, leaf, kept in rows]
    shards = [[value for value in flat.leaves if isinstance(value, fs.Sharded)] for flat in flats]
    numbers = [
        [value for value in flat.leaves if value is not None and not isinstance(value, fs.Sharded)] for flat in flats
    ]

    there = [[grad.local, *(value.local for value in row)] for (grad, _, _), row in zip(rows, shards, strict=True)]
    exchanged = partial(_exchange, axis=axis, device=device)
    received = exchanged(
        [[t for m in some for t in there[m]] for some in owned], [[t for m in mine for t in there[m]]] * axis.size
    )
    pieces = zip(*received, strict=True)
    gathered: list[Row] = []
    for m in mine:
        grad = _joined(next(pieces), rows[m][1], axis)
        values = [_joined(next(pieces), v, axis) if isinstance(v, fs.Sharded) else v for v in flats[m].leaves]
        gathered.append((grad, *flats[m].unflatten(values)))
    cut: list[Sequence[torch.Tensor]] = []
    counted: list[torch.Tensor] = []
    for m, done in zip(mine, _step_at_owners(tx, rest, gathered, device), strict=True):
        for old, value in zip(flats[m].leaves, flatten(done).leaves, strict=True):
            if isinstance(old, fs.Sharded):
                cut.append(_pieces(value.local, old, axis))
            elif old is not None:
                counted.append(torch.as_tensor(value))
    locals_of = [[value.local for m in some for value in shards[m]] for some in owned]
    back = exchanged([[parts[rank] for parts in cut] for rank in range(axis.size)], locals_of)
    kinds = [[torch.as_tensor(value) for m in some for value in numbers[m]] for some in owned]
    # Numbers that optimizers keep on the processor travel with the leaves where accelerators alone can send.
    on_host = supports_cpu_messages(axis) and all(value.is_cpu for row in kinds for value in row)
    told = _exchange([counted] * axis.size, kinds, axis, torch.device("cpu") if on_host else device)
    stepped, known = [iter(row) for row in back], [iter(row) for row in told]

    def after_of(old: Any, owner: int) -> Any:
        if isinstance(old, fs.Sharded):
            return fs.Sharded(next(stepped[owner]), old.spec)
        if old is None:
            return None
        number = next(known[owner])
        return number if isinstance(old, torch.Tensor) else type(old)(number.item())

    return [
        flat.unflatten([after_of(old, owner) for old in flat.leaves]) for flat, owner in zip(flats, owners, strict=True)
    ]


def _device_of(leaf: fs.Sharded) -> torch.device:
    """Find the device that computes with a leaf, perhaps another than the one that keeps it."""
    transform: Any = leaf.spec.transform
    storage = transform and transform.storage
    return storage.compute_device if storage else leaf.local.device


def _exchange(send: Lists, receive: Lists, axis: fs.Axis, device: torch.device) -> Lists:
    """Send each rank tensors of any dtypes, as bytes by way of a device, and wait for those that are like `receive`."""
    away, here = ([sum(tensor.nbytes for tensor in row) for row in rows] for rows in (send, receive))
    kept = next((tensor.device for row in (*send, *receive) for tensor in row), device)
    flat = [tensor.contiguous().unsqueeze(-1).view(torch.uint8).flatten() for row in send for tensor in row]
    rows = torch.cat([torch.empty(0, dtype=torch.uint8, device=kept), *flat])
    (landed,) = fs.comm.all_to_all([rows.to(device)], away, here, axis, "whole")
    parts = iter(landed.to(kept).split([like.nbytes for row in receive for like in row]))
    # A part may lie unaligned in what has landed, which it must not keep alive.
    return [[next(parts).clone().view(like.dtype).view(like.shape) for like in row] for row in receive]


def _stepped(tx: fs.Optimizer, grad: Any, leaf: Any, kept: Any) -> Any:
    """Step a leaf whose pieces are all here."""
    flat = flatten((leaf, kept))
    full, values = flat.unflatten([_full(value) if isinstance(value, fs.Sharded) else value for value in flat.leaves])
    new, after = run_update("whole", "tx", tx, {"leaf": _full(grad)}, values, {"leaf": full})
    stepped = flatten((new["leaf"], after)).leaves
    return flat.unflatten(map(_like, flat.leaves, stepped))


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


def _joined(pieces: Sequence[torch.Tensor], shard: fs.Sharded, axis: fs.Axis) -> fs.Sharded:
    """Put the pieces of an axis's ranks together; other axes may still split the result."""
    dim = shard.spec.dim_of(axis)
    assert dim is not None
    joined = torch.cat(list(pieces), dim).narrow(dim, 0, shard.spec.shared_out(dim, axis))
    return fs.Sharded(joined.contiguous(), shard.spec)


def _pieces(joined: torch.Tensor, shard: fs.Sharded, axis: fs.Axis) -> Sequence[torch.Tensor]:
    """Cut what `_joined` put together, and pad it at the end."""
    dim = shard.spec.dim_of(axis)
    assert dim is not None
    missing = shard.local.shape[dim] * axis.size - joined.shape[dim]
    padded = torch.nn.functional.pad(joined, (0, 0) * (joined.dim() - dim - 1) + (0, missing)) if missing else joined
    return padded.chunk(axis.size, dim) if padded.shape[dim] else [padded] * axis.size


def flops_of(shape: Sequence[int]) -> float:
    """Count a matrix method's operations, but for a factor: products of the matrix with its own transpose."""
    return math.prod(shape) * min(shape) if shape else 1.0
