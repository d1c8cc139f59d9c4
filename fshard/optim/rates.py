"""Hyperparameters of optimizers: numbers, or schedules of the updates made; their ranges and values."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fshard._compat import is_transformed
from fshard.errors import expect
from fshard.tree.checks import FRACTION, NOT_NEGATIVE, check_numbers

Number = float | torch.Tensor
Rate = Number | Callable[[torch.Tensor], Number]


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
    # Shown where wrong alone: the host would wait for a tensor of another device.
    if betas != () and not is_pair(betas):
        raise ValueError(f"{what}: expected betas to be two numbers, got {betas!r:.40}")
    check_numbers(what, FRACTION, **{f"betas[{i}]": beta for i, beta in enumerate(betas)})
    check_numbers(what, NOT_NEGATIVE, **numbers)


def is_pair(value: Any) -> bool:
    """Tell whether a value is a sequence of two."""
    return isinstance(value, Sequence) and len(value) == 2 and not isinstance(value, str)


def value_of(rate: Rate, count: torch.Tensor) -> Any:
    """Evaluate a learning rate after some updates, and refuse a number that is not finite."""
    value = rate(count) if callable(rate) else rate
    # A tensor of a transform or a trace has no value yet, and the host would wait for one on another device.
    if type(value) is torch.Tensor and value.is_cpu and not is_transformed(value):
        known = value.detach().item()
    else:
        known = value if isinstance(value, int | float) else 0.0
    if not math.isfinite(known):
        expect(False, "update", "the learning rate to be a finite number", f"{known} at count {int(count)}")
    return value
