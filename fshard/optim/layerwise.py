"""Optimizers that scale each leaf's step by its norm: lamb and lars, exact however leaves are split."""

from typing import Any, NamedTuple

import torch

from fshard.optim.leaves import check_real, check_state, joined, leafwise, partition_axes, varying, zeros
from fshard.optim.native import AdamState, Number, Rate, adam_direction, check_rates, value_of
from fshard.optim.norms import leaf_norms
from fshard.tree import Tree, flatten, tree_map, unflatten
from fshard.update import Optimizer


def lamb(
    lr: Rate,
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: Number = 1e-6,
    *,
    weight_decay: Number = 0.0,
) -> Optimizer:
    """Adam whose step for each leaf is as long as the leaf, times the learning rate.

    Follows You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (2020), and
    optax.lamb. The norms span ranks: one collective for each set of axes that some leaf is split over.

    Args:
        lr: Learning rate: a number, a tensor of shape (), or a schedule of the number of updates made.
        betas: How much stays of the averages of gradients and of their squares.
        eps: What is added to the root of the squares.
        weight_decay: How much of the parameters is added to Adam's direction.

    Returns:
        The optimizer.

    Raises:
        ValueError: if a number is out of range; from init, if a leaf is no real floating tensor.
    """
    check_rates("lamb", lr, betas, eps=eps, weight_decay=weight_decay)

    def init(params: Tree) -> AdamState:
        check_real("lamb", flatten(params))
        return AdamState.start(params)

    def update(grads: Tree, state: AdamState, params: Tree) -> tuple[Tree, AdamState]:
        check_state("lamb", state, AdamState)
        rate = value_of(lr, state.updates)

        def step(
            grad: Any, param: Any, mean: Any, square: Any, missed: Any, decay: Any, *rest: Any
        ) -> tuple[torch.Tensor, ...]:
            found, *averages = adam_direction(grad, mean, square, state.updates - missed, *rest)
            return found + decay * param, *averages

        numbers = (weight_decay, *betas, eps)
        outs = leafwise(step, grads, params, state.mean, state.square, state.missed, numbers=numbers, first=1)
        if not outs:
            return params, state.after(grads, ())
        steps = _trusted(outs[0], params, 1.0, 0.0)
        new = leafwise(lambda step, param, rate: (param - rate * step,), steps, params, numbers=(rate,), first=1)
        return joined(new[0], params), state.after(grads, outs[1:])

    return Optimizer(init, update)


class LarsState(NamedTuple):
    """State of `lars`.

    Attributes:
        updates: Updates made: an int64 tensor of shape ().
        momentum: The momentum of each leaf, sharded as it is.
    """

    updates: torch.Tensor
    momentum: Tree


def lars(
    lr: Rate,
    momentum: Number = 0.9,
    *,
    weight_decay: Number = 0.0,
    trust_coefficient: Number = 0.001,
    eps: Number = 0.0,
) -> Optimizer:
    """SGD with momentum whose step for each leaf is in proportion to the leaf's norm.

    Follows You et al., "Large Batch Training of Convolutional Networks" (2017), and optax.lars. The norms span ranks:
    one collective for each set of axes that some leaf is split over.

    Args:
        lr: Learning rate: a number, a tensor of shape (), or a schedule of the number of updates made.
        momentum: How much of the last step stays.
        weight_decay: How much of the parameters is added to their gradients.
        trust_coefficient: How long a step is, next to the leaf.
        eps: What is added to the norm of the gradient.

    Returns:
        The optimizer.

    Raises:
        ValueError: if a number is out of range; from init, if a leaf is no real floating tensor.
    """
    check_rates("lars", lr, momentum=momentum, weight_decay=weight_decay, trust_coefficient=trust_coefficient, eps=eps)

    def init(params: Tree) -> LarsState:
        check_real("lars", flatten(params))
        return LarsState(torch.zeros((), dtype=torch.int64), zeros(params))

    def update(grads: Tree, state: LarsState, params: Tree) -> tuple[Tree, LarsState]:
        check_state("lars", state, LarsState)
        rate = value_of(lr, state.updates)
        decayed = leafwise(lambda grad, param, decay: (grad + decay * param,), grads, params, numbers=(weight_decay,))
        if not decayed:
            return params, state._replace(updates=state.updates + 1)

        def step(grad: Any, param: Any, old: Any, rate: Any, momentum: Any) -> tuple[torch.Tensor, ...]:
            heavy = rate * grad + momentum * old
            return param - heavy, heavy

        trusted = _trusted(decayed[0], params, trust_coefficient, eps)
        outs = leafwise(step, trusted, params, state.momentum, numbers=(rate, momentum), first=1)
        return joined(outs[0], params), LarsState(state.updates + 1, joined(outs[1], state.momentum))

    return Optimizer(init, update)


def _trusted(steps: Tree, params: Tree, coefficient: Number, eps: Number) -> Tree:
    """Scale each leaf's step to the length of the leaf, but where either has none."""
    flat = flatten(steps)
    count = len(flat.leaves)
    pairs = [b if a is not None else None for a, b in zip(flat.leaves, flatten(params).leaves, strict=True)]
    # Both in one collective.
    norms = leaf_norms([*pairs, *flat.leaves])
    leaves: list[Any] = list(flat.leaves)
    for i, leaf in enumerate(flat.leaves):
        size, length = norms[i], norms[count + i]
        if size is None or length is None:
            continue
        none = (size == 0) | (length == 0)
        trust = torch.where(none, 1.0, coefficient * size / torch.where(none, 1.0, length + eps))
        trust = varying(trust, partition_axes(leaf))
        leaves[i] = tree_map(lambda step, trust=trust: step * trust.to(step.dtype), leaf)
    return unflatten(flat.treedef, leaves)
