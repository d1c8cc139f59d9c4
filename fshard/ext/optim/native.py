"""Gradient transformations, and the optimizers sgd, adam and adamw as chains of them; all are differentiable."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

import fshard as fs
from fshard.ext.optim.leaves import (
    Mask,
    Number,
    Rate,
    add_multiple,
    check_real,
    is_set,
    leafwise,
    make_bound,
    make_stateful,
    make_stateless,
    make_step,
    map_gradients,
    read_rate,
    share_out,
)
from fshard.ext.optim.norms import find_norm_order, global_norm, stack_norms, take_root
from fshard.ext.optim.wrappers import masked
from fshard.extend import (
    FINITE,
    FRACTION,
    NOT_NEGATIVE,
    check_floating,
    check_numbers,
    expect,
    flatten,
    record_numbers,
    refuse_donated,
    zero,
)

_RATE = NOT_NEGATIVE._replace(
    expected="a finite number, 0 or more, or a function of the number of updates, as of fs.schedules or "
    "fs.from_torch_scheduler"
)


def check_rates(api_name: str, lr: Rate, betas: Any = (0.0, 0.0), **numbers: Number) -> None:
    """Refuse hyperparameters that are outside of torch.optim's ranges.

    Args:
        api_name: The optimizer, for the error.
        lr: The learning rate; a schedule is not checked.
        betas: The part that stays of averages, if the optimizer keeps some.
        numbers: Other hyperparameters, 0 or more, by name.

    Raises:
        ValueError: with the name and the value of the first one that is out of range.
    """
    check_pair(api_name, "betas", betas)
    check_numbers(api_name, FRACTION, **{f"betas[{i}]": beta for i, beta in enumerate(betas)})
    # A class would be called to make an instance of it, in the first update.
    if isinstance(lr, type) or not callable(lr):
        check_numbers(api_name, _RATE, lr=lr)
    check_numbers(api_name, NOT_NEGATIVE, **numbers)


def check_pair(api_name: str, name: str, pair: Any) -> None:
    """Refuse an argument that is not a sequence of two."""
    is_pair = isinstance(pair, Sequence) and len(pair) == 2
    expect(is_pair, api_name, f"{name} to be two numbers", f"{pair!r:.40}")


def clip_by_global_norm(
    max_norm: float,
    p: float = 2.0,
    *,
    reduction_order: str | None = None,
) -> fs.GradientTransformation:
    """Scale gradients down so that the norm of all of them together is at most `max_norm`.

    Follows torch.nn.utils.clip_grad_norm_ on full gradients. The norm is computed in float64: each element counts once,
    however many ranks store it, and padding does not count. For each set of axes that some leaf is split over, it costs
    one collective of a single number over each of these axes; with reduction_order="tree" two, of four numbers for each
    leaf.

    Args:
        max_norm: The largest norm to let through, 0 or more.
        p: The order of the norm, above 0; float("inf") for the largest magnitude.
        reduction_order: "tree" adds exactly, so that the norm has the same bits at any world size, under any strategy
            and in every precision. `p` must then be 2 or inf, and the norm has no derivative.

    Returns:
        The transformation; its state is empty.

    Raises:
        ValueError: if `max_norm` is negative or not finite, `p` is not positive, or `reduction_order` is unknown.

    >>> import torch, fshard as fs
    >>> tx = fs.clip_by_global_norm(1.0)
    >>> grads = {"w": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    >>> tx.update(grads, tx.init(grads), grads)[0]
    {'w': tensor([0.6000]), 'b': tensor([0.8000])}
    """
    check_numbers("clip_by_global_norm", NOT_NEGATIVE, max_norm=max_norm)
    find_norm_order("clip_by_global_norm", p, reduction_order)

    def bind(grads: Any, params: Any) -> Any:
        record_numbers("clip_by_global_norm", flatten(grads), {"max_norm": max_norm})
        norm = global_norm(grads, p, reduction_order=reduction_order)
        return partial(map_gradients, torch.mul, numbers=(_find_scale(max_norm, norm),))

    return make_bound(bind)


def clip_by_norm(
    max_norm: float,
    p: float = 2.0,
    *,
    reduction_order: str | None = None,
) -> fs.GradientTransformation:
    """Scale each leaf's gradient down so that its own norm is at most `max_norm`; see `clip_by_global_norm`.

    Follows torch.nn.utils.clip_grad_norm_, called for each parameter by itself. It costs one collective for each set of
    axes that some leaf is split over, of one number for each leaf.

    Args:
        max_norm: The largest norm to let through, 0 or more.
        p: The order of the norm, above 0; float("inf") for the largest magnitude.
        reduction_order: As for `clip_by_global_norm`.

    Returns:
        The transformation; its state is empty.

    Raises:
        ValueError: if `max_norm` is negative or not finite, `p` is not positive, or `reduction_order` is unknown.

    >>> import torch, fshard as fs
    >>> tx = fs.clip_by_norm(1.0)
    >>> grads = {"w": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.5])}
    >>> tx.update(grads, tx.init(grads), grads)[0]
    {'w': tensor([0.6000, 0.8000]), 'b': tensor([0.5000])}
    """
    check_numbers("clip_by_norm", NOT_NEGATIVE, max_norm=max_norm)
    find_norm_order("clip_by_norm", p, reduction_order)

    def bind(grads: Any, params: Any) -> Any:
        scales = share_out(_find_scale(max_norm, stack_norms(grads, p, reduction_order)), grads)
        return lambda grads: map_gradients(torch.mul, grads, scales)

    return make_bound(bind)


def _find_scale(max_norm: float, norm: torch.Tensor) -> torch.Tensor:
    # As in torch.nn.utils.clip_grad_norm_: the same 1e-6, and a multiplication by 1 if nothing is clipped.
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def clip_by_value(max_value: float) -> fs.GradientTransformation:
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
    return make_stateless(lambda grads, params: map_gradients(lambda grad: grad.clamp(-max_value, max_value), grads))


class AdamState(NamedTuple):
    """State of `scale_by_adam`.

    Attributes:
        counts: The number of updates of each leaf: int64 tensors of shape ().
        mean: The running averages of the gradients, sharded as they are.
        square: The running averages of their squares.
    """

    counts: Any
    mean: Any
    square: Any


def scale_by_adam(
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: Number = 1e-8,
) -> fs.GradientTransformation:
    """Replace gradients by Adam's direction: their average over the root of the average of their squares.

    Follows optax.scale_by_adam. `adam`, `adamw` and `lamb` are built on it.

    Args:
        betas: The part that stays of the averages of gradients and of their squares.
        eps: Added to the root of the squares.

    Returns:
        The transformation; its state keeps the parameters' specs.

    Raises:
        ValueError: if a number is out of range; from init, if a leaf is not a real floating tensor.

    >>> import fshard as fs
    >>> tx = fs.chain(scale_by_adam(), fs.sgd(0.1))
    >>> tx.update({"w": torch.ones(2)}, tx.init({"w": torch.ones(2)}), {"w": torch.ones(2)})[0]
    {'w': tensor([0.9000, 0.9000])}
    """
    check_rates("scale_by_adam", 0.0, betas, eps=eps)

    def scale(
        grad: Any,
        _: Any,
        mean: Any,
        square: Any,
        gain: Any,
        scaled_eps: Any,
        beta1: Any,
        beta2: Any,
        *_eps: Any,
    ) -> Any:
        mean = add_multiple(mean * beta1, grad, 1 - beta1)
        square = torch.addcmul(square * beta2, grad, grad * (1 - beta2))
        # In float16, eps would be 0. A variable would keep the root in memory.
        return mean / (take_root(square, 2.0).to(scaled_eps.dtype) + scaled_eps) * gain, mean, square

    def correct_biases(counts: torch.Tensor) -> Any:
        """Compute the factor of each leaf's mean, and the eps of its root, both times the correction of the root."""
        beta1, beta2 = betas
        mean_biases = (1 - beta1**counts)[:, 0]
        square_biases = (1 - beta2**counts)[:, 0]
        roots = square_biases.sqrt()
        return roots / mean_biases, roots * eps

    return make_stateful(AdamState, scale, (*betas, eps), partial(check_real, "scale_by_adam"), correct_biases)


