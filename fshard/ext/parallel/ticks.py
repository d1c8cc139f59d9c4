"""The schedules of a pipeline as tables of ticks: a pure function, without ranks.

GPipe (Huang et al., arXiv:1811.06965), 1F1B (PipeDream-Flush: Narayanan et al., arXiv:2006.09503) and interleaved 1F1B
with virtual stages (Megatron-LM: Narayanan et al., arXiv:2104.04473).
"""

from functools import lru_cache
from typing import NamedTuple

SCHEDULES = ("gpipe", "1f1b", "interleaved")


class Op(NamedTuple):
    """What a stage computes in one tick.

    Attributes:
        backward: Whether it is the backward of a microbatch.
        microbatch: The microbatch.
        chunk: Which of the stage's virtual stages.
    """

    backward: bool
    microbatch: int
    chunk: int = 0


Tick = tuple[Op | None, ...]


@lru_cache(maxsize=64)
def ticks(
    stages: int, microbatches: int, schedule: str, virtual_stages: int = 1, backward: bool = True
) -> tuple[Tick, ...]:
    """Compute which stage does what in which tick; a result is used in a later tick than it was computed in.

    Virtual stage c of stage s is number c * stages + s of the model. GPipe runs all forwards before the first backward.
    1F1B takes 2 (microbatches + stages - 1) ticks, and stage s holds at most stages - s microbatches. Interleaved takes
    2 (microbatches * virtual_stages + stages - 1) ticks, each a virtual stage long, and stage s holds at most
    2 (stages - s - 1) + (virtual_stages - 1) stages + 1 virtual stages' microbatches.

    Args:
        stages: How many.
        microbatches: How many; for "interleaved" a multiple of `stages`.
        schedule: "gpipe", "1f1b" or "interleaved".
        virtual_stages: How many each stage has; 1 but for "interleaved".
        backward: Whether there are backwards; without, all schedules but for virtual stages are one.

    Returns:
        For each tick what each stage does, None where it waits.
    """
    queues = [list(_order(stage, stages, microbatches, schedule, virtual_stages)) for stage in range(stages)]
    queues = [[op for op in queue if backward or not op.backward] for queue in queues]
    done: set[tuple[int, Op]] = set()
    table: list[Tick] = []
    while any(queues):
        row = []
        for stage, queue in enumerate(queues):
            needed = _needed(stage, queue[0], stages, virtual_stages) if queue else None
            row.append(queue[0] if queue and (needed is None or needed in done) else None)
        assert any(row), "every stage waits"
        for stage, op in enumerate(row):
            if op is not None:
                done.add((stage, queues[stage].pop(0)))
        table.append(tuple(row))
    return tuple(table)


def receiver(stage: int, op: Op, stages: int, virtual_stages: int) -> tuple[int, Op] | None:
    """Find who needs the result of an op: the stage and its op; None for the last forward and the last backward."""
    place = op.chunk * stages + stage + (-1 if op.backward else 1)
    if not 0 <= place < stages * virtual_stages:
        return None
    return place % stages, op._replace(chunk=place // stages)


def _order(stage: int, stages: int, microbatches: int, schedule: str, virtual_stages: int) -> list[Op]:
    """The ops of one stage in turn: some forwards, then one of both, then the backwards that are left."""
    total = microbatches * virtual_stages
    if schedule == "interleaved":
        # Groups of as many microbatches as there are stages go through one virtual stage after another.
        turns = [
            (k // (stages * virtual_stages) * stages + k % stages, k // stages % virtual_stages) for k in range(total)
        ]
        ahead = 2 * (stages - stage - 1) + (virtual_stages - 1) * stages
    else:
        turns = [(k, 0) for k in range(total)]
        ahead = stages - stage - 1 if schedule == "1f1b" else total
    forwards = [Op(False, microbatch, chunk) for microbatch, chunk in turns]
    backwards = [Op(True, microbatch, virtual_stages - 1 - chunk) for microbatch, chunk in turns]
    if schedule == "gpipe":
        # As autograd does it.
        return [*forwards, *reversed(backwards)]
    ahead = min(ahead, total)
    both = [op for pair in zip(forwards[ahead:], backwards, strict=False) for op in pair]
    return [*forwards[:ahead], *both, *backwards[total - ahead :]]


def _needed(stage: int, op: Op, stages: int, virtual_stages: int) -> tuple[int, Op] | None:
    """The op whose result an op takes; None for the first forward."""
    last = op.chunk * stages + stage == stages * virtual_stages - 1
    if op.backward and last:
        return stage, op._replace(backward=False)
    # Results go back the way that cotangents come.
    found = receiver(stage, op._replace(backward=not op.backward), stages, virtual_stages)
    return None if found is None else (found[0], found[1]._replace(backward=op.backward))
