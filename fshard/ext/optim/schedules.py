"""Schedules: hyperparameters as functions of the number of updates made.

Each maps a number, or an int64 tensor of shape (), to a float64 tensor of shape (), so that a jitted step reads it and
never traces anew. They follow Optax's schedules of like names.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fshard.extend import FINITE, Range, check_numbers, expect

__all__ = ["constant", "cosine", "from_torch_scheduler", "join", "linear", "warmup_cosine"]

# Of a number or a tensor.
Schedule = Callable[[Any], torch.Tensor]

# A table of so many values takes 80 MB and about three minutes to write down.
MAX_STEPS = 10_000_000
UPDATES = Range(
    f"a number of updates from 1 to {MAX_STEPS:,}",
    lambda steps: isinstance(steps, int) and 0 < steps <= MAX_STEPS,
)


def constant(value: float) -> Schedule:
    """Make a schedule of one value. Follows optax.constant_schedule.

    Args:
        value: The value.

    Returns:
        The schedule.

    Raises:
        ValueError: if `value` is not a finite number.

    >>> import torch, fshard as fs
    >>> schedule = fs.schedules.constant(0.1)
    >>> [float(schedule(torch.tensor(count))) for count in (0, 1000)]
    [0.1, 0.1]
    """
    check_numbers("schedules.constant", FINITE, value=value)
    return linear(value, value, 1)


def linear(init_value: float, end_value: float, transition_steps: int) -> Schedule:
    """Make a schedule that goes from one value to another in equal steps, and stays there.

    Follows optax.linear_schedule.

    Args:
        init_value: The value before the first update.
        end_value: The value after `transition_steps` updates.
        transition_steps: Number of updates, 1 or more.

    Returns:
        The schedule.

    Raises:
        ValueError: if `transition_steps` is no number of updates, or a value is not a finite number.

    >>> schedule = linear(0.0, 1.0, transition_steps=4)
    >>> [float(schedule(torch.tensor(count))) for count in (0, 1, 4, 9)]
    [0.0, 0.25, 1.0, 1.0]
    """
    check_numbers("schedules.linear", UPDATES, transition_steps=transition_steps)
    check_numbers("schedules.linear", FINITE, init_value=init_value, end_value=end_value)
    # Exact at the end, where a schedule stays.
    return lambda count: end_value + (init_value - end_value) * (1 - _fraction(count, transition_steps))


def cosine(init_value: float, decay_steps: int, *, end_value: float = 0.0) -> Schedule:
    """Make a schedule that goes from one value to another along half a cosine, and stays there.

    Follows optax.cosine_decay_schedule, with the last value in place of `alpha`, its fraction of the first.

    Args:
        init_value: The value before the first update.
        decay_steps: Number of updates, 1 or more.
        end_value: The value after `decay_steps` updates.

    Returns:
        The schedule.

    Raises:
        ValueError: if `decay_steps` is no number of updates, or a value is not a finite number.

    >>> schedule = cosine(1.0, decay_steps=4)
    >>> [round(float(schedule(torch.tensor(count))), 4) for count in (0, 1, 2, 4, 9)]
    [1.0, 0.8536, 0.5, 0.0, 0.0]
    """
    check_numbers("schedules.cosine", UPDATES, decay_steps=decay_steps)
    check_numbers("schedules.cosine", FINITE, init_value=init_value, end_value=end_value)

    def value(count: torch.Tensor) -> torch.Tensor:
        weight = (1 + torch.cos(math.pi * _fraction(count, decay_steps))) / 2
        return end_value + (init_value - end_value) * weight

    return value


def warmup_cosine(
    init_value: float, peak_value: float, warmup_steps: int, decay_steps: int, end_value: float = 0.0
) -> Schedule:
    """Make a schedule that rises in equal steps, then falls along half a cosine.

    Follows optax.warmup_cosine_decay_schedule.

    Args:
        init_value: The value before the first update.
        peak_value: The value after `warmup_steps` updates.
        warmup_steps: Number of updates that it rises in, 0 or more.
        decay_steps: Number of all updates, those of the warmup included; more than `warmup_steps`.
        end_value: The value after `decay_steps` updates.

    Returns:
        The schedule.

    Raises:
        ValueError: if the numbers of updates do not fit, or a value is not a finite number.

    >>> schedule = warmup_cosine(0.0, 1.0, warmup_steps=2, decay_steps=6)
    >>> [round(float(schedule(torch.tensor(count))), 4) for count in (0, 1, 2, 4, 6, 9)]
    [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    """
    api_name = "schedules.warmup_cosine"
    check_numbers(api_name, UPDATES, decay_steps=decay_steps)
    check_numbers(api_name, FINITE, init_value=init_value, peak_value=peak_value, end_value=end_value)
    before = Range(
        f"a number of updates, 0 or more and below the {decay_steps:,} of decay_steps",
        lambda steps: isinstance(steps, int) and 0 <= steps < decay_steps,
    )
    check_numbers(api_name, before, warmup_steps=warmup_steps)
    falling = cosine(peak_value, decay_steps - warmup_steps, end_value=end_value)
    if not warmup_steps:
        return falling
    rising = linear(init_value, peak_value, warmup_steps)
    return join([rising, falling], [warmup_steps])


def join(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """Make one schedule of several, each of which counts from the update where it begins.

    Follows optax.join_schedules. Schedules that torch has are joined by `from_torch_scheduler`.

    Args:
        schedules: One or more.
        boundaries: The updates at which the second one begins, the third and so on, in rising order.

    Returns:
        The schedule.

    Raises:
        ValueError: if there is not one boundary between two schedules, or they do not rise.

    >>> schedule = join([constant(1.0), constant(0.1)], [100])
    >>> [float(schedule(torch.tensor(count))) for count in (99, 100)]
    [1.0, 0.1]
    """
    starts = [0, *boundaries]
    rising = len(starts) == len(schedules) and starts == sorted(set(starts))
    expected = "a boundary between any two schedules, in rising order"
    expect(rising, "schedules.join", expected, f"boundaries {boundaries!r:.40} of {len(schedules)} schedules")

    def joined(count: torch.Tensor) -> torch.Tensor:
        count = torch.as_tensor(count)
        value = schedules[0](count)
        for start, schedule in zip(boundaries, schedules[1:], strict=True):
            value = torch.where(count < start, value, schedule((count - start).clamp(min=0)))
        return value

    return joined


def _fraction(count: torch.Tensor, steps: int) -> torch.Tensor:
    return torch.as_tensor(count).clamp(0, steps).double() / steps


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
        **arguments: Its keyword arguments. OneCycleLR and CyclicLR cycle the momentum unless you say
            cycle_momentum=False, which a schedule of the learning rate needs.

    Returns:
        The schedule: it maps the number of updates made, an int64 tensor of shape (), to a float64 tensor of shape ().

    Raises:
        ValueError: if `steps` is no number of updates, `name` is another word, the scheduler changes the momentum as
            well as the learning rate that you ask for, or it needs a number that only a run knows, such as
            ReduceLROnPlateau; torch's own error for arguments that the class refuses.

    >>> import torch
    >>> schedule = from_torch_scheduler(torch.optim.lr_scheduler.StepLR, lr=1.0, steps=4, step_size=2, gamma=0.5)
    >>> [float(schedule(torch.tensor(count))) for count in range(5)]
    [1.0, 1.0, 0.5, 0.5, 0.5]
    """
    check_numbers("from_torch_scheduler", UPDATES, steps=steps)
    expect(name in ("lr", "momentum"), "from_torch_scheduler", 'name to be "lr" or "momentum"', f"{name!r:.40}")
    optimizer = torch.optim.SGD([torch.zeros(())], lr=lr, momentum=momentum)
    values = []
    scheduler = cls(optimizer, **arguments)
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ValueError(
            f"from_torch_scheduler: {type(scheduler).__name__} needs a number of each epoch, so its values are not "
            'known before the run. Pass inject=("lr",) to fs.from_torch, and replace hyper["lr"] of its state.'
        )
    (group,) = optimizer.param_groups
    for count in range(steps):
        if count:
            optimizer.step()
            scheduler.step()
        values.append(float(group[name]))
        if name == "lr" and group["momentum"] != momentum:
            raise ValueError(
                f"from_torch_scheduler: {type(scheduler).__name__} changes the momentum too, in Adam the first beta, "
                "and this schedule would leave it as it is. Pass cycle_momentum=False, and for the momentum of SGD a "
                'schedule of its own with name="momentum".'
            )
    table = torch.tensor(values, dtype=torch.float64)

    def schedule(count: torch.Tensor) -> torch.Tensor:
        count = torch.as_tensor(count)
        # Indexing by a tensor of shape () would ask for its value, which a trace does not have.
        return table.to(count.device).index_select(0, count.clamp(0, steps - 1).reshape(1)).reshape(())

    return schedule
