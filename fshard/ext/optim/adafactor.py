"""Adafactor, whose averages of squares are a row and a column of each matrix, exact however leaves are split."""

import math
from functools import partial
from typing import Any, NamedTuple

import torch

import fshard as fs
from fshard.ext.optim.leaves import (
    Number,
    Rate,
    check_real,
    leafwise,
    make_step,
    map_gradients,
    read_rate,
    share_out,
    stack_counts,
    take_with_gradient,
)
from fshard.ext.optim.native import check_pair, check_rates
from fshard.ext.optim.norms import leaf_means, stack_norms
from fshard.extend import (
    NOT_NEGATIVE,
    Range,
    check_numbers,
    count_updates,
    find_order,
    flatten,
    leaves_of,
    map_trained_leaves,
    no_updates,
    tensor_of,
    zero,
)

NOT_POSITIVE = Range("a number, 0 or less", lambda number: number <= 0)
AT_LEAST_ONE = Range("a finite number, 1 or more", lambda number: 1 <= number < math.inf)


class AdafactorState(NamedTuple):
    """State of `scale_by_factored_rms`, and of `adafactor`.

    Attributes:
        updates: The number of updates made: an int64 tensor of shape ().
        row: Running mean of squared gradients over the last dim, which has size 1 here; split in the other dims as the
            leaf is. For leaves of fewer than two dims the squares themselves.
        column: The same over the second-last dim; None for leaves of fewer than two dims.
        counts: The number of updates made of each leaf: int64 tensors of shape ().
    """

    updates: torch.Tensor
    row: Any
    column: Any
    counts: Any


def scale_by_factored_rms(
    beta2_decay: float = -0.8,
    eps: float | None = None,
    *,
    reduction_order: str | None = None,
) -> fs.GradientTransformation:
    """Divide gradients by the root of their mean square, of which a matrix keeps one row and one column.

    The result is exact however leaves are split. Means over split dims take one collective for each set of axes, and
    none of these sends a matrix. `adafactor` is built on it. Follows torch.optim.Adafactor. Unlike
    optax.scale_by_factored_rms it factors every leaf of two dims or more, over its last two, and bounds mean squares
    by `eps` instead of adding it.

    Args:
        beta2_decay: The weight of new squares is the number of updates to this power.
        eps: The least mean square; None means the epsilon of the dtype.
        reduction_order: "tree" takes means of exact sums, in float64; see `clip_by_global_norm`.

    Returns:
        The transformation. Its rows and columns are split as the parameters are.

    Raises:
        ValueError: if a number is out of range, or `reduction_order` is another word; from init, if a leaf is not a
            real floating tensor.

    >>> import torch, fshard as fs
    >>> tx = fs.scale_by_factored_rms()
    >>> grads = {"w": torch.tensor([[1.0, 2.0], [10.0, 20.0]])}  # its squares are a column times a row
    >>> tx.update(grads, tx.init(grads), grads)[0]
    {'w': tensor([[1., 1.],
            [1., 1.]])}
    """
    api_name = "scale_by_factored_rms"
    find_order(api_name, reduction_order)
    check_numbers(api_name, NOT_POSITIVE, beta2_decay=beta2_decay)
    if eps is not None:
        check_numbers(api_name, NOT_NEGATIVE, eps=eps)

    def update(grads: Any, state: AdafactorState, params: Any) -> tuple[Any, AdafactorState]:
        counts = count_updates(state.counts, grads)
        weights = share_out((stack_counts(counts, grads) ** beta2_decay)[:, 0], grads)
        squares = fs.tree_map(lambda grad: grad * grad, grads)
        columns = leaf_means(squares, -2, reduction_order)
        rows = leaf_means(squares, -1, reduction_order)
        (row,) = leafwise(_move_towards, rows, [state.row], [weights])
        (column,) = leafwise(_move_towards, columns, [state.column], [weights])
        sizes = leaf_means(row, -2, reduction_order)
        grads = map_gradients(_divide_by_root, grads, row, column, sizes, numbers=(eps,))
        return grads, AdafactorState(state.updates + 1, row, column, counts)

    return fs.GradientTransformation(_init, update)


def _init(params: Any) -> AdafactorState:
    check_real("scale_by_factored_rms", flatten(params))
    return AdafactorState(
        updates=zero(),
        row=map_trained_leaves(partial(_init_mean, dim=-1), params),
        column=map_trained_leaves(partial(_init_mean, dim=-2), params),
        counts=no_updates(params),
    )


