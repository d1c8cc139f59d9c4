"""A rank that fails in its first init_mesh, or a later one: once all ranks call it again, they train."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from fshard.mesh import ADDRESS
from tests.comm.broken_meetings import fail_and_call_again, start_on_two_nodes
from tests.forked_programs import run_on_ranks

# The default group and those of the axes; of two ranks the first axis has the default group.
GROUPS = {2: 2, 4: 3}
TEXT = "rank {} failed in init_mesh: MemoryError: no memory"

# The number of ranks, the victim, the functions in which it fails, whether before or behind them, and whether all have
# a mesh of another timeout, whose two groups stay.
ROWS = [
    (4, 1, ["make_pair"], "behind", 0),
    (4, 2, ["make_group"], "behind", 1),
    pytest.param(4, 0, ["init_process_group", "make_group"], "before", 0, marks=pytest.mark.slow),
    pytest.param(4, 0, ["init_process_group", "make_group"], "behind", 0, marks=pytest.mark.slow),
    (2, 1, ["init_process_group"], "before", 0),
    pytest.param(2, 0, ["agree"], "before", 0, marks=pytest.mark.slow),
    pytest.param(2, 1, ["make_pair"], "before", 0, marks=pytest.mark.slow),
    pytest.param(4, 3, ["make_group"], "before", 1, marks=pytest.mark.slow),
    pytest.param(4, 3, ["init_process_group"], "behind", 0, marks=pytest.mark.slow),
    pytest.param(4, 1, ["make_pair"], "behind", 1, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("size, victim, places, moment, meshes", ROWS)
def test_ranks_that_call_init_mesh_again_make_their_mesh(size, victim, places, moment, meshes):
    programs = run_on_ranks(size, fail_and_call_again, victim, places, moment, meshes)
    for rank, program in enumerate(programs):
        assert program.code == 0, program
        *errors, before, after, seconds = program.output.splitlines()
        expected = "MemoryError no memory" if rank == victim else "CollectiveError " + TEXT.format(victim)
        assert errors == [expected] * len(places), program
        # Groups that only some ranks had made are gone, and a later mesh makes none.
        assert before == after == f"{float(size)} {GROUPS[size] + 2 * meshes}", program
        assert float(seconds) < 20.0, program


def test_ranks_of_two_nodes_start_again_in_the_store_of_torchrun():
    """A rank that ended before it called init_mesh has counted fewer starts there than others; nodes count apart."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20))
    absent = "CollectiveError init_mesh: {} within 1 s"
    for rank, text in ((1, "expected the store of rank 0 or of the launcher at {}"), (0, "rank 1 did not call it")):
        program = run_on_ranks(2, start_on_two_nodes, store.port, [rank], 1.0)[rank]
        assert program.output.startswith(absent.format(text.format(f"127.0.0.1:{store.port}"))), program
    # Rank 0 was on another host before.
    store.set(ADDRESS, '["127.0.0.2", 1]')
    programs = run_on_ranks(2, start_on_two_nodes, store.port, [0, 1], 30.0)
    first, second = [program.output.splitlines() for program in programs]
    assert first == ["CollectiveError " + TEXT.format(1), "2.0"], programs
    assert second == ["MemoryError no memory", "2.0"], programs
