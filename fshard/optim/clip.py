"""Clipping: by the norm of all gradients, by each one's own, and by value."""

from typing import Any

import torch

from fshard.checks import NOT_NEGATIVE, POSITIVE, check_numbers
from fshard.optim.leaves import leafwise, partition_axes, varying
from fshard.optim.norms import global_norm, leaf_norms
from fshard.tree import Tree, flatten, tree_map, unflatten
from fshard.update import GradientTransformation


def clip_by_global_norm(max_norm: float, p: float = 2.0) -> GradientTransformation:
    """Scale gradients down so that the norm of all of them together is at most `max_norm`.

    What torch.nn.utils.clip_grad_norm_ does to full gradients, with the norm taken in float64: each element counts
    once, however many ranks store it, and padding does not count. Costs one collective of a single number over each
    axis that gradients are split over, for each set of axes that some leaf is split over.

    Args:
        max_norm: The largest norm to let through, 0 or more.
        p: The order of the norm, above 0; float("inf") for the largest magnitude.

    Returns:
        The transformation; its state is empty.

    Raises:
        ValueError: if `max_norm` is negative or not finite, or `p` is not positive.
    """
    _check_norm("clip_by_global_norm", max_norm, p)

    def update(grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        # torch.nn.utils.clip_grad_norm_ adds the same 1e-6, and multiplies by 1 where nothing is to be clipped.
        scale = (max_norm / (global_norm(grads, p) + 1e-6)).clamp(max=1.0)
        flat = flatten(grads)
        # The scale agrees between ranks; each rank's shards use it on their own, so its cotangents need a sum.
        scales = {axes: varying(scale, axes) for axes in dict.fromkeys(map(partition_axes, flat.leaves))}
        return unflatten(flat.treedef, [_scaled(leaf, scales[partition_axes(leaf)]) for leaf in flat.leaves]), state

    return GradientTransformation(lambda params: (), update)


def clip_by_norm(max_norm: float, p: float = 2.0) -> GradientTransformation:
    """Scale each leaf's gradient down so that its own norm is at most `max_norm`; see `clip_by_global_norm`.

    What torch.nn.utils.clip_grad_norm_ does when it is called for each parameter by itself. Costs one collective for
    each set of axes that some leaf is split over, of one number for each leaf.

    Args:
        max_norm: The largest norm to let through, 0 or more.
        p: The order of the norm, above 0; float("inf") for the largest magnitude.

    Returns:
        The transformation; its state is empty.

    Raises:
        ValueError: if `max_norm` is negative or not finite, or `p` is not positive.
    """
    _check_norm("clip_by_norm", max_norm, p)

    def update(grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        flat = flatten(grads)
        leaves = list(flat.leaves)
        for i, norm in enumerate(leaf_norms(grads, p)):
            if norm is not None:
                scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
                leaves[i] = _scaled(leaves[i], varying(scale, partition_axes(leaves[i])))
        return unflatten(flat.treedef, leaves), state

    return GradientTransformation(lambda params: (), update)


def clip_by_value(max_value: float) -> GradientTransformation:
    """Clamp each element of a gradient between -max_value and max_value.

    Follows torch.nn.utils.clip_grad_value_.

    Args:
        max_value: The largest magnitude to let through, 0 or more.

    Returns:
        The transformation; its state is empty.

    Raises:
        ValueError: if `max_value` is negative or not finite.
    """
    check_numbers("clip_by_value", NOT_NEGATIVE, max_value=max_value)

    def update(grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        out = leafwise(lambda grad: (grad.clamp(-max_value, max_value),), grads)
        return (out[0] if out else grads), state

    return GradientTransformation(lambda params: (), update)


def _check_norm(what: str, max_norm: float, p: float) -> None:
    check_numbers(what, NOT_NEGATIVE, max_norm=max_norm)
    check_numbers(what, POSITIVE, p=p)


def _scaled(leaf: Any, scale: torch.Tensor) -> Any:
    return tree_map(lambda grad: grad * scale.to(grad.dtype), leaf)