def _init_mean(leaf: Any, dim: int) -> Any:
    """Make the mean of a leaf's squares over a dim, as of `leaf_means`, before its first update."""
    tensor = tensor_of(leaf)
    shape = list(tensor.shape)
    reduced_dims = []
    if tensor.dim() > 1:
        reduced_dims = [tensor.dim() + dim]
        shape[dim] = 1
    elif dim == -2:
        return None
    zeros = tensor.new_zeros(shape)
    return fs.Sharded(zeros, leaf.spec.reduced(reduced_dims)) if isinstance(leaf, fs.Sharded) else zeros


def _move_towards(new: torch.Tensor, old: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor]:
    return (old.lerp(new.to(old.dtype), weight.to(old.dtype)),)


def _divide_by_root(
    grad: torch.Tensor,
    row: Any,
    column: Any,
    size: Any,
    eps: float | None,
) -> torch.Tensor:
    """Divide a gradient by the root of its mean square, the product of a row and a column over the row's mean."""
    least = torch.finfo(grad.dtype).eps if eps is None else eps
    variance = row
    if size is not None:
        variance = row * column / size.clamp(min=least)
    variance = variance.clamp(min=least * least)
    # Kernels of rsqrt in half precision round the root before its inverse for the last few elements of a shard alone.
    return grad / variance.sqrt()


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
    torch.optim.Adafactor. In addition to the collectives of `scale_by_factored_rms`, the norms of leaves and of steps
    take one for each set of axes.

    Args:
        lr: Learning rate: a number, a tensor of shape (), or a schedule of the number of updates made.
        beta2_decay: The weight of new squares is the number of updates to this power.
        eps: The least mean square, with None for the epsilon of the dtype; and the least root mean square of a leaf.
        d: The largest root mean square of a step, before the learning rate.
        weight_decay: Times the learning rate, the part of the parameters that an update subtracts.
        reduction_order: As for `clip_by_global_norm`, for means and norms.

    Returns:
        The optimizer.

    Raises:
        ValueError: if a number is out of range, or `reduction_order` is another word; from init, if a leaf is not a
            real floating tensor.

    >>> import torch, fshard as fs
    >>> tx = fs.adafactor(0.1)
    >>> params = {"w": torch.ones(2, 3)}
    >>> new, state = tx.update({"w": torch.ones(2, 3)}, tx.init(params), params)
    >>> new["w"][0], [tuple(leaf.shape) for leaf in fs.tree_leaves(state)]  # a row and a column
    (tensor([0.9000, 0.9000, 0.9000]), [(), (2, 1), (1, 3), ()])
    """
    check_pair("adafactor", "eps", eps)
    least_square, least_size = eps
    bounds = {"eps[0]": 0.0 if least_square is None else least_square, "eps[1]": least_size}
    check_rates("adafactor", lr, weight_decay=weight_decay, **bounds)
    check_numbers("adafactor", AT_LEAST_ONE, d=d)
    check_numbers("adafactor", NOT_POSITIVE, beta2_decay=beta2_decay)
    scaling = scale_by_factored_rms(beta2_decay, least_square, reduction_order=reduction_order)

    def update(grads: Any, state: AdafactorState, params: Any) -> tuple[Any, Any]:
        steps, new_state = scaling.update(grads, state, params)
        rate = torch.as_tensor(read_rate(lr, state.updates), dtype=torch.float64)
        both = take_with_gradient(params, steps), steps
        param_norms, step_norms = stack_norms(both, 2.0, reduction_order).chunk(2)
        # A norm is the root of a mean square times this root. For fills, the host does not wait for an accelerator.
        roots = [param_norms[:0]]
        for leaf in leaves_of(steps):
            if leaf is not None:
                roots.append(param_norms.new_full((1,), max(1, leaf.numel()) ** 0.5))
        root = torch.cat(roots)
        counts = stack_counts(new_state.counts, grads, (param_norms, rate))[:, 0]
        rates = (param_norms / root).clamp(min=least_size) * torch.minimum(rate, counts.rsqrt())
        factors = -rates / (step_norms / (root * d)).clamp(min=1.0)
        (params,) = leafwise(
            make_step(weight_decay), steps, [params], [share_out(factors, steps)], (1 - rate * weight_decay,)
        )
        return params, new_state

    return fs.Optimizer(scaling.init, update)
