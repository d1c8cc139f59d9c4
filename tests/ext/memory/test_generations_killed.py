"""kill -9 of real ranks in each phase of a generation and of a restart: at most one completed step is repeated."""

import signal

import pytest

from tests.ext.memory import remembering_process
from tests.forked_programs import run_on_ranks

# The phase, whether the kill comes in the first call of a start, and how many ranks there are.
FEW = (("copy", False, 2), ("mark", False, 1), ("read", True, 1))
MORE = (
    ("mark", False, 2),
    ("read", True, 3),
    ("copy", True, 1),
    ("open", True, 2),
    ("agree", True, 3),
    ("copy", False, 3),
    ("find", True, 1),
    ("mark", True, 1),
)


def steps_of(programs, word):
    """The last step that each rank wrote after a word; 0 where it wrote none."""
    last = []
    for program in programs:
        steps = [int(line.split()[1]) for line in program.output.splitlines() if line.startswith(word)]
        last.append(max(steps, default=0))
    return last


@pytest.mark.timeout(200)
@pytest.mark.parametrize("kills", (FEW, pytest.param(MORE, marks=pytest.mark.slow)), ids=("few", "more"))
def test_ranks_killed_in_each_phase(kills, tmp_path):
    """Each start goes on where the one before was killed, with another number of ranks."""
    saved = 0
    for phase, is_early, ranks in kills:
        victim = ranks - 1
        programs = run_on_ranks(ranks, remembering_process.run, tmp_path, phase, victim, is_early, timeout=60)
        assert programs[victim].code == -signal.SIGKILL, programs
        restored = max(steps_of(programs, "restored"))
        # A rank may be killed before it can say that it has saved, and before any has said that it has restored.
        assert saved <= restored <= saved + 1 or (is_early and restored == 0), (phase, programs)
        saved = max(saved, restored, min(steps_of(programs, "saved")))
    (program,) = run_on_ranks(1, remembering_process.look, tmp_path, timeout=60)
    assert program.code == 0, program
    assert steps_of([program], "restored")[0] - saved in (0, 1)
    assert list((tmp_path / "memory").iterdir()) == []
