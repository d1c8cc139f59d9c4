"""Collectives that move pieces of tensors between the ranks of a mesh axis, each with its transpose."""

from collections.abc import Iterable, Sequence
from functools import partial, reduce

import torch

from fshard import comm
from fshard.collectives.linear import Tensors, collective
from fshard.collectives.sums import count_bools
from fshard.tree import Axis, Tree
from fshard.tree.checks import check_axis, check_operands

# A number of rows for each rank.
Sizes = Sequence[int]
# The coordinates of a rank that sends and of one that is sent to.
Pair = tuple[int, int]


def all_gather(tree: Tree, axis: Axis, dim: int = 0) -> Tree:
    """Concatenate every rank's tensors along a dim; the transpose of `reduce_scatter`.

    Args:
        tree: Tensors of equal shapes and dtypes on every rank.
        axis: The mesh axis to gather over.
        dim: The dim to concatenate along, counted from the front.

    Returns:
        Tensors axis.size times as long along `dim`.

    >>> import torch, fshard as fs
    >>> def program():
    ...     axis = fs.axis_of(fs.init_mesh({"shard": -1}, device="cpu"))
    ...     x = torch.full((1, 2), float(fs.axis_index(axis)))
    ...     return fs.all_gather(x, axis).tolist(), fs.all_gather(x, axis, dim=1).tolist()
    >>> fs.testing.spmd(program, world=2)[0]
    ([[0.0, 0.0], [1.0, 1.0]], [[0.0, 0.0, 1.0, 1.0]])
    """
    run = partial(_concatenate, dim=dim)
    transpose = partial(_sum_and_split, dim=dim, label="reduce_scatter")
    return collective("all_gather", tree, axis, run, transpose, dim=dim)


def all_gather_invariant(tree: Tree, axis: Axis, dim: int = 0) -> Tree:
    """Concatenate every rank's tensors along a dim into a value that agrees between ranks.

    Its transpose takes this rank's piece of the cotangent, which agrees too. Follows jax.lax.all_gather with
    to="invarying".

    Args:
        tree: Tensors of equal shapes and dtypes on every rank.
        axis: The mesh axis to gather over.
        dim: The dim to concatenate along, counted from the front.

    Returns:
        Tensors axis.size times as long along `dim`.

    >>> import torch, fshard as fs
    >>> def program():
    ...     axis = fs.axis_of(fs.init_mesh({"tp": -1}, device="cpu"))
    ...     x = torch.tensor([fs.axis_index(axis) + 1.0], requires_grad=True)
    ...     full = fs.all_gather_invariant(x, axis)
    ...     (full * full).sum().backward()
    ...     return full.tolist(), x.grad.tolist()
    >>> fs.testing.spmd(program, world=2)
    [([1.0, 2.0], [2.0]), ([1.0, 2.0], [4.0])]
    """
    run = partial(_concatenate, dim=dim)
    transpose = partial(_take_local_piece, dim=dim)
    return collective("all_gather_invariant", tree, axis, run, transpose, dim=dim, result_varies=False)


def reduce_scatter(tree: Tree, axis: Axis, dim: int = 0) -> Tree:
    """Sum over ranks and keep this rank's piece of a dim; the transpose of `all_gather`.

    Args:
        tree: Tensors of equal shapes and dtypes on every rank.
        axis: The mesh axis to sum over.
        dim: The dim to split, counted from the front; its size must be a multiple of axis.size.

    Returns:
        Tensors 1 / axis.size as long along `dim`; of bools these are counts, in int64.

    Raises:
        ValueError: if a leaf has no such dim, with its path, or the dim does not divide.

    >>> import torch, fshard as fs
    >>> def program():
    ...     axis = fs.axis_of(fs.init_mesh({"shard": -1}, device="cpu"))
    ...     return fs.reduce_scatter(torch.arange(4) + 10 * fs.axis_index(axis), axis).tolist()
    >>> fs.testing.spmd(program, world=2)
    [[10, 12], [14, 16]]
    """
    run = partial(_sum_and_split, dim=dim)
    transpose = partial(_concatenate, dim=dim, label="all_gather")
    return collective("reduce_scatter", tree, axis, run, transpose, dim=dim)


