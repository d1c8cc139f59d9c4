"""Adafactor, whose averages of squares are a row and a column of each matrix, exact however leaves are split."""

import math
from typing import Any, NamedTuple

import torch

import fshard as fs
from fshard.ext.optim.parts import Number, Rate, check_sums, rate_of
from fshard.extend import check_rates, describe, expect, flatten, leaf_means, leafwise


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
    beta2_decay: float = -0.8, eps: float | None = None, *, sums: str | None = None
) -> fs.GradientTransformation:
    """Divide gradients by the root of their mean square, of which a matrix keeps one row and one column.

    Follows optax.scale_by_factored_rms, and is exact however leaves are split: means over dims that are split take one
    collective for each set of axes; none carries a matrix. `adafactor` is made of it.

    Args:
        beta2_decay: The power of the number of updates that new squares are weighed by.
        eps: The least mean square, by default the dtype's epsilon.
        sums: "tree" takes means in float64, of exact sums; see `clip_by_global_norm`.

    Returns:
        The transformation; its state keeps the parameters' specs, as far as rows and columns have them.

    Raises:
        ValueError: if a number is out of range, or `sums` is another word; from init, if a leaf is no real floating
            tensor.

    >>> import torch, fshard as fs
    >>> tx = fs.scale_by_factored_rms()
    >>> grads = {"w": torch.tensor([[1.0, 2.0], [10.0, 20.0]])}  # its squares are a column times a row
    >>> tx.update(grads, tx.init(grads), grads)[0]
    {'w': tensor([[1., 1.],
            [1., 1.]])}
    """
    check_sums("scale_by_factored_rms", sums)
    _check("scale_by_factored_rms", beta2_decay, **{} if eps is None else {"eps": eps})

    def init(params: Any) -> AdafactorState:
        rows = [
            _begun(leaf) if _is_trained(leaf) else (None, None, None) for leaf in _real("scale_by_factored_rms", params)
        ]
        return AdafactorState(torch.zeros((), dtype=torch.int64), *_trees(params, rows))

    def update(grads: Any, state: AdafactorState, params: Any) -> tuple[Any, AdafactorState]:
        _check_state("scale_by_factored_rms", state)
        flat, leaves = flatten(grads), flatten(params).leaves
        kept = [list(row) for row in zip(*(flatten(tree).leaves for tree in state[1:]), strict=True)]
        steps, chosen = list(flat.leaves), [i for i, grad in enumerate(flat.leaves) if grad is not None]
        for i in chosen:
            # A leaf that was frozen until now begins here.
            row, column, count = kept[i] if kept[i][2] is not None else _begun(leaves[i])
            kept[i] = [row, column, count + 1]
        weights = {i: kept[i][2].double() ** beta2_decay for i in chosen}
        squares = {i: _tensor(steps[i]) * _tensor(steps[i]) for i in chosen}
        matrices = [i for i in chosen if _tensor(steps[i]).dim() > 1]
        for place, dim in enumerate((-1, -2)):
            means = leaf_means([leaves[i] for i in matrices], [squares[i] for i in matrices], dim, sums)
            for i, mean in zip(matrices, means, strict=True):
                kept[i][place] = _towards(kept[i][place], mean, weights[i])
        for i in chosen:
            if i not in matrices:
                kept[i][0] = _towards(kept[i][0], squares[i], weights[i])
        rows = [_tensor(kept[i][0]) for i in matrices]
        sizes = dict(zip(matrices, leaf_means([leaves[i] for i in matrices], rows, -2, sums), strict=True))
        for i in chosen:
            grad, variance = _tensor(steps[i]), _tensor(kept[i][0])
            least = torch.finfo(grad.dtype).eps if eps is None else eps
            if i in sizes:
                variance = variance * _tensor(kept[i][1]) / sizes[i].clamp(min=least)
            variance = variance.clamp(min=least * least)
            # Half precision rounds the root before its inverse in the last few elements of a shard alone.
            factor = variance.rsqrt() if sums is None else variance.double().rsqrt().to(variance.dtype)
            steps[i] = _like(steps[i], factor * grad)
        return flat.unflatten(steps), AdafactorState(state.updates + 1, *_trees(params, kept))

    return fs.GradientTransformation(init, update)


