"""A rank that fails in its first init_mesh: once all ranks call it again in the same processes, they train."""

import pytest

from tests.comm.broken_meetings import fail_and_call_again
from tests.forked_programs import run_on_ranks

# The default group and those of the axes; of two ranks the first axis has the default group.
GROUPS = {2: 2, 4: 3}
TEXT = "rank {} failed in init_mesh: MemoryError: no memory"

# The number of ranks, the victim, the functions in which it fails, and whether before or behind them.
ROWS = [
    (4, 0, ["init_process_group", "new_group"], "before"),
    pytest.param(4, 0, ["init_process_group", "new_group"], "behind", marks=pytest.mark.slow),
    pytest.param(2, 1, ["init_process_group"], "before", marks=pytest.mark.slow),
    pytest.param(2, 0, ["agree"], "before", marks=pytest.mark.slow),
    pytest.param(2, 1, ["make_pair"], "before", marks=pytest.mark.slow),
    pytest.param(4, 3, ["new_subgroups_by_enumeration"], "before", marks=pytest.mark.slow),
    pytest.param(4, 2, ["new_subgroups_by_enumeration"], "behind", marks=pytest.mark.slow),
    pytest.param(4, 3, ["init_process_group"], "behind", marks=pytest.mark.slow),
    pytest.param(4, 1, ["make_pair"], "behind", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("size, victim, places, moment", ROWS)
def test_ranks_that_call_init_mesh_again_make_their_mesh(size, victim, places, moment):
    programs = run_on_ranks(size, fail_and_call_again, victim, places, moment)
    for rank, program in enumerate(programs):
        assert program.code == 0, program
        *errors, before, after, seconds = program.output.splitlines()
        assert len(errors) == len(places), program
        for error in errors:
            if rank == victim:
                assert error == "MemoryError no memory", program
            elif (places, error) != (["make_pair"], "none"):
                # Ranks that have all their connections before a rank fails have a mesh.
                assert error == "CollectiveError " + TEXT.format(victim), program
        # Groups that only some ranks had made are gone, and a later mesh makes none.
        assert before == after == f"{float(size)} {GROUPS[size]}", program
        assert float(seconds) < 20.0, program