def all_to_all(tree: Tree, axis: Axis, split_dim: int, concat_dim: int) -> Tree:
    """Cut tensors along one dim, send piece r to rank r, and concatenate along another dim what the ranks sent.

    Its transpose swaps the dims. Follows jax.lax.all_to_all with tiled=True.

    Args:
        tree: Tensors of equal shapes and dtypes on every rank.
        axis: The mesh axis.
        split_dim: The dim to cut, counted from the front; its size must be a multiple of axis.size.
        concat_dim: The dim to concatenate along, counted from the front.

    Returns:
        Tensors 1 / axis.size as long along `split_dim`, then axis.size times as long along `concat_dim`.

    Raises:
        ValueError: if a leaf has no such dim, with its path, or the dim does not divide.

    >>> import torch, fshard as fs
    >>> def program():
    ...     axis = fs.axis_of(fs.init_mesh({"cp": -1}, device="cpu"))
    ...     x = torch.arange(4).reshape(1, 4) + 10 * fs.axis_index(axis)
    ...     return fs.all_to_all(x, axis, split_dim=1, concat_dim=0).tolist()
    >>> fs.testing.spmd(program, world=2)
    [[[0, 1], [10, 11]], [[2, 3], [12, 13]]]
    """
    check_operands("all_to_all", tree, axis, concat_dim)
    run = partial(_exchange, split=split_dim, concat=concat_dim)
    transpose = partial(_exchange, split=concat_dim, concat=split_dim)
    return collective("all_to_all", tree, axis, run, transpose, dim=split_dim)


def ragged_all_to_all(tree: Tree, axis: Axis, send_sizes: Sizes, recv_sizes: Sizes) -> Tree:
    """Send each rank some rows of tensors, as many as it is to get, and concatenate the rows that the ranks sent.

    Its transpose swaps the sizes. Follows jax.lax.ragged_all_to_all, with sizes on the host and no offsets: rows lie in
    rank order without gaps. Ranks learn the sizes of others by `all_to_all` of a tensor of counts.

    Args:
        tree: Tensors of sum(send_sizes) rows along dim 0, of equal dtypes and trailing dims on every rank.
        axis: The mesh axis.
        send_sizes: For each rank of the axis how many rows it gets.
        recv_sizes: For each rank of the axis how many rows it sends here; its own send_sizes say the same.

    Returns:
        Tensors of sum(recv_sizes) rows.

    Raises:
        ValueError: if sizes are not one int of 0 or more for each rank, or a rank would not keep the rows that it sends
            to itself.
        RuntimeError: of torch's, on several ranks, if a leaf has another number of rows.

    >>> import torch, fshard as fs
    >>> def program():
    ...     axis = fs.axis_of(fs.init_mesh({"expert": -1}, device="cpu"))
    ...     send, receive = ([1, 2], [1, 0]) if fs.axis_index(axis) == 0 else ([0, 3], [2, 3])
    ...     rows = torch.arange(3) + 10 * fs.axis_index(axis)
    ...     return fs.ragged_all_to_all(rows, axis, send, receive).tolist()
    >>> fs.testing.spmd(program, world=2)
    [[0], [1, 2, 10, 11, 12]]
    """
    run = partial(_exchange_rows, send=send_sizes, receive=recv_sizes)
    transpose = partial(_exchange_rows, send=recv_sizes, receive=send_sizes)
    return collective("ragged_all_to_all", tree, axis, run, transpose, dim=0)


