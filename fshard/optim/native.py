"""Optimizers of our own whose updates are differentiable: sgd, adam, adamw, lamb, lars and adafactor."""

import math
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
    scaled,
    size_of,
    stateless,
    zeros,
)
from fshard.optim.norms import norms_of_both
from fshard.optim.rates import Number, Rate, check_rates, is_pair, value_of
from fshard.optim.scale import (
    AdafactorState,
    AdamState,
    check_factored,
    scale_by_adam,
    scale_by_factored_rms,
    scale_by_trust_ratio,
    updates_of,
)
from fshard.tree import (
    Flat,
    Tree,
    flatten,
    like,
    map_leaves,
    tensor_of,
)
from fshard.tree.checks import FINITE, Range, check_floating, check_numbers, check_sums
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


def lamb(
    lr: Rate,
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: Number = 1e-6,
    *,
    weight_decay: Number = 0.0,
    sums: str | None = None,
) -> Optimizer:
    """Adam whose step for each leaf is as long as the leaf, times the learning rate.

    Follows You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (2020), and
    optax.lamb. The norms span ranks: one collective for each set of axes that some leaf is split over.

    Args:
        lr: Learning rate: a number, a tensor of shape (), or a schedule of the number of updates made.
        betas: How much stays of the averages of gradients and of their squares.
        eps: Added to the root of the squares.
        weight_decay: How much of the parameters is added to Adam's direction.
        sums: As for `clip_by_global_norm`.

    Returns:
        The optimizer.

    Raises:
        ValueError: if a number is out of range, or `sums` is another word; from init, if a leaf is no real floating
            tensor.

    >>> import torch, fshard as fs
    >>> tx = fs.lamb(0.1)
    >>> params = {"w": torch.tensor([3.0, 4.0])}
    >>> new, _ = tx.update({"w": torch.tensor([1.0, 1.0])}, tx.init(params), params)
    >>> fs.global_norm({"w": new["w"] - params["w"]})  # a tenth of the norm of w
    tensor(0.5000)
    """
    check_sums("lamb", sums)
    check_rates("lamb", lr, betas, eps=eps, weight_decay=weight_decay)
    after = [_decayed(weight_decay), scale_by_trust_ratio(sums=sums)]
    return _descent("lamb", lr, scale_by_adam(betas, eps), AdamState, after=after)


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
    sums: str | None = None,
) -> Optimizer:
    """SGD with momentum whose step for each leaf is in proportion to the leaf's norm.

    Follows You et al., "Large Batch Training of Convolutional Networks" (2017), and optax.lars. The norms span ranks:
    one collective for each set of axes that some leaf is split over.

    Args:
        lr: Learning rate: a number, a tensor of shape (), or a schedule of the number of updates made.
        momentum: How much of the last step stays.
        weight_decay: How much of the parameters is added to their gradients.
        trust_coefficient: How long a step is, next to the leaf.
        eps: Added to the norm of the gradient.
        sums: As for `clip_by_global_norm`.

    Returns:
        The optimizer.

    Raises:
        ValueError: if a number is out of range, or `sums` is another word; from init, if a leaf is no real floating
            tensor.

    >>> import torch, fshard as fs
    >>> tx = fs.lars(1.0, momentum=0.0, trust_coefficient=0.1)
    >>> params = {"w": torch.tensor([3.0, 4.0])}
    >>> tx.update({"w": torch.tensor([100.0, 0.0])}, tx.init(params), params)[0]  # a step of a tenth of the norm of w
    {'w': tensor([2.5000, 4.0000])}
    """
    check_sums("lars", sums)
    check_rates("lars", lr, momentum=momentum, weight_decay=weight_decay, trust_coefficient=trust_coefficient, eps=eps)

    def init(params: Tree) -> LarsState:
        return LarsState(torch.zeros((), dtype=torch.int64), zeros(params))

    def update(grads: Tree, state: LarsState, params: Tree) -> tuple[Tree, LarsState]:
        def heavy(grad: Any, _: Any, old: Any, rate: Any, momentum: Any) -> tuple[torch.Tensor, ...]:
            new = rate * grad + momentum * old
            return new, new

        state = begun(state, grads, lambda: {"momentum": zeros(params)})
        numbers = (value_of(lr, state.updates), momentum)
        grads, kept = leafwise(heavy, grads, (grads, state.momentum), numbers=numbers)
        return grads, LarsState(state.updates + 1, kept)

    before = [_decayed(weight_decay), scale_by_trust_ratio(trust_coefficient, eps, sums=sums)]
    return _descent("lars", None, GradientTransformation(init, update), LarsState, before=before)


def adafactor(
    lr: Rate = 1e-2,
    beta2_decay: float = -0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    d: float = 1.0,
    *,
    weight_decay: Number = 0.0,
    sums: str | None = None,
) -> Optimizer:
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
    if not is_pair(eps):
        raise ValueError(f"adafactor: expected eps to be two numbers, got {eps!r:.40}")
    check_numbers("adafactor", Range("a finite number, 1 or more", lambda number: 1 <= number < math.inf), d=d)
    check_factored("adafactor", beta2_decay, **{f"eps[{i}]": x for i, x in enumerate(eps) if i or x is not None})
    scaling = scale_by_factored_rms(beta2_decay, eps[0], sums=sums)

    def init(params: Tree) -> Tree:
        check_real("adafactor", flatten(params))
        return scaling.init(params)

    def update(grads: Tree, state: AdafactorState, params: Tree) -> tuple[Tree, Tree]:
        check_state("adafactor", state, AdafactorState)
        rate = torch.as_tensor(value_of(lr, state.updates), dtype=torch.float64)
        steps, after = scaling.update(grads, state, params)

        def relative(step: Any, leaf: Any, size: Any, length: Any, missed: Any) -> Any:
            if step is None:
                return None
            root = max(1, size_of(leaf)) ** 0.5
            length_of_step = (size / root).clamp(min=eps[1]) * torch.minimum(rate, updates_of(state, missed) ** -0.5)
            return scaled(step, length_of_step / (length / (root * d)).clamp(min=1.0))

        def move(step: Any, param: Any, kept: Any) -> tuple[torch.Tensor, ...]:
            return (param * kept.to(param.dtype) - step,)

        steps = map_leaves(relative, steps, params, *norms_of_both(steps, params, sums), after.missed)
        (params,) = leafwise(move, steps, [params], numbers=(1 - rate * weight_decay,))
        return params, after

    return Optimizer(init, update)


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
