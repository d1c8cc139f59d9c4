"""adafactor: second moments of a matrix kept as one row and one column, summed over ranks."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from fshard import comm
from fshard.checks import NOT_NEGATIVE, Range, check_numbers
from fshard.collectives import total
from fshard.optim.leaves import (
    check_real,
    check_state,
    for_trained,
    leafwise,
    missing,
    none_missed,
    scaled,
    varying,
)
from fshard.optim.norms import leaf_norms
from fshard.optim.schedules import Number, Rate, check_rates, value_of
from fshard.shard import local_ranges
from fshard.tree import (
    Added,
    P,
    Sharded,
    Spec,
    Tree,
    flatten,
    grouped,
    is_sharded,
    leaves_of,
    like,
    map_leaves,
    tensor_of,
    tree_map,
    unflatten,
)
from fshard.update import GradientTransformation, Optimizer


class AdafactorState(NamedTuple):
    """State of `scale_by_factored_rms`, and of `adafactor`.

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


def scale_by_factored_rms(beta2_decay: float = -0.8, eps: float | None = None) -> GradientTransformation:
    """Divide gradients by the root of their mean square, of which a matrix keeps one row and one column.

    Follows optax.scale_by_factored_rms, and is exact however leaves are split: means over dims that are split take one
    collective for each set of axes; none carries a matrix. `adafactor` is made of it.

    Args:
        beta2_decay: The power of the number of updates that new squares are weighed by.
        eps: The least mean square, by default the dtype's epsilon.

    Returns:
        The transformation; its state keeps the parameters' specs, as far as rows and columns have them.

    Raises:
        ValueError: if a number is out of range; from init, if a leaf is no real floating tensor.
    """
    _check_factored("scale_by_factored_rms", beta2_decay, **{} if eps is None else {"eps": eps})

    def init(params: Tree) -> AdafactorState:
        check_real("scale_by_factored_rms", flatten(params))
        row = for_trained(lambda leaf: _zeros(leaf, -1 if _is_matrix(leaf) else None), params)
        column = for_trained(lambda leaf: _zeros(leaf, -2) if _is_matrix(leaf) else None, params)
        return AdafactorState(torch.zeros((), dtype=torch.int64), row, column, none_missed(params))

    def update(grads: Tree, state: AdafactorState, params: Tree) -> tuple[Tree, AdafactorState]:
        check_state("scale_by_factored_rms", state, AdafactorState)
        flat, leaves = flatten(grads), leaves_of(params)
        steps, chosen = list(flat.leaves), [i for i, grad in enumerate(flat.leaves) if grad is not None]
        matrices = [i for i in chosen if _is_matrix(steps[i])]
        rows, columns, missed = (leaves_of(tree) for tree in (state.row, state.column, state.missed))
        weights = {i: _count(state, missed[i]) ** beta2_decay for i in chosen}
        squares = {i: tensor_of(steps[i]) * tensor_of(steps[i]) for i in chosen}
        means = iter(_means([(leaves[i], squares[i], dim) for i in matrices for dim in (-1, -2)]))
        for i in chosen:
            if i in matrices:
                rows[i], columns[i] = (_towards(old, next(means), weights[i]) for old in (rows[i], columns[i]))
            else:
                rows[i] = _towards(rows[i], squares[i], weights[i])
        sizes = iter(_means([(leaves[i], tensor_of(rows[i]), -2) for i in matrices]))
        for i in chosen:
            grad, variance = tensor_of(steps[i]), tensor_of(rows[i])
            least = torch.finfo(grad.dtype).eps if eps is None else eps
            if i in matrices:
                variance = variance * tensor_of(columns[i]) / next(sizes).clamp(min=least)
            steps[i] = like(steps[i], variance.clamp(min=least * least).rsqrt() * grad)
        new, row, column = (unflatten(flat.treedef, found) for found in (steps, rows, columns))
        return new, AdafactorState(state.updates + 1, row, column, missing(state.missed, grads))

    return GradientTransformation(init, update)


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
    torch.optim.Adafactor. Sums over ranks are those of `scale_by_factored_rms`, and the norms of leaves and of steps:
    one collective more for each set of axes.

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
    if not isinstance(eps, Sequence) or len(eps) != 2 or isinstance(eps, str):
        raise ValueError(f"adafactor: expected eps to be two numbers, got {eps!r:.40}")
    check_numbers("adafactor", Range("a finite number, 1 or more", lambda number: 1 <= number < math.inf), d=d)
    _check_factored("adafactor", beta2_decay, **{f"eps[{i}]": x for i, x in enumerate(eps) if i or x is not None})
    scaling = scale_by_factored_rms(beta2_decay, eps[0])

    def init(params: Tree) -> Tree:
        check_real("adafactor", flatten(params))
        return scaling.init(params)

    def update(grads: Tree, state: AdafactorState, params: Tree) -> tuple[Tree, Tree]:
        check_state("adafactor", state, AdafactorState)
        rate = torch.as_tensor(value_of(lr, state.updates), dtype=torch.float64)
        steps, after = scaling.update(grads, state, params)
        used = map_leaves(lambda step, leaf: None if step is None else leaf, steps, params)
        norms = leaf_norms([*leaves_of(used), *leaves_of(steps)])
        sizes, lengths = norms[: len(norms) // 2], norms[len(norms) // 2 :]

        def relative(step: Any, leaf: Any, size: Any, length: Any, missed: Any) -> Any:
            if step is None:
                return None
            root = max(1, math.prod(leaf.spec.shape if is_sharded(leaf) else leaf.shape)) ** 0.5
            length_of_step = (size / root).clamp(min=eps[1]) * torch.minimum(rate, _count(state, missed) ** -0.5)
            return scaled(step, length_of_step / (length / (root * d)).clamp(min=1.0))

        def move(step: Any, param: Any, kept: Any) -> tuple[torch.Tensor, ...]:
            return (param * kept.to(param.dtype) - step,)

        steps = map_leaves(relative, steps, params, sizes, lengths, state.missed)
        (params,) = leafwise(move, steps, [params], numbers=(1 - rate * weight_decay,))
        return params, after

    return Optimizer(init, update)


def _check_factored(what: str, beta2_decay: float, **eps: float | None) -> None:
    check_numbers(what, Range("a number, 0 or less", lambda number: number <= 0), beta2_decay=beta2_decay)
    check_numbers(what, NOT_NEGATIVE, **eps)


def _is_matrix(leaf: Any) -> bool:
    return bool(tensor_of(leaf).dim() > 1)


def _count(state: AdafactorState, missed: torch.Tensor) -> torch.Tensor:
    """Count the updates of a leaf, this one included."""
    return (state.updates - missed + 1).double()


def _zeros(leaf: Any, dim: int | None) -> Any:
    """Make zeros like a leaf, or like its mean over a dim."""
    tensor = tensor_of(leaf)
    if dim is None:
        return like(leaf, torch.zeros_like(tensor, requires_grad=False))
    zeros = tensor.new_zeros([1 if k == tensor.dim() + dim else size for k, size in enumerate(tensor.shape)])
    return Sharded(zeros, _reduced(leaf.spec, dim)) if is_sharded(leaf) else zeros


def _reduced(spec: Spec, dim: int) -> Spec:
    """Make the spec of a leaf's mean over a dim, which no axis splits any more."""
    number = len(spec.shape) + dim
    entries = [None if k == number else entry for k, entry in enumerate(spec.partition)]
    while entries and entries[-1] is None:
        entries.pop()
    shape = tuple(1 if k == number else size for k, size in enumerate(spec.shape))
    return replace(spec, shape=shape, partition=P(*entries))


def _means(requests: Sequence[tuple[Any, torch.Tensor, int]]) -> list[torch.Tensor]:
    """Take means over a dim of leaves, of which a rank has some; one collective for each set of axes."""
    sums, sizes, over = [], [], []
    for leaf, tensor, dim in requests:
        spec = leaf.spec if is_sharded(leaf) else Spec(tuple(leaf.shape))
        sums.append(tensor.narrow(dim, 0, local_ranges(spec)[dim][1]).sum(dim, keepdim=True))
        sizes.append(max(1, spec.shape[dim]))
        over.append(tuple(axis for axis in spec.split_axes(tensor.dim() + dim) if axis.size > 1))
    for axes, group in grouped(over, tuple).items():
        comm.same_call("update", axes)
        for n, found in zip(group, total([sums[n] for n in group], axes), strict=True):
            sums[n] = varying(found, axes)
    return [found / size for found, size in zip(sums, sizes, strict=True)]


def _towards(old: Any, new: torch.Tensor, weight: torch.Tensor) -> Any:
    return tree_map(lambda tensor: tensor + weight.to(tensor.dtype) * (new - tensor), old)
