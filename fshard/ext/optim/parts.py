"""Kinds of arguments that optimizers of this room share."""

from collections.abc import Callable, Sequence

import torch

from fshard.extend import call_schedule

Number = float | torch.Tensor
Mask = str | Sequence[str] | Callable[..., bool]
Rate = Number | Callable[[torch.Tensor], Number]


def read_rate(lr: Rate, count: torch.Tensor) -> Number:
    """Return the learning rate of an update; that of a schedule by the number of updates made."""
    return call_schedule(lr, "lr", count) if callable(lr) else lr
