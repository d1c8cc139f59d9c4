"""Reductions over a mesh axis: psum, pmean, the typed pair psum_invariant and pcast, and pmax.

The convention is that of jax.shard_map: inside a local loss, values vary between ranks; psum and pmean of varying
values give varying ones and are their own transposes. `psum_invariant` and `pcast` are the typed pair: the first makes
a value that agrees between ranks, the second hands such a value to each rank's own math.
"""

import torch

from fshard import comm
from fshard.collectives.linear import Tensors, collective
from fshard.tree import Axis, Tree, attributes_of, tree_leaves, tree_map
from fshard.tree.checks import check_operands


def psum(tree: Tree, axis: Axis) -> Tree:
    """Sum each tensor over the ranks of an axis, inside a local loss.

    Its own transpose: where every rank goes on to its own loss, a rank's value reaches all of those losses. Follows
    jax.lax.psum of varying values.

    Args:
        tree: Tensors of equal shapes and dtypes on every rank.
        axis: The mesh axis to sum over.

    Returns:
        The tree of sums, in rank order where the algorithm is direct. Of bools these are counts, in int64.

    Raises:
        ValueError: if a leaf is no tensor, or is a Sharded leaf on this axis, with its path.

    >>> import torch, fshard as fs
    >>> def program():
    ...     axis = fs.axis_of(fs.init_mesh({"shard": -1}, device="cpu"))
    ...     x = torch.tensor(fs.axis_index(axis) + 1.0, requires_grad=True)
    ...     loss = fs.psum(x * x, axis)
    ...     loss.backward()
    ...     return loss.item(), x.grad.item()
    >>> fs.testing.spmd(program, world=2)  # 1 + 4, and the derivatives of the two ranks' losses together
    [(5.0, 4.0), (5.0, 8.0)]
    """
    return collective("psum", tree, axis, _sum, _sum, operand_varies=True)


def pmean(tree: Tree, axis: Axis) -> Tree:
    """Average each tensor over the ranks of an axis, inside a local loss; see `psum`.

    A gradient that each rank computes alone, such as by torch.func.grad, is that rank's part only: for the mean of such
    gradients take the pmean of them, or `value_and_grad` inside.

    Args:
        tree: Floating tensors of equal shapes and dtypes on every rank.
        axis: The mesh axis to average over.

    Returns:
        The tree of means.

    >>> import torch, fshard as fs
    >>> def program():
    ...     axis = fs.axis_of(fs.init_mesh({"shard": -1}, device="cpu"))
    ...     mine = {"loss": torch.tensor(fs.axis_index(axis) + 1.0), "ones": torch.ones(2)}
    ...     return fs.pmean(mine, axis)
    >>> fs.testing.spmd(program, world=2)[0]
    {'loss': tensor(1.5000), 'ones': tensor([1., 1.])}
    """
    check_operands("pmean", tree, axis, vary=True)
    return tree_map(lambda tensor: tensor / axis.size, psum(tree, axis))


def pcast(tree: Tree, axis: Axis, *, to: str) -> Tree:
    """Cast a value that agrees between ranks to one that varies, for each rank's own math.

    Its cotangents are summed over the ranks: it is the transpose of `psum_invariant`. Follows jax.lax.pcast.

    Args:
        tree: Tensors that agree between the ranks of `axis`.
        axis: The mesh axis.
        to: "varying", the only cast that there is; a value that varies is made to agree by `psum_invariant`, `pmax`
            or `all_gather_invariant`.

    Returns:
        The same values.

    Raises:
        ValueError: if `to` is another word.

    >>> import torch, fshard as fs
    >>> def program():
    ...     axis = fs.axis_of(fs.init_mesh({"shard": -1}, device="cpu"))
    ...     x = torch.tensor(5.0, requires_grad=True)
    ...     loss = fs.pcast(x, axis, to="varying") * (fs.axis_index(axis) + 1)
    ...     loss.backward()
    ...     return loss.item(), x.grad.item()
    >>> fs.testing.spmd(program, world=2)  # each rank's own loss, and the sum of both derivatives
    [(5.0, 3.0), (10.0, 3.0)]
    """
    if to != "varying":
        raise ValueError(
            f'pcast: to={to!r} is not supported; the only cast is to="varying". To make a varying value agree, use '
            "psum_invariant, pmax or all_gather_invariant."
        )
    return collective("pcast", tree, axis, _same, _sum, operand_varies=False)


def psum_invariant(tree: Tree, axis: Axis) -> Tree:
    """Sum over the ranks of an axis into a value that agrees between them, such as an objective.

    The transpose of `pcast`. Follows jax.lax.psum from varying to invariant.

    Args:
        tree: Tensors of equal shapes and dtypes on every rank.
        axis: The mesh axis to sum over.

    Returns:
        The tree of sums, of bools in int64.

    Raises:
        ValueError: as `psum`.

    >>> import torch, fshard as fs
    >>> def program():
    ...     axis = fs.axis_of(fs.init_mesh({"shard": -1}, device="cpu"))
    ...     x = torch.tensor(fs.axis_index(axis) + 1.0, requires_grad=True)
    ...     objective = fs.psum_invariant(x * x, axis)
    ...     objective.backward()
    ...     return objective.item(), x.grad.item()
    >>> fs.testing.spmd(program, world=2)  # 1 + 4, and the derivatives of the one objective that the ranks share
    [(5.0, 2.0), (5.0, 4.0)]
    """
    return collective("psum_invariant", tree, axis, _sum, _same, operand_varies=True, result_varies=False)


def pmax(tree: Tree, axis: Axis) -> Tree:
    """Take the largest of the ranks' values, element by element; it agrees between ranks and takes no gradient.

    Follows jax.lax.pmax.

    Args:
        tree: Tensors of equal shapes and dtypes on every rank, outside of any graph; not a number is the largest.
        axis: The mesh axis.

    Returns:
        The tree of largest values.

    Raises:
        ValueError: if a tensor requires a gradient.

    >>> import torch, fshard as fs
    >>> def program():
    ...     axis = fs.axis_of(fs.init_mesh({"shard": -1}, device="cpu"))
    ...     rank = fs.axis_index(axis)
    ...     return fs.pmax(torch.tensor([rank, 1 - rank, -rank]), axis).tolist()
    >>> fs.testing.spmd(program, world=2)
    [[1, 1, 0], [1, 1, 0]]
    """
    if torch.is_grad_enabled() and True in attributes_of(tree_leaves(tree), "requires_grad"):
        raise ValueError(
            "pmax has no derivative, and one of these tensors requires a gradient. Pass tensor.detach(); subtracting a "
            "maximum, as in softmax, needs no derivative."
        )
    # The rows vary. No gradient passes, so the type of the result and the transpose are never used.
    rows = collective("pmax", tree, axis, comm.all_gather, comm.reduce_scatter, operand_varies=True)
    return tree_map(lambda of_ranks: of_ranks.amax(0), rows)


def count_bools(tensors: Tensors) -> list[torch.Tensor]:
    """Make integers of bools, whose sum would only say whether any is true. Follows torch.sum."""
    return [tensor.long() if tensor.dtype is torch.bool else tensor for tensor in tensors]


def _sum(tensors: Tensors, axis: Axis, label: str) -> Tensors:
    return comm.all_reduce(count_bools(tensors), axis, label)


def _same(tensors: Tensors, axis: Axis, label: str) -> Tensors:
    return tensors
