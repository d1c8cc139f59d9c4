"""Rounds in which every system takes a step, and what is compared of one round."""

import gc
import random
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist

# Losses of one round agree to rounding, which the steps before multiply; below 1, where the batch is learnt by heart,
# this is an absolute difference.
LOSS_TOLERANCE = 1e-3


class Samples(NamedTuple):
    """Of each round that counts: wall time on rank 0, CPU time of its main thread, and the mean loss over ranks."""

    seconds: list[float]
    main_thread_seconds: list[float]
    losses: list[float]


def measure(programs: Mapping[str, Callable[[], torch.Tensor]], dropped: int, rounds: int) -> dict[str, Samples]:
    """Run every program once a round, in an order that changes from round to round."""
    samples = {name: Samples([], [], []) for name in programs}
    for number in range(dropped + rounds):
        if number == dropped:
            # Otherwise the objects of all systems would be walked again and again in the time of whichever runs.
            gc.collect()
            gc.freeze()
        # The same order on every rank, without which they would wait for each other.
        for name in random.Random(number).sample(list(programs), len(programs)):
            dist.barrier()
            start, cpu_start = time.perf_counter(), time.thread_time()
            loss = programs[name]()
            cpu_seconds = time.thread_time() - cpu_start
            dist.barrier()
            seconds = time.perf_counter() - start
            mean = mean_over_ranks(loss)
            if number >= dropped:
                for values, value in zip(samples[name], (seconds, cpu_seconds, mean)):
                    values.append(value)
    gc.unfreeze()
    check_losses(samples)
    return samples


def check_losses(samples: Mapping[str, Samples]) -> None:
    """Refuse to compare systems that did not do the same work; `plain` on several ranks does not, by design."""
    compared = {name: s.losses for name, s in samples.items() if name != "plain" or dist.get_world_size() == 1}
    for number, losses in enumerate(zip(*compared.values())):
        if max(losses) - min(losses) > LOSS_TOLERANCE * max(1.0, *losses):
            raise RuntimeError(f"losses differ in round {number}: {dict(zip(compared, losses))}")


def paired(mine: list[float], others: list[float]) -> list[float]:
    return [a / b for a, b in zip(mine, others)]


def mean_over_ranks(value: torch.Tensor) -> float:
    total = value.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
