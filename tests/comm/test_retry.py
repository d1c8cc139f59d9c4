"""A rank that fails in its first init_mesh: once all ranks call it again in the same processes, they train."""

import pytest

from tests.forked_programs import run_on_ranks

# The victim fails the first time that it calls each of some functions, before they do anything, or behind their end.
FAILS_ONCE = """
import os, sys, time, torch, torch.distributed as dist, fshard as fs
from fshard import _compat

victim, places, moment = int(sys.argv[1]), sys.argv[2].split(" and "), sys.argv[3]

def fail_once(owner, name):
    function = getattr(owner, name)

    def run(*args, **kwargs):
        setattr(owner, name, function)
        if moment == "behind":
            function(*args, **kwargs)
        raise MemoryError("no memory")

    setattr(owner, name, run)

owners = {
    "init_process_group": dist,
    "new_subgroups_by_enumeration": dist,
    "new_group": dist.distributed_c10d,
}
if int(os.environ["RANK"]) == victim:
    for place in places:
        fail_once(owners.get(place, _compat), place)

def make():
    return fs.init_mesh({"a": 2, "b": -1}, device="cpu", timeout=30.0)

begin = time.monotonic()
for _ in places:
    try:
        make()
        print("none")
    except BaseException as error:
        print(type(error).__name__, str(error).splitlines()[0])
for _ in range(2):
    mesh = make()
    total = torch.ones(())
    for name in ("a", "b"):
        total = fs.psum(total, fs.axis_of(mesh, name))
    print(total.item(), len(dist.distributed_c10d._world.pg_map))
print(time.monotonic() - begin)
"""
# The default group and those of the axes; of two ranks the first axis has the default group.
GROUPS = {2: 2, 4: 3}
TEXT = "rank {} failed in init_mesh: MemoryError: no memory"

# The number of ranks, the victim, the functions in which it fails, and whether before or behind them.
ROWS = [
    (4, 0, "init_process_group and new_group", "before"),
    pytest.param(4, 0, "init_process_group and new_group", "behind", marks=pytest.mark.slow),
    pytest.param(2, 1, "init_process_group", "before", marks=pytest.mark.slow),
    pytest.param(2, 0, "texts_in_store", "before", marks=pytest.mark.slow),
    pytest.param(2, 1, "make_pair", "before", marks=pytest.mark.slow),
    pytest.param(4, 3, "new_subgroups_by_enumeration", "before", marks=pytest.mark.slow),
    pytest.param(4, 2, "new_subgroups_by_enumeration", "behind", marks=pytest.mark.slow),
    pytest.param(4, 3, "init_process_group", "behind", marks=pytest.mark.slow),
    pytest.param(4, 1, "make_pair", "behind", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("size, victim, place, moment", ROWS)
def test_ranks_that_call_init_mesh_again_make_their_mesh(size, victim, place, moment):
    programs = run_on_ranks(size, FAILS_ONCE, victim, place, moment)
    for rank, program in enumerate(programs):
        assert program.code == 0, program
        *errors, before, after, seconds = program.output.splitlines()
        assert len(errors) == len(place.split(" and ")), program
        for error in errors:
            if rank == victim:
                assert error == "MemoryError no memory", program
            elif (place, error) != ("make_pair", "none"):
                # Ranks that have all their connections before a rank fails have a mesh.
                assert error == "CollectiveError " + TEXT.format(victim), program
        # Groups that only some ranks had made are gone, and a later mesh makes none.
        assert before == after == f"{float(size)} {GROUPS[size]}", program
        assert float(seconds) < 20.0, program
