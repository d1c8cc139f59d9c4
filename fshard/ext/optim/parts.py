"""Kinds of arguments that optimizers of this room share."""

import math
from collections.abc import Callable, Sequence

import torch

from fshard.extend import Range, check_numbers

FINITE = Range("a finite number", math.isfinite)

Number = float | torch.Tensor
Mask = str | Sequence[str] | Callable[..., bool]
Rate = Number | Callable[[torch.Tensor], Number]


def read_rate(lr: Rate, count: torch.Tensor) -> Number:
    """Return the learning rate of an update.

    Args:
        lr: A number, a tensor or a schedule.
        count: The number of updates made.

    Raises:
        ValueError: if a schedule returns something else than a number or a tensor of one element.
    """
    if not callable(lr):
        return lr
    rate = lr(count)
    # Such as `lambda count: count >= 10`.
    if isinstance(rate, torch.Tensor) and rate.dtype is torch.bool:
        rate = rate.long()
    # Broadcast against shards, a tensor of several elements would give each rank other rates.
    check_numbers("update", FINITE, **{"the value of the schedule of lr": rate})
    return rate
