"""dynamic_loss_scale: gradients of a scaled loss, for float16."""

import math
from functools import partial
from typing import Any, NamedTuple

import torch

import fshard as fs
from fshard.ext.optim.leaves import leafwise
from fshard.extend import expect

__all__ = ["dynamic_loss_scale"]


class ScaleState(NamedTuple):
    """State of an optimizer made by `dynamic_loss_scale`.

    Attributes:
        scale: The factor of the loss: a float32 tensor of shape ().
        good: Updates since the scale was changed or one was skipped: an int64 tensor of shape ().
        inner: The state of the optimizer inside, which counts the updates that were `skipped`.
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
    """Divide gradients of a scaled loss by the scale, skip those that overflowed, and adapt the scale.

    Multiply the loss by `state.opt_state.scale`. A chain inside sees true gradients, so clipping goes there. Follows
    torch.amp.GradScaler: the same scale after the same gradients.

    Args:
        tx: The optimizer.
        init_scale: The scale at first.
        growth_factor: The factor that it grows by after `growth_interval` updates in a row, above 1.
        backoff_factor: The factor that it shrinks by where a gradient is not finite, between 0 and 1.
        growth_interval: How many updates in a row without such a gradient.

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
    numbers = {"growth_factor": growth_factor, "backoff_factor": backoff_factor, "growth_interval": growth_interval}
    for name, number in {"init_scale": init_scale, **numbers}.items():
        real = isinstance(number, int | float) and not isinstance(number, bool) and 0 < number < math.inf
        expect(real, "dynamic_loss_scale", f"{name} to be a number above 0", f"{number!r:.40}")
    skipping = fs.skip_nonfinite(tx)

    def init(params: Any) -> ScaleState:
        device = next((leaf.device for leaf in fs.tree_leaves(params) if leaf is not None), None)
        # torch.tensor takes no whole number beyond int64.
        scale = torch.tensor(float(init_scale), dtype=torch.float64, device=device).float()
        return ScaleState(scale, torch.zeros((), dtype=torch.int64, device=device), skipping.init(params))

    def run(grads: Any, state: ScaleState, params: Any, donate: bool = False) -> tuple[Any, ScaleState]:
        # As GradScaler does: the inverse in float64, and one multiplication.
        inverse, scale = state.scale.double().reciprocal().float(), state.scale.double()
        wide = lambda grad: grad.to(torch.promote_types(grad.dtype, torch.float32))  # noqa: E731
        (grads,) = leafwise(lambda grad, _: (wide(grad) * inverse,), grads, [grads])
        step = skipping.update_donated if donate and skipping.update_donated else skipping.update
        params, inner = step(grads, state.inner, params)
        finite = inner.skipped == state.inner.skipped
        good = torch.where(finite, state.good + 1, 0)
        grown = good == growth_interval
        larger = torch.where(grown, scale * growth_factor, scale)
        scale = torch.where(finite, larger, scale * backoff_factor).float()
        scale = torch.where(scale.isinf(), state.scale, scale)
        return params, ScaleState(scale, torch.where(grown, 0, good), inner)

    return fs.Optimizer(init, run, partial(run, donate=True))
