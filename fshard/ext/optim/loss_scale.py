"""dynamic_loss_scale: gradients of a scaled loss, for float16."""

import math
from functools import partial
from typing import Any, NamedTuple

import torch

import fshard as fs
from fshard.ext.optim.leaves import map_gradients
from fshard.ext.optim.wrappers import put_counts_beside
from fshard.extend import NUMBER, Range, check_arguments, check_numbers, run_update, zero

__all__ = ["dynamic_loss_scale"]

# The scale is a float32, and a scale of 0 or inf would skip every update.
FLOAT32 = torch.finfo(torch.float32)
SCALE = Range("a number from 1.2e-38 to 3.4e38", lambda number: FLOAT32.tiny <= number <= FLOAT32.max)
GROWTH = Range("a finite number above 1", lambda number: 1 < number < math.inf)
BACKOFF = Range("a number above 0 and below 1", lambda number: 0 < number < 1)


class ScaleState(NamedTuple):
    """State of an optimizer made by `dynamic_loss_scale`.

    Attributes:
        scale: The factor of the loss: a float32 tensor of shape ().
        good: The number of updates since the scale last changed: an int64 tensor of shape ().
        inner: The state of `skip_nonfinite`, which counts the updates that were `skipped`.
    """

    scale: torch.Tensor
    good: torch.Tensor
    inner: Any


def dynamic_loss_scale(
    tx: fs.Optimizer,
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
) -> fs.Optimizer:
    """Divide gradients of a scaled loss by the scale, skip updates with gradients that overflowed, and adapt the scale.

    Multiply the loss by `state.opt_state.scale`. The optimizer gets gradients without the scale, so put clipping into
    `tx`. Follows torch.amp.GradScaler: the same gradients give the same scale.

    Args:
        tx: The optimizer.
        init_scale: The first scale, above 0 and within float32.
        growth_factor: The factor, above 1, by which the scale grows after `growth_interval` finite updates in a row.
        backoff_factor: The factor, between 0 and 1, by which it shrinks after a gradient that is not finite.
        growth_interval: How many finite updates in a row let it grow, 1 or more.

    Returns:
        The optimizer; its state holds the `scale`.

    Raises:
        ValueError: if a number is out of range.

    >>> import torch, fshard as fs
    >>> tx = fs.dynamic_loss_scale(fs.sgd(0.1), init_scale=4.0)
    >>> params = {"w": torch.ones(1)}
    >>> state = tx.init(params)
    >>> for grad in (torch.ones(1) * state.scale, torch.tensor([torch.inf])):
    ...     params, state = tx.update({"w": grad}, state, params)
    >>> params, state.scale
    ({'w': tensor([0.9000])}, tensor(2.))
    """
    api_name = "dynamic_loss_scale"
    check_numbers(api_name, SCALE, init_scale=init_scale)
    check_numbers(api_name, GROWTH, growth_factor=growth_factor)
    check_numbers(api_name, BACKOFF, backoff_factor=backoff_factor)
    check_arguments(api_name, NUMBER, growth_interval=growth_interval)
    skipping = fs.skip_nonfinite(tx)

    def init(params: Any) -> ScaleState:
        # float(), because torch.tensor takes no whole number beyond int64.
        scale = torch.tensor(float(init_scale), dtype=torch.float64).float()
        state: ScaleState = put_counts_beside(params, ScaleState(scale, zero(), skipping.init(params)))
        return state

    def update(grads: Any, state: ScaleState, params: Any, donate: bool = False) -> tuple[Any, ScaleState]:
        # As GradScaler does: the inverse in float64, and one multiplication.
        inverse = state.scale.double().reciprocal().float()

        def unscale(grad: torch.Tensor) -> torch.Tensor:
            return grad.to(torch.promote_types(grad.dtype, torch.float32)) * inverse

        grads = map_gradients(unscale, grads)
        params, inner = run_update(api_name, "tx", skipping, grads, state.inner, params, donate=donate)
        is_finite = inner.skipped == state.inner.skipped
        good = torch.where(is_finite, state.good + 1, 0)
        may_grow = good == growth_interval
        old_scale = state.scale.double()
        larger = torch.where(may_grow, old_scale * growth_factor, old_scale)
        scale = torch.where(is_finite, larger, old_scale * backoff_factor).float()
        scale = torch.where(scale.isinf(), state.scale, scale)
        return params, ScaleState(scale, torch.where(may_grow, 0, good), inner)

    return fs.Optimizer(init, update, partial(update, donate=True))
