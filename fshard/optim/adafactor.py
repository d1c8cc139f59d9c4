"""adafactor: second moments of a matrix kept as one row and one column, summed over ranks."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from fshard import comm
from fshard.checks import NOT_NEGATIVE, Range, check_numbers
from fshard.objective import total
from fshard.optim.leaves import (
    check_real,
    check_state,
    like,
    missing,
    none_missed,
    partition_axes,
    tensor_of,
    trained,
    varying,
)
from fshard.optim.native import Number, Rate, check_rates, value_of
from fshard.optim.norms import leaf_norms
from fshard.shard import local_ranges
from fshard.tree import Added, Axis, P, Sharded, Spec, Tree, flatten, is_sharded, tree_map, unflatten
from fshard.update import Optimizer


class AdafactorState(NamedTuple):
    """State of `adafactor`.

    Attributes:
        updates: Updates made: an int64 tensor of shape ().
        row: Running mean of squared gradients over the last dim, of size 1 there, sharded as far as the leaf is; of
            leaves of less than two dims the squares themselves.
        column: The same over the last dim but one; None for leaves of less than two dims.
        missed: How many of the updates each leaf had no gradient in: int64 tensors of shape ().
    """

    updates: torch.Tensor
    row: Tree
    column: Tree
    missed: Tree = Added()


def adafactor(
    lr: Rate = 1e-2,
    beta2_decay: float = -0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    d: float = 1.0,
    *,
    weight_decay: Number = 0.0,
) -> Optimizer:
    """Adafactor, exact however leaves are split.

    Follows Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost" (2018), and
    torch.optim.Adafactor. What spans ranks is summed: norms of leaves and of steps, and means over dims that are split.
    Each takes one collective for each set of axes; none carries a matrix.

    Args:
        lr: Learning rate: a number, a tensor of shape (), or a schedule of the number of updates made.
        beta2_decay: The power of the number of updates that new squares are weighed by.
        eps: The least mean square, by default the dtype's epsilon; the least size of a leaf.
        d: The largest root mean square of a step, before the learning rate.
        weight_decay: How much parameters shrink in an update, times the learning rate.

    Returns:
        The optimizer.

    Raises:
        ValueError: if a number is out of range; from init, if a leaf is no real floating tensor.
    """
    check_rates("adafactor", lr, weight_decay=weight_decay)
    check_numbers("adafactor", Range("a number, 0 or less", lambda number: number <= 0), beta2_decay=beta2_decay)
    check_numbers("adafactor", Range("a finite number, 1 or more", lambda number: 1 <= number < math.inf), d=d)
    if not isinstance(eps, Sequence) or len(eps) != 2 or isinstance(eps, str):
        raise ValueError(f"adafactor: expected eps to be two numbers, got {eps!r:.40}")
    least = {f"eps[{i}]": number for i, number in enumerate(eps) if i or number is not None}
    check_numbers("adafactor", NOT_NEGATIVE, **least)

    def init(params: Tree) -> AdafactorState:
        flat = flatten(params)
        check_real("adafactor", flat)
        rows: list[Any] = [None] * len(flat.leaves)
        columns = list(rows)
        for i in trained(flat):
            leaf = flat.leaves[i]
            matrix = tensor_of(leaf).dim() > 1
            rows[i] = _zeros(leaf, -1 if matrix else None)
            columns[i] = _zeros(leaf, -2) if matrix else None
        zero = torch.zeros((), dtype=torch.int64)
        return AdafactorState(
            zero, unflatten(flat.treedef, rows), unflatten(flat.treedef, columns), none_missed(params)
        )

    def update(grads: Tree, state: AdafactorState, params: Tree) -> tuple[Tree, AdafactorState]:
        check_state("adafactor", state, AdafactorState)
        flat, rate = flatten(params), value_of(lr, state.updates)
        trees = (grads, state.row, state.column, state.missed)
        gradients, rows, columns, missed = (flatten(tree).leaves for tree in trees)
        rate = rate.double() if isinstance(rate, torch.Tensor) else torch.tensor(rate, dtype=torch.float64)
        chosen = [i for i, grad in enumerate(gradients) if grad is not None]
        steps_of = {i: (state.updates - missed[i] + 1).double() for i in chosen}
        weights = {i: step**beta2_decay for i, step in steps_of.items()}
        squares = [tensor_of(gradients[i]) * tensor_of(gradients[i]) for i in chosen]
        matrices = [(i, square) for i, square in zip(chosen, squares, strict=True) if square.dim() > 1]
        means = iter(_means([(flat.leaves[i], square, dim) for i, square in matrices for dim in (-1, -2)]))
        for i, square in zip(chosen, squares, strict=True):
            if square.dim() > 1:
                rows[i], columns[i] = (_towards(old, next(means), weights[i]) for old in (rows[i], columns[i]))
            else:
                rows[i] = _towards(rows[i], square, weights[i])
        sizes = iter(_means([(flat.leaves[i], tensor_of(rows[i]), -2) for i, _ in matrices]))
        steps: list[Any] = list(gradients)
        for i in chosen:
            grad, variance = tensor_of(gradients[i]), tensor_of(rows[i])
            least = torch.finfo(grad.dtype).eps if eps[0] is None else eps[0]
            if grad.dim() > 1:
                variance = variance * tensor_of(columns[i]) / next(sizes).clamp(min=least)
            steps[i] = like(gradients[i], variance.clamp(min=least * least).rsqrt() * grad)
        norms = leaf_norms([*(flat.leaves[i] for i in chosen), *(steps[i] for i in chosen)])
        leaves = list(flat.leaves)
        for n, i in enumerate(chosen):
            leaf, (size, length) = leaves[i], (norms[n], norms[len(chosen) + n])
            assert size is not None
            assert length is not None
            root = max(1, math.prod(leaf.spec.shape if is_sharded(leaf) else leaf.shape)) ** 0.5
            length_of_step = (size / root).clamp(min=eps[1]) * torch.minimum(rate, steps_of[i] ** -0.5)
            scale = varying(length_of_step / (length / (root * d)).clamp(min=1.0), partition_axes(leaf))
            param = tensor_of(leaf)
            param = param * varying(1 - rate * weight_decay, partition_axes(leaf)).to(param.dtype)
            leaves[i] = like(leaf, param - scale.to(param.dtype) * tensor_of(steps[i]))
        row, column = (unflatten(flat.treedef, found) for found in (rows, columns))
        after = AdafactorState(state.updates + 1, row, column, missing(state.missed, grads))
        return unflatten(flat.treedef, leaves), after

    return Optimizer(init, update)


def _zeros(leaf: Any, dim: int | None) -> Any:
    """Zeros like a leaf, or like its mean over a dim."""
    tensor = tensor_of(leaf)
    if dim is None:
        return like(leaf, torch.zeros_like(tensor, requires_grad=False))
    zeros = tensor.new_zeros([1 if k == tensor.dim() + dim else size for k, size in enumerate(tensor.shape)])
    return Sharded(zeros, _reduced(leaf.spec, dim)) if is_sharded(leaf) else zeros


def _reduced(spec: Spec, dim: int) -> Spec:
    """The spec of a leaf's mean over a dim, which no axis splits any more."""
    entries = [spec.partition.names(k) for k in range(len(spec.shape))]
    entries[dim] = ()
    while entries and not entries[-1]:
        entries.pop()
    shape = [*spec.shape]
    shape[dim] = 1
    partition = P(*(names if len(names) > 1 else names[0] if names else None for names in entries))
    return replace(spec, shape=tuple(shape), partition=partition)


