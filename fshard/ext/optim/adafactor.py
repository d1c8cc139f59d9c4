"""Adafactor, whose averages of squares are a row and a column of each matrix, exact however leaves are split."""

import math
from typing import Any, NamedTuple

import torch

import fshard as fs
from fshard.ext.optim.leaves import leafwise
from fshard.ext.optim.native import check_rates
from fshard.ext.optim.norms import leaf_means
from fshard.ext.optim.parts import Number, Rate
from fshard.extend import ReductionOrder, describe, expect, find_order, flatten, is_trained


class AdafactorState(NamedTuple):
    """State of `scale_by_factored_rms`, and of `adafactor`.

    Attributes:
        updates: Updates made: an int64 tensor of shape ().
        row: Running mean of squared gradients over the last dim, of size 1 there, sharded as far as the leaf is; of
            leaves of less than two dims the squares themselves.
        column: The same over the last dim but one; None for leaves of less than two dims.
        counts: Updates made of each leaf: int64 tensors of shape ().
    """

    updates: torch.Tensor
    row: Any
    column: Any
    counts: Any


def scale_by_factored_rms(
    beta2_decay: float = -0.8, eps: float | None = None, *, reduction_order: str | None = None
) -> fs.GradientTransformation:
    """Divide gradients by the root of their mean square, of which a matrix keeps one row and one column.

    Follows optax.scale_by_factored_rms, and is exact however leaves are split: means over dims that are split take one
    collective for each set of axes; none carries a matrix. `adafactor` is made of it.

    Args:
        beta2_decay: The power of the number of updates that new squares are weighed by.
        eps: The least mean square, by default the dtype's epsilon.
        reduction_order: "tree" takes means in float64, of exact sums; see `clip_by_global_norm`.

    Returns:
        The transformation; its state keeps the parameters' specs, as far as rows and columns have them.

    Raises:
        ValueError: if a number is out of range, or `reduction_order` is another word; from init, if a leaf is no real
            floating tensor.

    >>> import torch, fshard as fs
    >>> tx = fs.scale_by_factored_rms()
    >>> grads = {"w": torch.tensor([[1.0, 2.0], [10.0, 20.0]])}  # its squares are a column times a row
    >>> tx.update(grads, tx.init(grads), grads)[0]
    {'w': tensor([[1., 1.],
            [1., 1.]])}
    """
    order = find_order("scale_by_factored_rms", reduction_order)
    _check("scale_by_factored_rms", beta2_decay, **{} if eps is None else {"eps": eps})

    def init(params: Any) -> AdafactorState:
        flat = flatten(params)
        leaves = [leaf if is_trained(leaf) else None for leaf in flat.leaves]
        tensors = [_tensor(leaf) for leaf in leaves if leaf is not None]
        refused = [tensor for tensor in tensors if not tensor.is_floating_point()]
        expect(not refused, "scale_by_factored_rms", "real floating leaves", ", ".join(map(describe, refused)))
        row = flat.unflatten([_begun(leaf, -1) for leaf in leaves])
        column = flat.unflatten([_begun(leaf, -2) for leaf in leaves])
        zero = torch.zeros((), dtype=torch.int64)
        counts = flat.unflatten([None if leaf is None else zero.clone() for leaf in leaves])
        return AdafactorState(zero, row, column, counts)

    def update(grads: Any, state: AdafactorState, params: Any) -> tuple[Any, AdafactorState]:
        def counted(count: Any, grad: Any) -> Any:
            if grad is None:
                return count
            # A leaf that was frozen until now begins here.
            before = torch.zeros_like(state.updates) if count is None else count
            return before + 1

        flat = flatten(grads)
        counts = flat.unflatten(map(counted, flatten(state.counts).leaves, flat.leaves))
        squares = fs.tree_map(lambda grad: grad * grad, grads)
        columns = leaf_means(squares, -2, reduction_order)
        means = flatten(leaf_means(squares, -1, reduction_order)).leaves
        rows = []
        for mean, square in zip(means, flatten(squares).leaves, strict=True):
            rows.append(square if mean is None else mean)
        rows = flat.unflatten(rows)
        weights = fs.tree_map(lambda count: count.double() ** beta2_decay, counts)
        (row,) = leafwise(_towards, rows, [state.row], [weights])
        (column,) = leafwise(_towards, columns, [state.column], [weights])
        sizes = leaf_means(row, -2, reduction_order)
        (grads,) = leafwise(_direction, grads, [grads], [row, column, sizes], (eps, order))
        return grads, AdafactorState(state.updates + 1, row, column, counts)

    return fs.GradientTransformation(init, update)


