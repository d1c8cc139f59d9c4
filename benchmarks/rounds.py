"""Rounds in which every system takes a step, and what is compared of one round."""

import gc
import random
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

# Losses of one round agree to rounding, which the steps before multiply; below 1, where the batch is learnt by heart,
# this is an absolute difference.
LOSS_TOLERANCE = 1e-3
# What a system's steps of one round take, unless one takes longer.
TURN_SECONDS = 0.5


class Samples(NamedTuple):
    """Of each round that counts what rank 0 measured, as a turn has it."""

    seconds: list[float]
    main_thread_seconds: list[float]
    page_faults: list[float]
    losses: list[float]


class Turn(NamedTuple):
    """One step of a system on one rank: its wall time, CPU time of the main thread, and the mean loss over ranks.

    Page faults are those of all threads, each for 4 KiB that the allocator has taken from the operating system anew.
    """

    seconds: float
    main_thread_seconds: float
    page_faults: float
    loss: float


def take_turn(step: Callable[[], torch.Tensor], steps: int = 1) -> Turn:
    """Take steps, each from when all ranks begin until all have ended; the mean of all but the first of several.

    The first finds the processor's caches as another system has left them.
    """
    turns = [_timed(step) for _ in range(steps)]
    *times, losses = zip(*turns[1:] or turns)
    return Turn(*map(statistics.mean, times), losses[-1])


def _timed(step: Callable[[], torch.Tensor]) -> Turn:
    dist.barrier()
    start, cpu_start, faults = time.perf_counter(), time.thread_time(), page_faults()
    loss = step()
    cpu_seconds = time.thread_time() - cpu_start
    dist.barrier()
    seconds, faults = time.perf_counter() - start, page_faults() - faults
    return Turn(seconds, cpu_seconds, faults, mean_over_ranks(loss))


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def in_turn(
    names: Sequence[str], turn: Callable[[str, int], Sequence[Turn]], dropped: int, rounds: int
) -> dict[str, Samples]:
    """Let every system take a turn on its ranks once a round, in an order that changes from round to round.

    Args:
        names: The systems.
        turn: Lets one take a number of steps; returns what its ranks measured.
        dropped: Rounds of one step before those that count.
        rounds: Rounds that count.
    """
    samples = {name: Samples([], [], [], []) for name in names}
    seconds: list[float] = []
    for number in range(dropped + rounds):
        # The same order on every rank, without which they would wait for each other.
        for name in random.Random(number).sample(list(names), len(names)):
            counts = number >= dropped
            first = turn(name, 1 + round(TURN_SECONDS / statistics.median(seconds)) if counts else 1)[0]
            for values, value in zip(samples[name], first if counts else ()):
                values.append(value)
            seconds += [first.seconds] if number == dropped - 1 else []
    return samples


def measure(programs: Mapping[str, Callable[[], torch.Tensor]], dropped: int, rounds: int) -> dict[str, Samples]:
    """Run every program once a round in this process, as its rank of each."""
    # Otherwise the objects of all programs would be walked again and again in the time of whichever runs.
    gc.collect()
    gc.freeze()
    samples = in_turn(list(programs), lambda name, _: [take_turn(programs[name])], dropped, rounds)
    gc.unfreeze()
    check_losses(samples, dist.get_world_size())
    return samples


def check_losses(samples: Mapping[str, Samples], ranks: int) -> None:
    """Refuse to compare systems that did not do the same work; `plain` on several ranks does not, by design."""
    compared = {name: s.losses for name, s in samples.items() if name != "plain" or ranks == 1}
    for number, losses in enumerate(zip(*compared.values())):
        if max(losses) - min(losses) > LOSS_TOLERANCE * max(1.0, *losses):
            raise RuntimeError(f"losses differ in round {number}: {dict(zip(compared, losses))}")


def paired(mine: list[float], others: list[float]) -> list[float]:
    return [a / b for a, b in zip(mine, others)]


def mean_over_ranks(value: torch.Tensor) -> float:
    total = value.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
