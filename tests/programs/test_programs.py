"""Every torch.func program on sharded parameters has the numbers of one process."""

import pytest

from fshard.testing import spmd
from tests.programs.batches import LONGEST, rows_dense
from tests.programs.curvature import rows_of
from tests.programs.sides import CHOSEN, Dense
from tests.programs.subjects import COUNTS, ROWS, SUBJECTS, subject
from tests.programs.table import PROGRAMS, check, expected, strategies, world_sizes
from tests.ranks import on_ranks

CASES = [(program, name, n) for program in PROGRAMS for name in SUBJECTS for n in world_sizes(name, program)]


@pytest.mark.rows(4)
@pytest.mark.parametrize("program, name, world_size", CASES)
def test_program(program, name, world_size):
    # Once for all ranks.
    expected(name, program)
    spmd(lambda: [check(name, program, chosen) for chosen in strategies(name, program, world_size)], world_size)


# One of each kind: forward over backward, a whole matrix, nested vmap, an optimizer, inner products.
ON_PROCESSES = (
    "hvp, jvp of value_and_grad",
    "hessian, jacfwd of jacrev",
    "vmap, nested",
    "DP-SGD",
    "learned rate, fs.adam",
    "conjugate gradients",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", SUBJECTS)
@on_ranks("2 processes")
def test_programs_on_processes(name):
    return [check(name, program, chosen) for program in ON_PROCESSES for chosen in ("zero3", "hsdp")]


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_world_size_and_strategy_is_run(program):
    runs = {
        (n, chosen) for name in SUBJECTS for n in world_sizes(name, program) for chosen in strategies(name, program, n)
    }
    assert {n for n, _ in runs} == set(COUNTS)
    assert {chosen for n, chosen in runs if n > 1} == set(CHOSEN)


@pytest.mark.parametrize("name", SUBJECTS)
def test_dp_sgd_clips_some_rows(name):
    norms = rows_of(rows_dense(Dense(subject(name)))).norm(dim=1)
    assert 0 < (norms > LONGEST).sum() < ROWS


def test_rows_of_all_ranks_are_the_batch():
    assert all(len(counts) == ranks and sum(counts) == ROWS for ranks, counts in COUNTS.items())
