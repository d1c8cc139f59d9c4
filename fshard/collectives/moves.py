"""Collectives that move pieces of tensors between the ranks of a mesh axis, each with its transpose."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from fshard import comm
from fshard.collectives.linear import LinearMap, Tensors, on_tree
from fshard.errors import expect
from fshard.tree import Axis, Tree, flatten, tensor_of
from fshard.tree.checks import check_axis, check_dim, check_dividing, check_leaves, check_operands, describe


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
    check_dim("all_gather", dim)
    check_operands("all_gather", tree, axis, dim)
    return on_tree(tree, _gathering(axis, dim, "all_gather"), _scattering(axis, dim), axis)


def all_gather_invariant(tree: Tree, axis: Axis, dim: int = 0) -> Tree:
    """Concatenate every rank's tensors along a dim into a value that agrees between ranks.

    Its transpose takes this rank's piece of the cotangent, which agrees too. Follows jax.lax.all_gather_invariant.

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
    check_dim("all_gather_invariant", dim)
    check_operands("all_gather_invariant", tree, axis, dim)
    run = _gathering(axis, dim, "all_gather_invariant")
    return on_tree(tree, run, partial(_own_piece, axis=axis, dim=dim), axis)


def reduce_scatter(tree: Tree, axis: Axis, dim: int = 0) -> Tree:
    """Sum over ranks and keep this rank's piece of a dim; the transpose of `all_gather`.

    Args:
        tree: Tensors of equal shapes and dtypes on every rank.
        axis: The mesh axis to sum over.
        dim: The dim to split, counted from the front; its size must be a multiple of axis.size.

    Returns:
        Tensors 1 / axis.size as long along `dim`.

    Raises:
        ValueError: if a leaf has no such dim, or it does not divide, with the leaf's path.

    >>> import torch, fshard as fs
    >>> def program():
    ...     axis = fs.axis_of(fs.init_mesh({"shard": -1}, device="cpu"))
    ...     return fs.reduce_scatter(torch.arange(4) + 10 * fs.axis_index(axis), axis).tolist()
    >>> fs.testing.spmd(program, world=2)
    [[10, 12], [14, 16]]
    """
    check_dim("reduce_scatter", dim)
    check_operands("reduce_scatter", tree, axis, dim)
    check_dividing("reduce_scatter", tree, axis, dim)
    return on_tree(tree, _scattering(axis, dim), _gathering(axis, dim, "all_gather"), axis)


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
        ValueError: if a leaf has no such dim, or it does not divide, with the leaf's path.

    >>> import torch, fshard as fs
    >>> def program():
    ...     axis = fs.axis_of(fs.init_mesh({"cp": -1}, device="cpu"))
    ...     x = torch.arange(4).reshape(1, 4) + 10 * fs.axis_index(axis)
    ...     return fs.all_to_all(x, axis, split_dim=1, concat_dim=0).tolist()
    >>> fs.testing.spmd(program, world=2)
    [[[0, 1], [10, 11]], [[2, 3], [12, 13]]]
    """
    check_dim("all_to_all", split_dim, "split_dim")
    check_dim("all_to_all", concat_dim, "concat_dim")
    check_operands("all_to_all", tree, axis, concat_dim)
    check_operands("all_to_all", tree, axis, split_dim)
    check_dividing("all_to_all", tree, axis, split_dim)
    run = partial(_exchange, axis=axis, split=split_dim, concat=concat_dim, label="all_to_all")
    back = partial(_exchange, axis=axis, split=concat_dim, concat=split_dim, label="all_to_all")
    return on_tree(tree, run, back, axis)


def ragged_all_to_all(tree: Tree, axis: Axis, send_sizes: Sequence[int], recv_sizes: Sequence[int]) -> Tree:
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
        ValueError: if sizes are not one whole number of 0 or more for each rank, or a leaf has another number of rows,
            with the leaf's path.

    >>> import torch, fshard as fs
    >>> def program():
    ...     axis = fs.axis_of(fs.init_mesh({"expert": -1}, device="cpu"))
    ...     send, receive = ([1, 2], [1, 0]) if fs.axis_index(axis) == 0 else ([0, 3], [2, 3])
    ...     rows = torch.arange(3) + 10 * fs.axis_index(axis)
    ...     return fs.ragged_all_to_all(rows, axis, send, receive).tolist()
    >>> fs.testing.spmd(program, world=2)
    [[0], [1, 2, 10, 11, 12]]
    """
    check_operands("ragged_all_to_all", tree, axis, 0)
    send, receive = (
        _checked_sizes(name, sizes, axis) for name, sizes in (("send_sizes", send_sizes), ("recv_sizes", recv_sizes))
    )
    own = comm.rank(axis)
    needed = f"recv_sizes to have {send[own]} rows from rank {own} itself, as send_sizes has"
    expect(send[own] == receive[own], "ragged_all_to_all", needed, str(receive[own]))

    def unfit(leaf: Any) -> tuple[str, str] | None:
        rows = None if leaf is None else tensor_of(leaf).shape[0]
        return None if rows in (None, sum(send)) else (f"{rows} rows", f"{sum(send)} rows, the sum of send_sizes")

    what = f"ragged_all_to_all over {axis.name!r}"
    check_leaves(f"{what}: leaves do not fit", flatten(tree), unfit, "sort and count rows by their destination")
    run = partial(_exchange_rows, axis=axis, send=send, receive=receive, label="ragged_all_to_all")
    back = partial(_exchange_rows, axis=axis, send=receive, receive=send, label="ragged_all_to_all")
    return on_tree(tree, run, back, axis)