def ppermute(tree: Tree, axis: Axis, perm: Iterable[Pair]) -> Tree:
    """Send tensors from ranks to other ranks; a rank to which nobody sends gets zeros.

    Its transpose sends back. Follows jax.lax.ppermute.

    Args:
        tree: Tensors of equal shapes and dtypes on every rank.
        axis: The mesh axis.
        perm: Pairs (source, destination) of coordinates on the axis, the same on every rank.

    Returns:
        What this rank was sent, added up where several ranks sent it.

    Raises:
        IndexError: if the axis has no such coordinates.

    >>> import torch, fshard as fs
    >>> def program():
    ...     axis = fs.axis_of(fs.init_mesh({"cp": -1}, device="cpu"))
    ...     x = torch.tensor(fs.axis_index(axis) + 1)
    ...     return fs.ppermute(x, axis, [(0, 1), (1, 2)]).item()
    >>> fs.testing.spmd(program, world=3)
    [0, 1, 2]
    """
    pairs = list(perm)
    pairs_back = [(target, source) for source, target in pairs]
    run = partial(_permute, perm=pairs)
    transpose = partial(_permute, perm=pairs_back)
    return collective("ppermute", tree, axis, run, transpose)


def broadcast(tree: Tree, axis: Axis, root: int = 0) -> Tree:
    """Send one rank's tensors to all ranks; the result agrees between them.

    Its transpose keeps the cotangent on that rank alone. Follows jax.lax.pbroadcast.

    Args:
        tree: Tensors of equal shapes and dtypes on every rank.
        axis: The mesh axis.
        root: The coordinate of the rank whose tensors all get.

    Returns:
        That rank's tensors.

    Raises:
        IndexError: if the axis has no such rank.

    >>> import torch, fshard as fs
    >>> def program():
    ...     axis = fs.axis_of(fs.init_mesh({"shard": -1}, device="cpu"))
    ...     return fs.broadcast(torch.tensor(fs.axis_index(axis)), axis, root=1).item()
    >>> fs.testing.spmd(program, world=2)
    [1, 1]
    """
    run = partial(_send_from, root=root)
    transpose = partial(_keep_at, root=root)
    return collective("broadcast", tree, axis, run, transpose, operand_varies=True, result_varies=False)


def axis_index(axis: Axis) -> int:
    """Look up this rank's coordinate on a mesh axis. Follows jax.lax.axis_index.

    Args:
        axis: The mesh axis.

    Returns:
        A number from 0 to axis.size - 1.

    >>> import fshard as fs
    >>> def program():
    ...     mesh = fs.init_mesh({"replicate": 2, "shard": 2}, device="cpu")
    ...     return fs.axis_index(fs.axis_of(mesh, "replicate")), fs.axis_index(fs.axis_of(mesh, "shard"))
    >>> fs.testing.spmd(program, world=4)
    [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    check_axis("axis_index", axis)
    return comm.rank(axis)


def _concatenate(tensors: Tensors, axis: Axis, label: str, dim: int) -> Tensors:
    """Gather tensors and put the ranks' rows side by side along a dim."""
    gathered = []
    for rows in comm.all_gather(tensors, axis, label):
        side_by_side = rows.movedim(0, dim)
        gathered.append(side_by_side.flatten(dim, dim + 1))
    return gathered


def _split_into_pieces(tensor: torch.Tensor, axis: Axis, label: str, dim: int) -> torch.Tensor:
    """Cut a dim into a piece for each rank, one row each."""
    size = tensor.shape[dim]
    if size % axis.size:
        raise ValueError(
            f"{label}: dim {dim} of a tensor of shape {tuple(tensor.shape)} cannot be cut into equal pieces for the "
            f"{axis.size} ranks of {axis.name!r}. Pad it to a multiple of {axis.size}, and cut the padding off after."
        )
    pieces = tensor.unflatten(dim, (axis.size, -1))
    return pieces.movedim(dim, 0)


def _take_local_piece(tensors: Tensors, axis: Axis, label: str, dim: int) -> Tensors:
    local_rank = comm.rank(axis)
    return [_split_into_pieces(tensor, axis, label, dim)[local_rank].contiguous() for tensor in tensors]


