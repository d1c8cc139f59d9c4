"""Optimizers of our own whose updates are differentiable: sgd, adam and adamw."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fshard._compat import is_transformed
from fshard.checks import FINITE, FRACTION, NOT_NEGATIVE, check_floating, check_numbers
from fshard.optim.leaves import check_real, check_state, joined, leafwise, missing, none_missed, zeros
from fshard.tree import Added, Tree, flatten
from fshard.update import Optimizer

Number = float | torch.Tensor
Rate = Number | Callable[[torch.Tensor], Number]


class SgdState(NamedTuple):
    """State of `sgd`.

    Attributes:
        updates: Updates made: an int64 tensor of shape ().
        momentum: The momentum of each leaf, sharded as it is; None without momentum.
        missed: With momentum, how many of the updates each leaf had no gradient in: int64 tensors of shape ().
    """

    updates: torch.Tensor
    momentum: Tree
    missed: Tree = Added()


def sgd(
    lr: Rate,
    momentum: Number = 0.0,
    *,
    dampening: Number = 0.0,
    weight_decay: Number = 0.0,
    nesterov: bool = False,
) -> Optimizer:
    """Stochastic gradient descent that can itself be differentiated.

    Follows torch.optim.SGD. Nothing is detached and numbers may be tensors: torch.func.grad through an update gives
    gradients with respect to parameters (MAML) and to the learning rate.

    Args:
        lr: Learning rate: a number, a tensor of shape (), or a schedule of the number of updates made.
        momentum: How much of the last step stays.
        dampening: How much of the gradient does not go into the momentum, but for the first one.
        weight_decay: How much of the parameters is added to their gradients.
        nesterov: Whether the gradient is taken where the momentum leads.

    Returns:
        The optimizer.

    Raises:
        ValueError: if a number is out of range, or `nesterov` is asked for without momentum or with dampening.
    """
    check_rates("sgd", lr, momentum=momentum, weight_decay=weight_decay)
    check_numbers("sgd", FINITE, dampening=dampening)
    has_momentum = isinstance(momentum, torch.Tensor) or momentum != 0
    if nesterov and (not has_momentum or isinstance(dampening, torch.Tensor) or dampening != 0):
        raise ValueError("sgd: nesterov needs a momentum above 0 and no dampening")

    def init(params: Tree) -> SgdState:
        check_floating("sgd", flatten(params))
        count = torch.zeros((), dtype=torch.int64)
        return SgdState(count, zeros(params), none_missed(params)) if has_momentum else SgdState(count, None)

    def update(grads: Tree, state: SgdState, params: Tree) -> tuple[Tree, SgdState]:
        check_state("sgd", state, SgdState)
        rate = value_of(lr, state.updates)

        def plain(grad: Any, param: Any, rate: Any, decay: Any) -> tuple[torch.Tensor, ...]:
            return (param - rate * (grad + decay * param),)

        def heavy(
            grad: Any, param: Any, old: Any, missed: Any, rate: Any, decay: Any, momentum: Any, dampening: Any
        ) -> tuple[torch.Tensor, ...]:
            grad = grad + decay * param
            new = torch.where(state.updates == missed, grad, momentum * old + (1 - dampening) * grad)
            return param - rate * (grad + momentum * new if nesterov else new), new

        if has_momentum:
            numbers = (rate, weight_decay, momentum, dampening)
            outs = leafwise(heavy, grads, params, state.momentum, state.missed, numbers=numbers, first=1)
        else:
            outs = leafwise(plain, grads, params, numbers=(rate, weight_decay), first=1)
        new = joined(outs[0], params) if outs else params
        if not has_momentum:
            return new, SgdState(state.updates + 1, None)
        momenta = joined(outs[1], state.momentum) if outs else state.momentum
        return new, SgdState(state.updates + 1, momenta, missing(state.missed, grads))

    return Optimizer(init, update)


class AdamState(NamedTuple):
    """State of `adam` and `adamw`.

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

    @classmethod
    def start(cls, params: Tree) -> "AdamState":
        """The state before the first update."""
        return cls(torch.zeros((), dtype=torch.int64), zeros(params), zeros(params), none_missed(params))

    def after(self, grads: Tree, averages: Sequence[Tree]) -> "AdamState":
        """The state after an update, with new averages where there were gradients, or none at all."""
        old = (self.mean, self.square)
        mean, square = [joined(*pair) for pair in zip(averages, old, strict=True)] if averages else old
        return AdamState(self.updates + 1, mean, square, missing(self.missed, grads))


def adam(
    lr: Rate, betas: tuple[Number, Number] = (0.9, 0.999), eps: Number = 1e-8, *, weight_decay: Number = 0.0
) -> Optimizer:
    """Adam that can itself be differentiated; see `sgd`.

    Follows Kingma and Ba, "Adam: A Method for Stochastic Optimization" (2015), and torch.optim.Adam.

    Args:
        lr: Learning rate: a number, a tensor of shape (), or a schedule of the number of updates made.
        betas: How much stays of the averages of gradients and of their squares.
        eps: What is added to the root of the squares.
        weight_decay: How much of the parameters is added to their gradients.

    Returns:
        The optimizer.

    Raises:
        ValueError: if a number is out of range; from init, if a leaf is no real floating tensor.
    """
    return _adam("adam", lr, betas, eps, weight_decay, decoupled=False)