def ppermute(tree: Tree, axis: Axis, perm: Iterable[tuple[int, int]]) -> Tree:
    """Send tensors from ranks to other ranks; a rank to which nobody sends gets zeros.

    Its transpose sends back. Follows jax.lax.ppermute.

    Args:
        tree: Tensors of equal shapes and dtypes on every rank.
        axis: The mesh axis.
        perm: Pairs (source, destination) of coordinates on the axis, the same on every rank; no two have the same
            source or the same destination.

    Returns:
        What this rank was sent.

    Raises:
        ValueError: if `perm` is no such pairs.

    >>> import torch, fshard as fs
    >>> def program():
    ...     axis = fs.axis_of(fs.init_mesh({"cp": -1}, device="cpu"))
    ...     x = torch.tensor(fs.axis_index(axis) + 1)
    ...     return fs.ppermute(x, axis, [(0, 1), (1, 2)]).item()
    >>> fs.testing.spmd(program, world=3)
    [0, 1, 2]
    """
    check_operands("ppermute", tree, axis)
    pairs = _checked_pairs(perm, axis)
    run = partial(_permute, axis=axis, perm=pairs, label="ppermute")
    back = partial(_permute, axis=axis, perm=tuple((target, source) for source, target in pairs), label="ppermute")
    return on_tree(tree, run, back, axis)


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
        ValueError: if the axis has no such rank.

    >>> import torch, fshard as fs
    >>> def program():
    ...     axis = fs.axis_of(fs.init_mesh({"shard": -1}, device="cpu"))
    ...     return fs.broadcast(torch.tensor(fs.axis_index(axis)), axis, root=1).item()
    >>> fs.testing.spmd(program, world=2)
    [1, 1]
    """
    check_operands("broadcast", tree, axis, vary=True)
    known = type(root) is int and 0 <= root < axis.size
    expect(known, "broadcast", f"root to be a coordinate from 0 to {axis.size - 1}", f"{root!r:.40}")
    run = partial(_from_root, axis=axis, root=root, label="broadcast")
    return on_tree(tree, run, partial(_at_root, axis=axis, root=root), axis)


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


def axis_size(axis: Axis) -> int:
    """Look up the number of ranks on a mesh axis. Follows jax.lax.axis_size.

    Args:
        axis: The mesh axis.

    Returns:
        The number of ranks.

    >>> import fshard as fs
    >>> def program():
    ...     mesh = fs.init_mesh({"replicate": 1, "shard": 2}, device="cpu")
    ...     return fs.axis_size(fs.axis_of(mesh, "replicate")), fs.axis_size(fs.axis_of(mesh, "shard"))
    >>> fs.testing.spmd(program, world=2)
    [(1, 2), (1, 2)]
    """
    check_axis("axis_size", axis)
    return axis.size


def _gathering(axis: Axis, dim: int, label: str) -> LinearMap:
    return partial(_concatenate, axis=axis, dim=dim, label=label)


def _scattering(axis: Axis, dim: int) -> LinearMap:
    return partial(_scatter, axis=axis, dim=dim, label="reduce_scatter")


def _concatenate(tensors: Tensors, axis: Axis, dim: int, label: str) -> Tensors:
    return [rows.movedim(0, dim).flatten(dim, dim + 1) for rows in comm.all_gather(tensors, axis=axis, label=label)]


def _own_piece(tensors: Tensors, axis: Axis, dim: int) -> Tensors:
    return [tensor.unflatten(dim, (axis.size, -1)).select(dim, comm.rank(axis)).contiguous() for tensor in tensors]


def _scatter(tensors: Tensors, axis: Axis, dim: int, label: str) -> Tensors:
    stacks = [tensor.unflatten(dim, (axis.size, -1)).movedim(dim, 0) for tensor in tensors]
    return comm.reduce_scatter(stacks, axis=axis, label=label)


def _exchange(tensors: Tensors, axis: Axis, split: int, concat: int, label: str) -> Tensors:
    pieces = [tensor.chunk(axis.size, split) for tensor in tensors]
    kinds = [(parts[0].shape, parts[0].dtype) for parts in pieces]
    about = comm.labelled(label, tensors)
    rows = comm.all_to_all(list(zip(*pieces, strict=True)), [kinds] * axis.size, axis, about)
    return [torch.cat(parts, concat) for parts in zip(*rows, strict=True)]


def _exchange_rows(
    tensors: Tensors, axis: Axis, send: tuple[int, ...], receive: tuple[int, ...], label: str
) -> Tensors:
    rows = list(zip(*(tensor.split(send) for tensor in tensors), strict=True))
    kinds = [[(torch.Size((size, *tensor.shape[1:])), tensor.dtype) for tensor in tensors] for size in receive]
    return [torch.cat(parts) for parts in zip(*comm.all_to_all(rows, kinds, axis, label), strict=True)]


def _permute(tensors: Tensors, axis: Axis, perm: tuple[tuple[int, int], ...], label: str) -> Tensors:
    own, kinds = comm.rank(axis), [(tensor.shape, tensor.dtype) for tensor in tensors]
    target, source = dict(perm).get(own), {target: source for source, target in perm}.get(own)
    send = [list(tensors) if rank == target else [] for rank in range(axis.size)]
    receive = [kinds if rank == source else [] for rank in range(axis.size)]
    rows = comm.all_to_all(send, receive, axis, comm.labelled(label, tensors), tensors[0].device)
    return [torch.zeros_like(tensor) for tensor in tensors] if source is None else rows[source]


def _from_root(tensors: Tensors, axis: Axis, root: int, label: str) -> Tensors:
    send = list(tensors) if comm.rank(axis) == root else []
    kinds = [(tensor.shape, tensor.dtype) for tensor in tensors]
    receive = [kinds if rank == root else [] for rank in range(axis.size)]
    about = comm.labelled(label, tensors)
    return comm.all_to_all([send] * axis.size, receive, axis, about, tensors[0].device)[root]


def _at_root(tensors: Tensors, axis: Axis, root: int) -> Tensors:
    return list(tensors) if comm.rank(axis) == root else [torch.zeros_like(tensor) for tensor in tensors]


def _checked_sizes(name: str, sizes: Sequence[int], axis: Axis) -> tuple[int, ...]:
    what, needed = "ragged_all_to_all", f"{name} to be {axis.size} whole numbers of 0 or more, one for each rank"
    expect(isinstance(sizes, Sequence), what, needed, describe(sizes), "call .tolist() of a tensor of counts")
    symbolic = any(isinstance(size, torch.SymInt) for size in sizes)
    remedy = "give every rank the same number of rows, its capacity, and send them by all_to_all"
    expect(not symbolic, what, f"{name} that a graph can hold", "sizes that come from data", remedy)
    whole = len(sizes) == axis.size and all(type(size) is int and size >= 0 for size in sizes)
    expect(whole, what, needed, f"{list(sizes)!r:.100}")
    return tuple(sizes)


def _checked_pairs(perm: Iterable[tuple[int, int]], axis: Axis) -> tuple[tuple[int, int], ...]:
    pairs: tuple[Any, ...] = tuple(tuple(pair) if isinstance(pair, Sequence) else pair for pair in perm)
    ranks = range(axis.size)
    fits = all(
        isinstance(pair, tuple) and len(pair) == 2 and all(type(rank) is int and rank in ranks for rank in pair)
        for pair in pairs
    )
    needed = f"perm to be pairs (source, destination) of coordinates from 0 to {axis.size - 1}"
    expect(fits, "ppermute", needed, f"{list(pairs)!r:.100}", "leave out pairs that fall off the end of the axis")
    once = all(len(set(side)) == len(pairs) for side in zip(*pairs, strict=True))
    expect(once, "ppermute", "perm to have each source and each destination once", f"{list(pairs)!r:.100}")
    return pairs