def _sum_and_split(tensors: Tensors, axis: Axis, label: str, dim: int) -> Tensors:
    """Sum over ranks and keep this rank's piece of a dim."""
    stacks = [_split_into_pieces(tensor, axis, label, dim) for tensor in count_bools(tensors)]
    return comm.reduce_scatter(stacks, axis, label)


def _exchange(tensors: Tensors, axis: Axis, label: str, split: int, concat: int) -> Tensors:
    """Send each rank its piece of a dim, and concatenate along another dim what the ranks sent."""
    stacks = [_split_into_pieces(tensor, axis, label, split) for tensor in tensors]
    one_row_each = [1] * axis.size
    received = comm.all_to_all(stacks, one_row_each, one_row_each, axis, label)
    return [torch.cat(list(rows), concat) for rows in received]


def _exchange_rows(tensors: Tensors, axis: Axis, label: str, send: Sizes, receive: Sizes) -> Tensors:
    if not _are_sizes(send, axis) or not _are_sizes(receive, axis):
        raise ValueError(
            f"ragged_all_to_all: send_sizes {send!r:.100} and recv_sizes {receive!r:.100} must each be a list of "
            f"{axis.size} ints, 0 or more. Convert a tensor of counts with .tolist(). In a graph, use all_to_all with "
            "a fixed capacity."
        )
    local_rank = comm.rank(axis)
    # torch would copy one row that a rank keeps to several.
    if send[local_rank] != receive[local_rank]:
        raise ValueError(
            f"ragged_all_to_all: this rank, number {local_rank} of {axis.name!r}, sends itself {send[local_rank]} rows "
            f"by send_sizes and gets {receive[local_rank]} by recv_sizes. Make these two entries equal."
        )
    return comm.all_to_all(tensors, send, receive, axis, label)


def _are_sizes(sizes: Sizes, axis: Axis) -> bool:
    """Whether there is one int of 0 or more for each rank. A bool or a number of numpy's is refused."""
    if not isinstance(sizes, Sequence) or len(sizes) != axis.size:
        return False
    return all(type(size) is int and size >= 0 for size in sizes)


def _permute(tensors: Tensors, axis: Axis, label: str, perm: Sequence[Pair]) -> Tensors:
    """Send tensors to the ranks that pairs (source, target) name, and add up what this rank is sent."""
    local_rank = comm.rank(axis)
    send = [0] * axis.size
    receive = [0] * axis.size
    for source, target in perm:
        source_rank = _find_rank(source, axis, label)
        target_rank = _find_rank(target, axis, label)
        if source_rank == local_rank:
            send[target_rank] += 1
        if target_rank == local_rank:
            receive[source_rank] += 1
    num_copies = sum(send)
    copies = [tensor.expand(num_copies, *tensor.shape) for tensor in tensors]
    received = comm.all_to_all(copies, send, receive, axis, label)
    if not any(receive):
        return list(map(torch.zeros_like, tensors))
    sums = []
    for rows in received:
        # torch.sum of one row would lose the sign of a zero.
        total = reduce(torch.add, rows)
        sums.append(total.detach())
    return sums


def _send_from(tensors: Tensors, axis: Axis, label: str, root: int) -> Tensors:
    """Send one rank's tensors to all ranks."""
    pairs = [(root, rank) for rank in range(axis.size)]
    return _permute(tensors, axis, label, pairs)


def _keep_at(tensors: Tensors, axis: Axis, label: str, root: int) -> Tensors:
    """Keep tensors on one rank alone; the others get zeros."""
    if comm.rank(axis) == _find_rank(root, axis, label):
        return list(tensors)
    return list(map(torch.zeros_like, tensors))


def _find_rank(coordinate: int, axis: Axis, label: str) -> int:
    """Return the rank at a coordinate, counted from the end if it is negative."""
    size = axis.size
    if coordinate not in range(-size, size):
        raise IndexError(
            f"{label}: coordinate {coordinate!r:.40} is out of range. {axis.name!r} has {size} ranks, 0 to {size - 1}."
        )
    return coordinate % size