def add_decayed_weights(
    weight_decay: Number,
    mask: Mask | None = None,
) -> fs.GradientTransformation:
    """Add a multiple of the parameters to their gradients. Before an optimizer, this is L2 regularization.

    Follows optax.add_decayed_weights and the weight_decay of torch.optim.SGD and Adam. The bits of an element are the
    same at any world size.

    Args:
        weight_decay: The multiple, 0 or more. It may be a tensor that is differentiated.
        mask: The leaves that decay, as `masked` takes it; None for all.

    Returns:
        The transformation; its state is empty.

    Raises:
        ValueError: if `weight_decay` is negative or not finite; from init, if `mask` matches no leaf.

    >>> import torch, fshard as fs
    >>> tx = fs.add_decayed_weights(0.5, mask="*weight")
    >>> params = {"weight": torch.ones(2), "bias": torch.ones(1)}
    >>> grads = {"weight": torch.zeros(2), "bias": torch.zeros(1)}
    >>> tx.update(grads, tx.init(params), params)[0]
    {'weight': tensor([0.5000, 0.5000]), 'bias': tensor([0.])}
    """
    check_numbers("add_decayed_weights", NOT_NEGATIVE, weight_decay=weight_decay)

    def decay(grads: Any, params: Any) -> Any:
        if not is_set(weight_decay):
            return grads
        return map_gradients(add_multiple, grads, params, numbers=(weight_decay,))

    tx: Any = make_stateless(decay)
    return tx if mask is None else masked(tx, mask)