def _towards(new: torch.Tensor, old: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor]:
    return (old + weight.to(new.dtype) * (new - old),)


def _direction(
    grad: torch.Tensor, _: Any, row: Any, column: Any, size: Any, eps: float | None, order: ReductionOrder
) -> tuple[torch.Tensor]:
    least = torch.finfo(grad.dtype).eps if eps is None else eps
    variance = row if size is None else row * column / size.clamp(min=least)
    variance = variance.clamp(min=least * least)
    return (order.inverse_root(variance) * grad,)


def adafactor(
    lr: Rate = 1e-2,
    beta2_decay: float = -0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    d: float = 1.0,
    *,
    weight_decay: Number = 0.0,
    reduction_order: str | None = None,
) -> fs.Optimizer:
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
        reduction_order: As for `clip_by_global_norm`, of means and norms.

    Returns:
        The optimizer.

    Raises:
        ValueError: if a number is out of range, or `reduction_order` is another word; from init, if a leaf is no real
            floating tensor.

    >>> import torch, fshard as fs
    >>> tx = fs.adafactor(0.1)
    >>> params = {"w": torch.ones(2, 3)}
    >>> new, state = tx.update({"w": torch.ones(2, 3)}, tx.init(params), params)
    >>> new["w"][0], [tuple(leaf.shape) for leaf in fs.tree_leaves(state)]  # a row and a column
    (tensor([0.9000, 0.9000, 0.9000]), [(), (2, 1), (1, 3), ()])
    """
    check_rates("adafactor", lr, weight_decay=weight_decay)
    pair = isinstance(eps, list | tuple) and len(eps) == 2
    expect(pair, "adafactor", "eps to be two numbers", f"{eps!r:.40}")
    known = isinstance(d, int | float) and 1 <= d < math.inf
    expect(known, "adafactor", "d to be a finite number, 1 or more", f"{d!r:.40}")
    _check("adafactor", beta2_decay, **{f"eps[{i}]": x for i, x in enumerate(eps) if i or x is not None})
    scaling = scale_by_factored_rms(beta2_decay, eps[0], reduction_order=reduction_order)

    def update(grads: Any, state: AdafactorState, params: Any) -> tuple[Any, Any]:
        steps, after = scaling.update(grads, state, params)

        def moved(step: Any, param: Any, size: Any, length: Any, root: Any, count: Any, rate: Any, decay: Any) -> Any:
            length_of_step = (size / root).clamp(min=eps[1]) * torch.minimum(rate, count.double() ** -0.5)
            factor = length_of_step / (length / (root * d)).clamp(min=1.0)
            return (param * (1 - rate * decay).to(param.dtype) - step * factor.to(step.dtype),)

        flat = flatten(params)
        roots = flat.unflatten([torch.tensor(n**0.5, dtype=torch.float64) for n in map(_numel, flat.leaves)])
        given = [*fs.leaf_norms((params, steps), reduction_order=reduction_order), roots, after.counts]
        rate = lr(state.updates) if callable(lr) else lr
        numbers = torch.as_tensor(rate, dtype=torch.float64), weight_decay
        (params,) = leafwise(moved, steps, [params], given, numbers)
        return params, after

    return fs.Optimizer(scaling.init, update)


def _check(what: str, beta2_decay: float, **eps: float | None) -> None:
    known = isinstance(beta2_decay, int | float) and beta2_decay <= 0
    expect(known, what, "beta2_decay to be a number, 0 or less", f"{beta2_decay!r:.40}")
    check_rates(what, 0.0, **eps)  # type: ignore[arg-type]


def _tensor(leaf: Any) -> Any:
    return leaf.local if isinstance(leaf, fs.Sharded) else leaf


def _numel(leaf: Any) -> int:
    shape = () if leaf is None else leaf.spec.shape if isinstance(leaf, fs.Sharded) else leaf.shape
    return max(1, math.prod(shape))


def _begun(leaf: Any, dim: int) -> Any:
    """Make the mean of a leaf over a dim before its first update; of a vector the squares, and no column."""
    tensor = _tensor(leaf)
    if leaf is None or (tensor.dim() < 2 and dim == -2):
        return None
    place = [tensor.dim() + dim] if tensor.dim() > 1 else []
    zeros = tensor.new_zeros([1 if k in place else size for k, size in enumerate(tensor.shape)])
    return fs.Sharded(zeros, leaf.spec.reduced(place)) if isinstance(leaf, fs.Sharded) else zeros
