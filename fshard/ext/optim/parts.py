"""Transformations that optimizers of this room are chained of, and their checks."""

import math
from collections.abc import Callable
from typing import Any

import torch

import fshard as fs
from fshard.ext import _compat
from fshard.extend import expect, leafwise

Number = float | torch.Tensor
Rate = Number | Callable[[torch.Tensor], Number]


def check_sums(what: str, sums: Any) -> None:
    """Refuse an unknown order of sums."""
    expect(sums in (None, "tree"), what, 'sums to be "tree" or None', repr(sums))


def rate_of(lr: Rate, count: torch.Tensor) -> Any:
    """Evaluate a learning rate after some updates, and refuse a number that is not finite."""
    rate = lr(count) if callable(lr) else lr
    known = 0.0 if isinstance(rate, torch.Tensor) else rate
    # A tensor of a transform or a trace has no value yet, and the host would wait for one on another device.
    if type(rate) is torch.Tensor and rate.is_cpu and not _compat.is_tracing() and not _compat.is_transformed(rate):
        known = rate.detach().item()
    if not math.isfinite(known):
        expect(False, "update", "the learning rate to be a finite number", f"{known} at count {int(count)}")
    return rate


def promoted() -> fs.GradientTransformation:
    """Compute in the wider dtype of a gradient and its parameter."""

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        return fs.tree_map(lambda g, p: g.to(torch.promote_types(g.dtype, p.dtype)), grads, params), state

    return fs.GradientTransformation(lambda params: (), update)


def decayed(decay: Number) -> fs.GradientTransformation:
    """Add a multiple of the parameters, which may be a tensor."""

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        (grads,) = leafwise(lambda g, _, p, decay: (g + decay * p,), grads, [grads], [params], (decay,))
        return grads, state

    return fs.GradientTransformation(lambda params: (), update)


def scale_by_rate(lr: Rate) -> fs.GradientTransformation:
    """Multiply gradients by a learning rate; the state counts updates."""

    def update(grads: Any, count: torch.Tensor, params: Any) -> tuple[Any, torch.Tensor]:
        (grads,) = leafwise(lambda g, _, rate: (rate * g,), grads, [grads], numbers=(rate_of(lr, count),))
        return grads, count + 1

    return fs.GradientTransformation(lambda params: torch.zeros((), dtype=torch.int64), update)
