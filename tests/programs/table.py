"""The one table of programs, and the error of each against one process."""

import math
from functools import cache
from typing import Any

import torch.distributed as dist

import fshard as fs
from tests.programs.batches import BATCHES
from tests.programs.curvature import CURVATURE, JACOBIANS
from tests.programs.derivatives import DERIVATIVES
from tests.programs.learning import LEARNING
from tests.programs.sides import CHOSEN, Dense, OfRank, Program
from tests.programs.subjects import EPS, SUBJECTS, subject

PROGRAMS: dict[str, Program] = {**DERIVATIVES, **JACOBIANS, **BATCHES, **LEARNING, **CURVATURE}


def world_sizes(name: str, program: str) -> tuple[int, ...]:
    """One, two and another number of ranks, which is a different one for each subject of a program."""
    turn = list(SUBJECTS).index(name) + list(PROGRAMS).index(program)
    return (1, 2, (3, 4, 8)[(turn + 1) % 3])


def strategies(name: str, program: str, world_size: int) -> list[str]:
    """The strategies that a program is run with; two ranks run all of them over the subjects."""
    start = 2 * list(SUBJECTS).index(name) + list(PROGRAMS).index(program)
    names = [list(CHOSEN)[(start + i) % len(CHOSEN)] for i in range(3)]
    return names[:2] if world_size == 2 else names[2:]


@cache
def expected(name: str, program: str) -> dict[str, Any]:
    return PROGRAMS[program].dense(Dense(subject(name)))


def bound(name: str, program: str, world_size: int) -> float:
    """The largest error that sums of so many terms may have, relative to the largest element of a result."""
    return PROGRAMS[program].sweeps * (subject(name).terms + world_size) * EPS


def relative_error(name: str, program: str, strategy: str) -> float:
    """Run a program on this rank; return the largest difference, over the largest element of the result it is in."""
    found, needed = PROGRAMS[program].sharded(OfRank(subject(name), strategy)), expected(name, program)
    assert found.keys() == needed.keys()
    worst = 0.0
    for key, tree in needed.items():
        leaves, others = fs.tree_leaves(fs.unshard(found[key])), fs.tree_leaves(tree)
        assert [leaf.shape for leaf in leaves] == [leaf.shape for leaf in others]
        largest = max(leaf.abs().max().item() for leaf in others)
        difference = max((a.detach() - b).abs().max().item() for a, b in zip(leaves, others))
        # What follows would pass over NaN.
        assert math.isfinite(difference), f"{program} of {name}, {strategy}: {key} is not finite"
        worst = max(worst, difference / largest)
    return worst


def check(name: str, program: str, strategy: str) -> float:
    """Assert on this rank that a program has one process's results; return the error."""
    error, most = relative_error(name, program, strategy), bound(name, program, dist.get_world_size())
    assert error <= most, f"{program} of {name}, {strategy}: relative error {error:.2e}, at most {most:.2e}"
    return error
