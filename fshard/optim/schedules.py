"""Schedules: hyperparameters as functions of the number of updates made."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fshard._compat import is_transformed
from fshard.checks import FRACTION, NOT_NEGATIVE, check_numbers, describe
from fshard.errors import expect

# A table of so many values takes 80 MB and about three minutes to write down.
MAX_STEPS = 10_000_000

Schedule = Callable[[torch.Tensor], torch.Tensor]
Number = float | torch.Tensor
Rate = Number | Callable[[torch.Tensor], Number]


def from_torch_scheduler(
    cls: Callable[..., Any], lr: float, steps: int, *, name: str = "lr", momentum: float = 0.9, **arguments: Any
) -> Schedule:
    """Make a schedule of a class of torch.optim.lr_scheduler, with its own values.

    The values are taken down once, here: a schedule is a look-up, which a trace can hold and which never traces anew.

    Args:
        cls: The class, such as torch.optim.lr_scheduler.CosineAnnealingLR, or a function from an optimizer to a
            scheduler, for those that join several.
        lr: The learning rate that it starts from.
        steps: How many updates there will be; later ones get the last value.
        name: Which hyperparameter it is for: "lr", or "momentum" for those that cycle it too.
        momentum: The momentum that it starts from.
        **arguments: Its keyword arguments.

    Returns:
        The schedule: it maps the number of updates made, an int64 tensor of shape (), to a float64 tensor of shape ().

    Raises:
        ValueError: if it needs a metric, an argument is out of range, or a value is not finite.

    >>> import torch
    >>> schedule = from_torch_scheduler(torch.optim.lr_scheduler.StepLR, lr=1.0, steps=4, step_size=2, gamma=0.5)
    >>> [float(schedule(torch.tensor(count))) for count in range(5)]
    [1.0, 1.0, 0.5, 0.5, 0.5]
    """
    verb, whole = "from_torch_scheduler", isinstance(steps, int) and not isinstance(steps, bool)
    expect(whole and steps > 0, verb, "steps to be a number of updates, 1 or more", repr(steps))
    remedy = f"later updates get the last value, so that a schedule needs none beyond {MAX_STEPS:,}"
    expect(steps <= MAX_STEPS, verb, f"steps to be at most {MAX_STEPS:,}", f"{steps!r:.40}", remedy)
    expect(callable(cls), verb, "cls to be a class or a function", describe(cls))
    expect(name in ("lr", "momentum"), verb, 'name to be "lr" or "momentum"', f"{name!r:.40}")
    check_numbers(verb, NOT_NEGATIVE, lr=lr, momentum=momentum)
    if cls is torch.optim.lr_scheduler.ReduceLROnPlateau:
        remedy = "keep the learning rate in the state instead, by from_torch(..., inject=['lr'])"
        raise ValueError(f"from_torch_scheduler: ReduceLROnPlateau needs a metric at every step; {remedy}")
    optimizer = torch.optim.SGD([torch.zeros(())], lr=lr, momentum=momentum)
    values: list[float] = []
    try:
        scheduler = cls(optimizer, **arguments)
        while len(values) < steps and all(map(math.isfinite, values[-1:])):
            if values:
                optimizer.step()
                scheduler.step()
            values.append(float(optimizer.param_groups[0][name]))
    except Exception as error:
        given = ", ".join(f"{key}={value!r:.40}" for key, value in arguments.items()) or "none"
        found = f"{cls!r:.60} and {given}, of which torch says: {error}"
        raise ValueError(f"{verb}: expected cls to be a scheduler and arguments that it takes, got {found}") from error
    found = f"{values[-1]} after {len(values) - 1} updates"
    expect(math.isfinite(values[-1]), verb, f"{name} to be a finite number", found)
    table = torch.tensor(values, dtype=torch.float64)

    def schedule(count: torch.Tensor) -> torch.Tensor:
        needed = "the count to be an int64 tensor of shape ()"
        expect(isinstance(count, torch.Tensor), "schedule", needed, describe(count))
        # Indexing by a tensor of shape () would ask for its value, which a trace does not have.
        return table.to(count.device).index_select(0, count.clamp(0, steps - 1).reshape(1)).reshape(())

    return schedule


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
        expect(False, "update", "the learning rate to be a finite number", f"{known} after {int(count)} updates")
    return value