def adafactor(
    lr: Rate = 1e-2,
    beta2_decay: float = -0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    d: float = 1.0,
    *,
    weight_decay: Number = 0.0,
    sums: str | None = None,
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
        sums: As for `clip_by_global_norm`, of means and norms.

    Returns:
        The optimizer.

    Raises:
        ValueError: if a number is out of range, or `sums` is another word; from init, if a leaf is no real floating
            tensor.

    >>> import torch, fshard as fs
    >>> tx = fs.adafactor(0.1)
    >>> params = {"w": torch.ones(2, 3)}
    >>> new, state = tx.update({"w": torch.ones(2, 3)}, tx.init(params), params)
    >>> new["w"][0], [tuple(leaf.shape) for leaf in fs.tree_leaves(state)]  # a row and a column
    (tensor([0.9000, 0.9000, 0.9000]), [(), (2, 1), (1, 3), ()])
    """
    check_sums("adafactor", sums)
    check_rates("adafactor", lr, weight_decay=weight_decay)
    pair = isinstance(eps, list | tuple) and len(eps) == 2
    expect(pair, "adafactor", "eps to be two numbers", f"{eps!r:.40}")
    expect(
        isinstance(d, int | float) and 1 <= d < math.inf,
        "adafactor",
        "d to be a finite number, 1 or more",
        f"{d!r:.40}",
    )
    _check("adafactor", beta2_decay, **{f"eps[{i}]": x for i, x in enumerate(eps) if i or x is not None})
    scaling = scale_by_factored_rms(beta2_decay, eps[0], sums=sums)

    def update(grads: Any, state: AdafactorState, params: Any) -> tuple[Any, Any]:
        _check_state("adafactor", state)
        rate = torch.as_tensor(rate_of(lr, state.updates), dtype=torch.float64)
        steps, after = scaling.update(grads, state, params)

        def moved(step: Any, param: Any, size: Any, length: Any, root: Any, count: Any, rate: Any, decay: Any) -> Any:
            length_of_step = (size / root).clamp(min=eps[1]) * torch.minimum(rate, count.double() ** -0.5)
            factor = length_of_step / (length / (root * d)).clamp(min=1.0)
            return (param * (1 - rate * decay).to(param.dtype) - step * factor.to(step.dtype),)

        flat = flatten(params)
        roots = flat.unflatten([torch.tensor(n**0.5, dtype=torch.float64) for n in map(_numel, flat.leaves)])
        given = [*fs.leaf_norms((params, steps), sums=sums), roots, after.counts]
        (params,) = leafwise(moved, steps, [params], given, (rate, weight_decay))
        return params, after

    def init(params: Any) -> AdafactorState:
        _real("adafactor", params)
        return scaling.init(params)

    return fs.Optimizer(init, update)


def _check(what: str, beta2_decay: float, **eps: float | None) -> None:
    known = isinstance(beta2_decay, int | float) and beta2_decay <= 0
    expect(known, what, "beta2_decay to be a number, 0 or less", f"{beta2_decay!r:.40}")
    check_rates(what, 0.0, **eps)  # type: ignore[arg-type]


def _check_state(what: str, state: Any) -> None:
    remedy = "update with the optimizer that made the state"
    expect(isinstance(state, AdafactorState), what, "a state of class AdafactorState", describe(state), remedy)


def _real(what: str, params: Any) -> list[Any]:
    """Return the leaves, none of which that takes a gradient may be complex or of whole numbers."""
    leaves: list[Any] = flatten(params).leaves
    for leaf in filter(_is_trained, leaves):
        expect(_tensor(leaf).is_floating_point(), what, "real floating leaves", describe(_tensor(leaf)))
    return leaves


def _is_trained(leaf: Any) -> bool:
    return leaf is not None and not (isinstance(leaf, fs.Sharded) and leaf.spec.frozen)


def _tensor(leaf: Any) -> Any:
    return leaf.local if isinstance(leaf, fs.Sharded) else leaf


def _like(leaf: Any, tensor: torch.Tensor) -> Any:
    return fs.Sharded(tensor, leaf.spec) if isinstance(leaf, fs.Sharded) else tensor


def _numel(leaf: Any) -> int:
    shape = () if leaf is None else leaf.spec.shape if isinstance(leaf, fs.Sharded) else leaf.shape
    return max(1, math.prod(shape))


def _begun(leaf: Any) -> tuple[Any, Any, torch.Tensor]:
    """Make the averages of a leaf before its first update, and its count."""
    count = torch.zeros((), dtype=torch.int64)
    if _tensor(leaf).dim() < 2:
        return _like(leaf, torch.zeros_like(_tensor(leaf), requires_grad=False)), None, count
    return _mean_of(leaf, -1), _mean_of(leaf, -2), count


def _mean_of(leaf: Any, dim: int) -> Any:
    tensor = _tensor(leaf)
    place = tensor.dim() + dim
    zeros = tensor.new_zeros([1 if k == place else size for k, size in enumerate(tensor.shape)])
    return fs.Sharded(zeros, leaf.spec.reduced([place])) if isinstance(leaf, fs.Sharded) else zeros


def _trees(params: Any, kept: Any) -> tuple[Any, ...]:
    flat = flatten(params)
    return tuple(flat.unflatten(list(leaves)) for leaves in zip(*kept, strict=True)) or ((), (), ())


def _towards(old: Any, new: torch.Tensor, weight: torch.Tensor) -> Any:
    return _like(old, _tensor(old) + weight.to(new.dtype) * (new - _tensor(old)))
