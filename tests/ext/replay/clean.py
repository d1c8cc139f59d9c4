"""Replays of steps without a fault, in which nothing may be found."""

from functools import partial

import fshard as fs
from fshard.testing import spmd
from tests.ext.replay.models import STRATEGIES, batch_of_rank, make_step

SECONDS = 600.0


def replay_clean(name: str, count: int, world: int = 2) -> list[str]:
    """Replay so many steps of a model in turn under several strategies, each from the state that the last one led to.

    Returns:
        The reports, each of which is a false alarm.
    """
    return spmd(partial(_replay_all, name, count), world, timeout=SECONDS)[0]


def _replay_all(name: str, count: int) -> list[str]:
    alarms = []
    for offset, strategy in enumerate(STRATEGIES):
        step, state, kind = make_step(name, strategy)
        for number in range(offset, count, len(STRATEGIES)):
            batch = batch_of_rank(kind, number)
            report = fs.replay(step, state, batch)
            if report is not None:
                alarms.append(str(report))
            state, _ = step(state, batch)
    return alarms