def adamw(
    lr: Rate, betas: tuple[Number, Number] = (0.9, 0.999), eps: Number = 1e-8, *, weight_decay: Number = 0.01
) -> Optimizer:
    """AdamW that can itself be differentiated; see `sgd`.

    Follows Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), and torch.optim.AdamW.

    Args:
        lr: Learning rate: a number, a tensor of shape (), or a schedule of the number of updates made.
        betas: How much stays of the averages of gradients and of their squares.
        eps: What is added to the root of the squares.
        weight_decay: How much parameters shrink in an update, times the learning rate.

    Returns:
        The optimizer.

    Raises:
        ValueError: if a number is out of range; from init, if a leaf is no real floating tensor.
    """
    return _adam("adamw", lr, betas, eps, weight_decay, decoupled=True)


def _adam(
    what: str, lr: Rate, betas: tuple[Number, Number], eps: Number, weight_decay: Number, *, decoupled: bool
) -> Optimizer:
    check_rates(what, lr, betas, eps=eps, weight_decay=weight_decay)

    def init(params: Tree) -> AdamState:
        check_real(what, flatten(params))
        return AdamState.start(params)

    def update(grads: Tree, state: AdamState, params: Tree) -> tuple[Tree, AdamState]:
        check_state(what, state, AdamState)
        rate = value_of(lr, state.updates)

        def step(
            grad: Any, param: Any, mean: Any, square: Any, missed: Any, rate: Any, decay: Any, *rest: Any
        ) -> tuple[torch.Tensor, ...]:
            if decoupled:
                param = param * (1 - rate * decay)
            else:
                grad = grad + decay * param
            found, *averages = adam_direction(grad, mean, square, state.updates - missed, *rest)
            return param - rate * found, *averages

        numbers = (rate, weight_decay, *betas, eps)
        outs = leafwise(step, grads, params, state.mean, state.square, state.missed, numbers=numbers, first=1)
        return joined(outs[0], params) if outs else params, state.after(grads, outs[1:])

    return Optimizer(init, update)


def check_rates(what: str, lr: Rate, betas: Any = (), **numbers: Number) -> None:
    """Refuse hyperparameters out of the ranges that torch.optim has for them.

    Args:
        what: The optimizer, for its error.
        lr: The learning rate; that of a schedule is checked in each update.
        betas: How much stays of averages, if the optimizer keeps some.
        numbers: Other hyperparameters, 0 or more, by name.

    Raises:
        ValueError: with the name and the value of the first one that is out of range.
    """
    if not callable(lr):
        check_numbers(what, NOT_NEGATIVE, lr=lr)
    if betas != () and not (isinstance(betas, Sequence) and len(betas) == 2 and not isinstance(betas, str)):
        raise ValueError(f"{what}: expected betas to be two numbers, got {betas!r:.40}")
    check_numbers(what, FRACTION, **{f"betas[{i}]": beta for i, beta in enumerate(betas)})
    check_numbers(what, NOT_NEGATIVE, **numbers)


def adam_direction(
    grad: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    updates: torch.Tensor,
    beta1: Number,
    beta2: Number,
    eps: Number,
) -> tuple[torch.Tensor, ...]:
    """What Adam subtracts from a leaf, before the learning rate, and the two averages after it.

    Args:
        grad: The gradient.
        mean: The average of gradients before.
        square: The average of their squares before.
        updates: Updates of the leaf made before.
        beta1: As for `adam`, the first of `betas`.
        beta2: The second.
        eps: As for `adam`.

    Returns:
        The direction, and the averages.
    """
    count = (updates + 1).double()
    bias1, bias2 = 1 - beta1**count, (1 - beta2**count).sqrt()
    mean = mean + (1 - beta1) * (grad - mean)
    square = beta2 * square + (1 - beta2) * grad * grad
    return mean / bias1.to(mean.dtype) / (_root(square) / bias2.to(mean.dtype) + eps), mean, square


def _root(square: torch.Tensor) -> torch.Tensor:
    """The root, with a derivative of zero at zero rather than none."""
    zero = square == 0
    return torch.where(zero, 0, torch.where(zero, 1, square).sqrt())


def value_of(rate: Rate, count: torch.Tensor) -> Any:
    """A learning rate after some updates; a number that is not finite is refused."""
    value = rate(count) if callable(rate) else rate
    # What a transform holds, or a trace, has no value yet; what lies on another device would be waited for.
    if type(value) is torch.Tensor and value.is_cpu and not is_transformed(value):
        known = value.detach().item()
    else:
        known = value if isinstance(value, int | float) else 0.0
    if not math.isfinite(known):
        raise ValueError(
            f"update: expected the learning rate to be a finite number, got {known} after {int(count)} updates"
        )
    return value