def _means(requests: Sequence[tuple[Any, torch.Tensor, int]]) -> list[torch.Tensor]:
    """Means over a dim of leaves, of which a rank has some; one collective for each set of axes."""
    sums = [_without_padding(leaf, tensor, dim).sum(dim, keepdim=True) for leaf, tensor, dim in requests]
    groups: dict[tuple[Axis, ...], list[int]] = {}
    for n, (leaf, tensor, dim) in enumerate(requests):
        axes = leaf.spec.split_axes(tensor.dim() + dim) if is_sharded(leaf) else ()
        groups.setdefault(tuple(axis for axis in axes if axis.size > 1), []).append(n)
    for axes, group in groups.items():
        comm.same_call("update", axes)
        for n, found in zip(group, total([sums[n] for n in group], axes), strict=True):
            sums[n] = varying(found, axes)
    sizes = [(leaf.spec.shape if is_sharded(leaf) else leaf.shape)[dim] for leaf, _, dim in requests]
    return [found / max(1, size) for found, size in zip(sums, sizes, strict=True)]


def _without_padding(leaf: Any, tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return tensor.narrow(dim, 0, local_ranges(leaf.spec)[dim][1]) if is_sharded(leaf) else tensor


def _towards(old: Any, new: torch.Tensor, weight: torch.Tensor) -> Any:
    return tree_map(lambda tensor: tensor + weight.to(tensor.dtype) * (new - tensor), old)
