"""Optimizers of our own whose updates are differentiable: sgd, adam and adamw."""

from collections.abc import Callable, Sequence
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
    stateless,
    zeros,
)
from fshard.optim.rates import Number, Rate, check_rates, value_of
from fshard.optim.scale import (
    AdamState,
    scale_by_adam,
)
from fshard.tree import (
    Flat,
    Tree,
    flatten,
    like,
    map_leaves,
    tensor_of,
)
from fshard.tree.checks import FINITE, check_floating, check_numbers
from fshard.update import GradientTransformation, Optimizer


class SgdState(NamedTuple):
    """State of `sgd`.

    Attributes:
        updates: Updates made: an int64 tensor of shape ().
        momentum: The momentum of each leaf, sharded as it is; () without momentum.
        missed: With momentum, how many of the updates each leaf had no gradient in: int64 tensors of shape ().
    """

    updates: torch.Tensor
    momentum: Tree
    missed: Tree = ()


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

    >>> import torch, fshard as fs
    >>> tx = fs.sgd(0.1, momentum=0.9)
    >>> params, grads = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([1.0, -1.0])}
    >>> params, state = tx.update(grads, tx.init(params), params)
    >>> params
    {'w': tensor([0.9000, 2.1000])}
    >>> tx.update(grads, state, params)[0]
    {'w': tensor([0.7100, 2.2900])}
    """
    check_rates("sgd", lr, momentum=momentum, weight_decay=weight_decay)
    check_numbers("sgd", FINITE, dampening=dampening)
    has_momentum = isinstance(momentum, torch.Tensor) or momentum != 0
    if nesterov and (not has_momentum or isinstance(dampening, torch.Tensor) or dampening != 0):
        raise ValueError("sgd: nesterov needs a momentum above 0 and no dampening")

    def init(params: Tree) -> SgdState:
        count = torch.zeros((), dtype=torch.int64)
        return SgdState(count, zeros(params), none_missed(params)) if has_momentum else SgdState(count, ())

    def scale(grads: Tree, state: SgdState, params: Tree) -> tuple[Tree, SgdState]:
        def heavy(
            grad: Any, _: Any, old: Any, missed: Any, momentum: Any, dampening: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            new = torch.where(state.updates == missed, grad, momentum * old + (1 - dampening) * grad)
            return grad + momentum * new if nesterov else new, new

        if not has_momentum:
            return grads, SgdState(state.updates + 1, ())
        state = begun(state, grads, lambda: {"momentum": zeros(params)})
        old, numbers = (grads, state.momentum), (momentum, dampening)
        grads, kept = leafwise(heavy, grads, old, [state.missed], numbers)
        return grads, SgdState(state.updates + 1, kept, missing(state.missed, grads))

    scaling = GradientTransformation(init, scale)
    return _descent("sgd", lr, scaling, SgdState, before=[_decayed(weight_decay)], check=check_floating)


def adam(
    lr: Rate, betas: tuple[Number, Number] = (0.9, 0.999), eps: Number = 1e-8, *, weight_decay: Number = 0.0
) -> Optimizer:
    """Adam that can itself be differentiated; see `sgd`.

    Follows Kingma and Ba, "Adam: A Method for Stochastic Optimization" (2015), and torch.optim.Adam.

    Args:
        lr: Learning rate: a number, a tensor of shape (), or a schedule of the number of updates made.
        betas: How much stays of the averages of gradients and of their squares.
        eps: Added to the root of the squares.
        weight_decay: How much of the parameters is added to their gradients.

    Returns:
        The optimizer.

    Raises:
        ValueError: if a number is out of range; from init, if a leaf is no real floating tensor.

    >>> import torch, fshard as fs
    >>> tx = fs.adam(0.1)  # whose first step has the learning rate's size, whatever the gradient's
    >>> params = {"w": torch.tensor([1.0, 2.0])}
    >>> tx.update({"w": torch.tensor([5.0, -0.01])}, tx.init(params), params)[0]
    {'w': tensor([0.9000, 2.1000])}
    """
    check_rates("adam", lr, betas, eps=eps, weight_decay=weight_decay)
    return _descent("adam", lr, scale_by_adam(betas, eps), AdamState, before=[_decayed(weight_decay)])


def adamw(
    lr: Rate, betas: tuple[Number, Number] = (0.9, 0.999), eps: Number = 1e-8, *, weight_decay: Number = 0.01
) -> Optimizer:
    """AdamW that can itself be differentiated; see `sgd`.

    Follows Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), and torch.optim.AdamW.

    Args:
        lr: Learning rate: a number, a tensor of shape (), or a schedule of the number of updates made.
        betas: How much stays of the averages of gradients and of their squares.
        eps: Added to the root of the squares.
        weight_decay: How much parameters shrink in an update, times the learning rate.

    Returns:
        The optimizer.

    Raises:
        ValueError: if a number is out of range; from init, if a leaf is no real floating tensor.

    >>> import torch, fshard as fs
    >>> tx = fs.adamw(0.1, weight_decay=0.5)
    >>> params = {"w": torch.tensor([1.0, 2.0])}
    >>> tx.update({"w": torch.zeros(2)}, tx.init(params), params)[0]  # shrinks by 0.1 * 0.5
    {'w': tensor([0.9500, 1.9000])}
    """
    check_rates("adamw", lr, betas, eps=eps, weight_decay=weight_decay)
    return _descent("adamw", lr, scale_by_adam(betas, eps), AdamState, decay=weight_decay)


def _decayed(decay: Number) -> GradientTransformation:
    """Add a multiple of the parameters, which may be a tensor; `add_decayed_weights` rounds in another way."""
    return stateless(
        lambda grads, params: map_gradients(
            lambda grad, param, decay: grad + decay * param, grads, params, numbers=(decay,)
        )
    )


def _descent(
    what: str,
    lr: Rate | None,
    scaling: GradientTransformation,
    kept: type,
    *,
    before: Sequence[GradientTransformation] = (),
    after: Sequence[GradientTransformation] = (),
    decay: Number | None = None,
    check: Callable[[str, Flat], None] = check_real,
) -> Optimizer:
    """Chain transformations to an optimizer, which subtracts from the parameters the gradients that come out of them.

    Args:
        what: The optimizer, for errors.
        lr: Learning rate that the gradients are multiplied by; None leaves them as they are.
        scaling: The one transformation with a state, which is the optimizer's.
        kept: The class of that state.
        before: The transformations before it, which have none.
        after: The transformations behind it, which have none.
        decay: How much parameters shrink, times the learning rate.
        check: Refuses leaves that the optimizer cannot step.
    """

    def init(params: Tree) -> Tree:
        check(what, flatten(params))
        return scaling.init(params)

    def update(grads: Tree, state: Any, params: Tree) -> tuple[Tree, Tree]:
        check_state(what, state, kept)
        rate = None if lr is None else value_of(lr, state.updates)

        def step(grad: Any, param: Any, rate: Any, decay: Any) -> tuple[torch.Tensor, ...]:
            if decay is not None:
                param = param * (1 - rate * decay)
            return (param - (grad if rate is None else rate * grad),)

        grads = map_leaves(_promoted, grads, params)
        for part in before:
            grads, _ = part.update(grads, (), params)
        grads, state = scaling.update(grads, state, params)
        for part in after:
            grads, _ = part.update(grads, (), params)
        (params,) = leafwise(step, grads, [params], numbers=(rate, decay))
        return params, state

    return Optimizer(init, update)


def _promoted(grad: Any, param: Any) -> Any:
    """Compute in the wider dtype of a gradient and its parameter."""
    if grad is None:
        return None
    return like(grad, tensor_of(grad).to(torch.promote_types(tensor_of(grad).dtype, tensor_of(param).dtype)))
