"""Decay of weights as a gradient transformation."""

from typing import Any

from fshard.checks import NOT_NEGATIVE, check_numbers
from fshard.optim.leaves import leafwise
from fshard.optim.masks import masked
from fshard.tree import Mask, Tree
from fshard.update import GradientTransformation


def add_decayed_weights(weight_decay: float, mask: Mask | None = None) -> GradientTransformation:
    """Add a multiple of the parameters to their gradients; before an optimizer that is L2 regularisation.

    Follows optax.add_decayed_weights and the weight_decay of torch.optim.SGD and Adam.

    Args:
        weight_decay: The multiple, 0 or more.
        mask: Which leaves decay, as `masked` takes it; None for all.

    Returns:
        The transformation; its state is empty.

    Raises:
        ValueError: if `weight_decay` is negative or not finite; from init, if `mask` means no leaf.
    """
    check_numbers("add_decayed_weights", NOT_NEGATIVE, weight_decay=weight_decay)

    def update(grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        out = leafwise(lambda grad, param: (grad.add(param, alpha=weight_decay),), grads, params)
        return (out[0] if out else grads), state

    tx: Any = GradientTransformation(lambda params: (), update)
    return tx if mask is None else masked(tx, mask)
