"""Gradient transformations that optimizers are made of: Adam's and LAMB's scaling, and decay of weights."""

from typing import Any, NamedTuple

import torch

from fshard.checks import NOT_NEGATIVE, check_numbers
from fshard.optim.leaves import (
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
from fshard.optim.masks import masked
from fshard.optim.norms import leaf_norms
from fshard.optim.schedules import Number, check_rates
from fshard.tree import Added, Mask, Tree, flatten, leaves_of, map_leaves
from fshard.update import GradientTransformation


class AdamState(NamedTuple):
    """State of `scale_by_adam`, and of `adam`, `adamw` and `lamb`.

    Attributes:
        updates: Updates made: an int64 tensor of shape ().
        mean: Running average of the gradients, sharded as they are.
        square: Running average of their squares.
        missed: How many of the updates each leaf had no gradient in: int64 tensors of shape ().
    """

    updates: torch.Tensor
    mean: Tree
    square: Tree
    missed: Tree = Added()


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


def scale_by_trust_ratio(trust_coefficient: Number = 1.0, eps: Number = 0.0) -> GradientTransformation:
    """Scale each leaf's gradient to the length of the leaf, but where either has none.

    Follows optax.scale_by_trust_ratio. The norms span ranks: one collective for each set of axes that some leaf is
    split over. `lamb` and `lars` are made of it.

    Args:
        trust_coefficient: How long a gradient becomes, next to the leaf.
        eps: Added to the norm of the gradient.

    Returns:
        The transformation; its state is empty.

    Raises:
        ValueError: if a number is out of range.
    """
    check_numbers("scale_by_trust_ratio", NOT_NEGATIVE, trust_coefficient=trust_coefficient, eps=eps)

    def trusted(leaf: Any, size: Any, length: Any) -> Any:
        if leaf is None:
            return None
        none = (size == 0) | (length == 0)
        return scaled(leaf, torch.where(none, 1.0, trust_coefficient * size / torch.where(none, 1.0, length + eps)))

    def scale(grads: Tree, params: Tree) -> Tree:
        steps = leaves_of(grads)
        leaves = [None if step is None else leaf for step, leaf in zip(steps, leaves_of(params), strict=True)]
        # Both in one collective.
        norms = leaf_norms([*leaves, *steps])
        return map_leaves(trusted, grads, norms[: len(steps)], norms[len(steps) :])

    return stateless(scale)


def add_decayed_weights(weight_decay: float, mask: Mask | None = None) -> GradientTransformation:
    """Add a multiple of the parameters to their gradients; before an optimizer that is L2 regularisation.

    Follows optax.add_decayed_weights and the weight_decay of torch.optim.SGD and Adam.

    Args:
        weight_decay: The multiple, 0 or more.
        mask: Which leaves decay, as `masked` takes it; None for all.

    Returns:
        The transformation; its state is empty.

    Raises:
        ValueError: if `weight_decay` is negative or not finite; from init, if `mask` matches no leaf.
    """
    check_numbers("add_decayed_weights", NOT_NEGATIVE, weight_decay=weight_decay)
    tx: Any = stateless(
        lambda grads, params: map_gradients(lambda grad, param: grad.add(param, alpha=weight_decay), grads, params)
    )
    return tx if mask is None else masked(tx, mask)