class MomentumState(NamedTuple):
    """State of `sgd` with momentum.

    Attributes:
        counts: The number of updates of each leaf: int64 tensors of shape ().
        momentum: The momentum of each leaf, sharded as it is.
    """

    counts: Any
    momentum: Any


class DescentState(NamedTuple):
    """State of the last part of `sgd`, `adam` and `adamw`.

    Attributes:
        updates: The number of updates made: an int64 tensor of shape ().
    """

    updates: torch.Tensor


def sgd(
    lr: Rate,
    momentum: Number = 0.0,
    *,
    dampening: Number = 0.0,
    weight_decay: Number = 0.0,
    nesterov: bool = False,
) -> fs.Optimizer:
    """Stochastic gradient descent that can itself be differentiated.

    Follows torch.optim.SGD. Nothing is detached, and numbers may be tensors. So torch.func.grad through an update gives
    gradients with respect to parameters (MAML) and to the learning rate.

    Args:
        lr: Learning rate: a number, a tensor of shape (), or a schedule of the number of updates made.
        momentum: The part of the last step that stays.
        dampening: The part of each gradient after the first that does not go into the momentum.
        weight_decay: The part of the parameters that is added to their gradients.
        nesterov: Whether to use Nesterov's momentum.

    Returns:
        The optimizer.

    Raises:
        ValueError: if a number is out of range, or `nesterov` is set without momentum or with dampening; from
            update, if a schedule returns no number.

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
    if nesterov and (is_set(dampening) or not is_set(momentum)):
        raise ValueError("sgd: nesterov needs a momentum above 0 and no dampening")

    def add_momentum(
        grad: torch.Tensor,
        _: Any,
        old: torch.Tensor,
        gain: torch.Tensor,
        momentum: Any,
        *_dampening: Any,
    ) -> Any:
        gained = grad * gain if is_set(dampening) else grad
        new = add_multiple(gained, old, momentum)
        return add_multiple(grad, new, momentum) if nesterov else new, new

    parts = [add_decayed_weights(weight_decay)]
    if is_set(momentum):
        trace = make_stateful(
            MomentumState,
            add_momentum,
            (momentum, dampening),
            partial(check_floating, "sgd"),
            # Of two Python numbers, torch.where would make float32.
            lambda counts: [torch.where(counts[:, 0] == 1, counts[:, 0], 1 - dampening)],
        )
        parts.append(trace)
    return _chain_leafwise(*parts, _make_descent(lr))


def adam(
    lr: Rate,
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: Number = 1e-8,
    *,
    weight_decay: Number = 0.0,
) -> fs.Optimizer:
    """Adam that can itself be differentiated; see `sgd`.

    Follows Kingma and Ba, "Adam: A Method for Stochastic Optimization" (2015), and torch.optim.Adam.

    Args:
        lr: Learning rate: a number, a tensor of shape (), or a schedule of the number of updates made.
        betas: The part that stays of the averages of gradients and of their squares.
        eps: Added to the root of the squares.
        weight_decay: The part of the parameters that is added to their gradients.

    Returns:
        The optimizer.

    Raises:
        ValueError: if a number is out of range; from init, if a leaf is not a real floating tensor.

    >>> import torch, fshard as fs
    >>> tx = fs.adam(0.1)  # whose first step has the learning rate's size, whatever the gradient's
    >>> params = {"w": torch.tensor([1.0, 2.0])}
    >>> tx.update({"w": torch.tensor([5.0, -0.01])}, tx.init(params), params)[0]
    {'w': tensor([0.9000, 2.1000])}
    """
    check_rates("adam", lr, betas, eps=eps, weight_decay=weight_decay)
    return _chain_leafwise(add_decayed_weights(weight_decay), scale_by_adam(betas, eps), _make_descent(lr))


def adamw(
    lr: Rate,
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: Number = 1e-8,
    *,
    weight_decay: Number = 0.01,
) -> fs.Optimizer:
    """AdamW that can itself be differentiated; see `sgd`.

    Follows Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), and torch.optim.AdamW.

    Args:
        lr: Learning rate: a number, a tensor of shape (), or a schedule of the number of updates made.
        betas: The part that stays of the averages of gradients and of their squares.
        eps: Added to the root of the squares.
        weight_decay: Times the learning rate, the part of the parameters that an update subtracts.

    Returns:
        The optimizer.

    Raises:
        ValueError: if a number is out of range; from init, if a leaf is not a real floating tensor.

    >>> import torch, fshard as fs
    >>> tx = fs.adamw(0.1, weight_decay=0.5)
    >>> params = {"w": torch.tensor([1.0, 2.0])}
    >>> tx.update({"w": torch.zeros(2)}, tx.init(params), params)[0]  # shrinks by 0.1 * 0.5
    {'w': tensor([0.9500, 1.9000])}
    """
    check_rates("adamw", lr, betas, eps=eps, weight_decay=weight_decay)
    return _chain_leafwise(scale_by_adam(betas, eps), _make_descent(lr, weight_decay))


def _chain_leafwise(*parts: Any) -> fs.Optimizer:
    """Make an optimizer of parts that each change a leaf by what they have of that leaf."""
    tx: fs.Optimizer = fs.chain(*parts)
    return tx._replace(is_leafwise=True)


def _make_descent(lr: Rate, decay: Number = 0.0) -> fs.Optimizer:
    """Make an optimizer that subtracts gradients times the learning rate, after parameters have shrunk by a decay."""

    def init(params: Any) -> DescentState:
        flat = flatten(params)
        refuse_donated("sgd", flat)
        check_floating("sgd", flat)
        return DescentState(zero())

    def update(grads: Any, state: DescentState, params: Any) -> tuple[Any, Any]:
        # An empty count stays empty, and so does a number. A state is donated as a whole, so that its count tells.
        given = flatten({"updates": state.updates, "params": params})
        refuse_donated("sgd", given)
        rate = read_rate(lr, state.updates)
        # A product, because a tensor without a sign has no negative.
        (params,) = leafwise(make_step(decay), grads, [params], numbers=(-1.0 * rate, 1 - rate * decay))
        record_numbers("a step", given, {"lr": rate, "weight_decay": decay})
        return params, DescentState(state.updates + 1)

    return fs.Optimizer(init, update)
