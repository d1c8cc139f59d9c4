"""Steps in proportion to the norms of their leaves: scale_by_trust_ratio, lamb and lars."""

from typing import Any

import torch

import fshard as fs
from fshard.ext.optim.leaves import (
    Number,
    Rate,
    make_stateless,
    map_gradients,
    read_rate,
    share_out,
    take_with_gradient,
)
from fshard.ext.optim.native import check_rates
from fshard.ext.optim.norms import stack_norms
from fshard.extend import zero


def scale_by_trust_ratio(
    trust_coefficient: Number = 1.0,
    eps: Number = 0.0,
    *,
    reduction_order: str | None = None,
) -> fs.GradientTransformation:
    """Scale each leaf's gradient to the norm of the leaf, unless one of the two norms is zero.

    Follows optax.scale_by_trust_ratio. The norms span ranks: one collective for each set of axes that some leaf is
    split over. `lamb` and `lars` are built on it.

    Args:
        trust_coefficient: The norm of a scaled gradient, as a multiple of the leaf's norm.
        eps: Added to the norm of the gradient.
        reduction_order: As for `clip_by_global_norm`.

    Returns:
        The transformation; its state is empty.

    Raises:
        ValueError: if a number is out of range; from update, if `reduction_order` is another word.

    >>> import torch, fshard as fs
    >>> tx = fs.scale_by_trust_ratio()
    >>> params, grads = {"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([0.0, 0.01])}
    >>> tx.update(grads, tx.init(params), params)[0]
    {'w': tensor([0., 5.])}
    """
    check_rates("scale_by_trust_ratio", 0.0, trust_coefficient=trust_coefficient, eps=eps)

    def scale(grads: Any, params: Any) -> Any:
        # The norms of parameters and of gradients take one collective together.
        param_norms, grad_norms = stack_norms((take_with_gradient(params, grads), grads), 2.0, reduction_order).chunk(2)
        is_zero = (param_norms == 0) | (grad_norms == 0)
        denominators = torch.where(is_zero, 1.0, grad_norms + eps)
        ratios = torch.where(is_zero, 1.0, trust_coefficient * param_norms / denominators)
        return map_gradients(torch.mul, grads, share_out(ratios, grads))

    return make_stateless(scale)


def lamb(
    lr: Rate,
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: Number = 1e-6,
    *,
    weight_decay: Number = 0.0,
    reduction_order: str | None = None,
) -> fs.Optimizer:
    """Adam whose step for each leaf has the norm of the leaf, times the learning rate.

    Follows You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (2020), and
    optax.lamb. The norms span ranks: one collective for each set of axes that some leaf is split over.

    Args:
        lr: Learning rate: a number, a tensor of shape (), or a schedule of the number of updates made.
        betas: The part that stays of the averages of gradients and of their squares.
        eps: Added to the root of the squares.
        weight_decay: The part of the parameters that is added to Adam's direction.
        reduction_order: As for `clip_by_global_norm`.

    Returns:
        The optimizer.

    Raises:
        ValueError: if a number is out of range, or `reduction_order` is another word; from init, if a leaf is not a
            real floating tensor.

    >>> import torch, fshard as fs
    >>> tx = fs.lamb(0.1)
    >>> params = {"w": torch.tensor([3.0, 4.0])}
    >>> new, _ = tx.update({"w": torch.tensor([1.0, 1.0])}, tx.init(params), params)
    >>> fs.global_norm({"w": new["w"] - params["w"]})  # a tenth of the norm of w
    tensor(0.5000)
    """
    check_rates("lamb", lr, betas, eps=eps, weight_decay=weight_decay)
    trust = scale_by_trust_ratio(reduction_order=reduction_order)
    return fs.chain(fs.scale_by_adam(betas, eps), fs.add_decayed_weights(weight_decay), trust, fs.sgd(lr))


def lars(
    lr: Rate,
    momentum: Number = 0.9,
    *,
    weight_decay: Number = 0.0,
    trust_coefficient: Number = 0.001,
    eps: Number = 0.0,
    reduction_order: str | None = None,
) -> fs.Optimizer:
    """SGD with momentum whose step for each leaf is in proportion to the leaf's norm.

    Follows You et al., "Large Batch Training of Convolutional Networks" (2017), and optax.lars. The norms span ranks:
    one collective for each set of axes that some leaf is split over.

    Args:
        lr: Learning rate: a number, a tensor of shape (), or a schedule of the number of updates made.
        momentum: The part of the last step that stays.
        weight_decay: The part of the parameters that is added to their gradients.
        trust_coefficient: The norm of a step before the learning rate, as a multiple of the leaf's norm.
        eps: Added to the norm of the gradient.
        reduction_order: As for `clip_by_global_norm`.

    Returns:
        The optimizer.

    Raises:
        ValueError: if a number is out of range, or `reduction_order` is another word; from init, if a leaf is not a
            real floating tensor.

    >>> import torch, fshard as fs
    >>> tx = fs.lars(1.0, momentum=0.0, trust_coefficient=0.1)
    >>> params = {"w": torch.tensor([3.0, 4.0])}
    >>> tx.update({"w": torch.tensor([100.0, 0.0])}, tx.init(params), params)[0]  # a step of a tenth of the norm of w
    {'w': tensor([2.5000, 4.0000])}
    """
    check_rates("lars", lr, momentum=momentum, weight_decay=weight_decay, trust_coefficient=trust_coefficient, eps=eps)
    trust = scale_by_trust_ratio(trust_coefficient, eps, reduction_order=reduction_order)

    def scale_by_rate(grads: Any, count: torch.Tensor, params: Any) -> tuple[Any, torch.Tensor]:
        """Multiply gradients by the learning rate, and count updates."""
        return map_gradients(torch.mul, grads, numbers=(read_rate(lr, count),)), count + 1

    rate = fs.GradientTransformation(lambda params: zero(), scale_by_rate)
    return fs.chain(fs.add_decayed_weights(weight_decay), trust, rate, fs.sgd(1.0, momentum))
