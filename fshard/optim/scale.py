"""Gradient transformations: clipping, decay of weights, and the scaling of Adam, LAMB and Adafactor."""

from typing import Any, NamedTuple

import torch

from fshard.optim.leaves import (
    begun,
    check_real,
    check_state,
    leafwise,
    map_gradients,
    missing,
    none_missed,
    scaled,
    stateless,
    zeros,
)
from fshard.optim.norms import check_order, global_norm, norms_of
from fshard.optim.rates import Number, check_rates
from fshard.optim.wrappers import masked
from fshard.tree import (
    Mask,
    Tree,
    flatten,
    map_leaves,
)
from fshard.tree.checks import NOT_NEGATIVE, check_flags, check_numbers, check_sums
from fshard.update import GradientTransformation


class ClipState(NamedTuple):
    """State of `clip_by_global_norm` with keep_norm=True.

    Attributes:
        norm: Of the last gradients, before they were scaled: a float64 tensor of shape (), 0 before the first update.
    """

    norm: torch.Tensor


def clip_by_global_norm(
    max_norm: float, p: float = 2.0, *, sums: str | None = None, keep_norm: bool = False
) -> GradientTransformation:
    """Scale gradients down so that the norm of all of them together is at most `max_norm`.

    Follows torch.nn.utils.clip_grad_norm_ on full gradients, with the norm taken in float64: each element counts
    once, however many ranks store it, and padding does not count. Costs one collective of a single number over each
    axis that gradients are split over, for each set of axes that some leaf is split over; with sums="tree" two, of four
    numbers for each leaf.

    Args:
        max_norm: The largest norm to let through, 0 or more.
        p: The order of the norm, above 0; float("inf") for the largest magnitude.
        sums: "tree" adds up exactly, so that the norm has the same bits at any world size, under any strategy and in
            every precision. `p` is then 2 or inf, and the norm has no derivative.
        keep_norm: Whether the state holds the norm, for logging.

    Returns:
        The transformation; its state is empty, or a ClipState.

    Raises:
        ValueError: if `max_norm` is negative or not finite, `p` is not positive, or `sums` is another word.

    >>> import torch, fshard as fs
    >>> tx = fs.clip_by_global_norm(1.0, keep_norm=True)
    >>> grads = {"w": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    >>> clipped, state = tx.update(grads, tx.init(grads), grads)
    >>> clipped, state.norm
    ({'w': tensor([0.6000]), 'b': tensor([0.8000])}, tensor(5., dtype=torch.float64))
    """
    check_numbers("clip_by_global_norm", NOT_NEGATIVE, max_norm=max_norm)
    check_order("clip_by_global_norm", p, sums)
    check_flags("clip_by_global_norm", keep_norm=keep_norm)

    def init(params: Tree) -> Tree:
        return ClipState(torch.zeros((), dtype=torch.float64)) if keep_norm else ()

    def update(grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        norm = global_norm(grads, p, sums=sums)
        # torch.nn.utils.clip_grad_norm_ adds the same 1e-6, and multiplies by 1 where nothing is to be clipped.
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        clipped = map_gradients(lambda grad, scale: grad * scale.to(grad.dtype), grads, numbers=(scale,))
        return clipped, ClipState(norm.double()) if keep_norm else state

    return GradientTransformation(init, update)


def clip_by_norm(max_norm: float, p: float = 2.0, *, sums: str | None = None) -> GradientTransformation:
    """Scale each leaf's gradient down so that its own norm is at most `max_norm`; see `clip_by_global_norm`.

    Follows torch.nn.utils.clip_grad_norm_, called for each parameter by itself. Costs one collective for
    each set of axes that some leaf is split over, of one number for each leaf.

    Args:
        max_norm: The largest norm to let through, 0 or more.
        p: The order of the norm, above 0; float("inf") for the largest magnitude.
        sums: As for `clip_by_global_norm`.

    Returns:
        The transformation; its state is empty.

    Raises:
        ValueError: if `max_norm` is negative or not finite, `p` is not positive, or `sums` is another word.

    >>> import torch, fshard as fs
    >>> tx = fs.clip_by_norm(1.0)
    >>> grads = {"w": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.5])}
    >>> tx.update(grads, tx.init(grads), grads)[0]
    {'w': tensor([0.6000, 0.8000]), 'b': tensor([0.5000])}
    """
    check_numbers("clip_by_norm", NOT_NEGATIVE, max_norm=max_norm)
    check_order("clip_by_norm", p, sums)

    def clip(leaf: Any, norm: Any) -> Any:
        return leaf if norm is None else scaled(leaf, (max_norm / (norm + 1e-6)).clamp(max=1.0))

    return stateless(lambda grads, params: map_leaves(clip, grads, norms_of(grads, p, sums)))


def clip_by_value(max_value: float) -> GradientTransformation:
    """Clamp each element of a gradient between -max_value and max_value.

    Follows torch.nn.utils.clip_grad_value_.

    Args:
        max_value: The largest magnitude to let through, 0 or more.

    Returns:
        The transformation; its state is empty.

    Raises:
        ValueError: if `max_value` is negative or not finite.

    >>> import torch, fshard as fs
    >>> tx = fs.clip_by_value(1.0)
    >>> grads = {"w": torch.tensor([3.0, -4.0, 0.5])}
    >>> tx.update(grads, tx.init(grads), grads)[0]
    {'w': tensor([ 1.0000, -1.0000,  0.5000])}
    """
    check_numbers("clip_by_value", NOT_NEGATIVE, max_value=max_value)
    return stateless(lambda grads, params: map_gradients(lambda grad: grad.clamp(-max_value, max_value), grads))


class AdamState(NamedTuple):
    """State of `scale_by_adam`, and of `adam` and `adamw`.

    Attributes:
        updates: Updates made: an int64 tensor of shape ().
        mean: Running average of the gradients, sharded as they are.
        square: Running average of their squares.
        missed: How many of the updates each leaf had no gradient in: int64 tensors of shape ().
    """

    updates: torch.Tensor
    mean: Tree
    square: Tree
    missed: Tree = ()


def scale_by_adam(betas: tuple[Number, Number] = (0.9, 0.999), eps: Number = 1e-8) -> GradientTransformation:
    """Replace gradients by Adam's direction: their average over the root of the average of their squares.

    Follows optax.scale_by_adam. `adam`, `adamw` and `lamb` are made of it.

    Args:
        betas: How much stays of the averages of gradients and of their squares.
        eps: Added to the root of the squares.

    Returns:
        The transformation; its state keeps the parameters' specs.

    Raises:
        ValueError: if a number is out of range; from init, if a leaf is no real floating tensor.

    >>> import fshard as fs
    >>> tx = fs.chain(scale_by_adam(), fs.sgd(0.1))
    >>> tx.update({"w": torch.ones(2)}, tx.init({"w": torch.ones(2)}), {"w": torch.ones(2)})[0]
    {'w': tensor([0.9000, 0.9000])}
    """
    check_rates("scale_by_adam", 0.0, betas, eps=eps)

    def init(params: Tree) -> AdamState:
        check_real("scale_by_adam", flatten(params))
        return AdamState(torch.zeros((), dtype=torch.int64), zeros(params), zeros(params), none_missed(params))

    def update(grads: Tree, state: AdamState, params: Tree) -> tuple[Tree, AdamState]:
        check_state("scale_by_adam", state, AdamState)
        state = begun(state, grads, lambda: {"mean": zeros(params), "square": zeros(params)})

        def direction(
            grad: Any, _: Any, mean: Any, square: Any, missed: Any, beta1: Any, beta2: Any, eps: Any
        ) -> tuple[torch.Tensor, ...]:
            count = (state.updates - missed + 1).double()
            bias1, bias2 = 1 - beta1**count, (1 - beta2**count).sqrt()
            mean = mean + (1 - beta1) * (grad - mean)
            square = beta2 * square + (1 - beta2) * grad * grad
            return mean / bias1.to(mean.dtype) / (_root(square) / bias2.to(mean.dtype) + eps), mean, square

        old, numbers = (grads, state.mean, state.square), (*betas, eps)
        grads, mean, square = leafwise(direction, grads, old, [state.missed], numbers)
        return grads, AdamState(state.updates + 1, mean, square, missing(state.missed, grads))

    return GradientTransformation(init, update)


def _root(square: torch.Tensor) -> torch.Tensor:
    """Take the root, with a derivative of zero at zero rather than none."""
    zero = square == 0
    return torch.where(zero, 0, torch.where(zero, 1, square).sqrt())


def add_decayed_weights(
    weight_decay: float, mask: Mask | None = None, *, sums: str | None = None
) -> GradientTransformation:
    """Add a multiple of the parameters to their gradients; before an optimizer that is L2 regularisation.

    Follows optax.add_decayed_weights and the weight_decay of torch.optim.SGD and Adam.

    Args:
        weight_decay: The multiple, 0 or more.
        mask: Which leaves decay, as `masked` takes it; None for all.
        sums: "tree" rounds the multiple before it is added: kernels of half precision do so only for the last few
            elements of a shard, whose bits would depend on the world size.

    Returns:
        The transformation; its state is empty.

    Raises:
        ValueError: if `weight_decay` is negative or not finite, or `sums` is another word; from init, if `mask` matches
            no leaf.

    >>> import torch, fshard as fs
    >>> tx = fs.add_decayed_weights(0.5, mask="*weight")
    >>> params = {"weight": torch.ones(2), "bias": torch.ones(1)}
    >>> grads = {"weight": torch.zeros(2), "bias": torch.zeros(1)}
    >>> tx.update(grads, tx.init(params), params)[0]
    {'weight': tensor([0.5000, 0.5000]), 'bias': tensor([0.])}
    """
    check_sums("add_decayed_weights", sums)
    check_numbers("add_decayed_weights", NOT_NEGATIVE, weight_decay=weight_decay)

    def decayed(grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        return grad.add(param, alpha=weight_decay) if sums is None else grad + param * weight_decay

    tx: Any = stateless(lambda grads, params: map_gradients(decayed, grads, params))
    return tx if mask is None else masked(tx, mask)
