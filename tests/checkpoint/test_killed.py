"""kill -9 at random moments of real saves: the latest checkpoint is whole, and none that was complete is lost."""

import os
import shutil
import threading

import pytest
import torch

from fshard import checkpoint
from fshard.testing import spmd
from tests.checkpoint.kills import SavingProcess, check_all, kill_often, steps_in
from tests.checkpoint.saving_process import state


@pytest.fixture(scope="module")
def process():
    with SavingProcess() as process:
        yield process
        process.kill()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kills, ranks", [(6, 1), *(pytest.param(n, ranks, marks=pytest.mark.slow) for n, ranks in ((50, 1), (100, 2)))]
)
def test_processes_killed_at_some_moments(kills, ranks, process, tmp_path):
    """Where a rank is left it completes what all ranks have written; else the next start does."""
    directory = tmp_path / "run"
    counts = kill_often(process, directory, kills, ranks)
    assert counts.kills == kills
    assert counts.left_by_one == 0
    assert (counts.lost_saved, counts.lost_written) == ([], [])
    # The next save works, and removes what the killed ones left, such as steps that none was there to remove.
    latest = checkpoint.latest_step(directory)
    with checkpoint.Manager(directory, keep=2) as manager:
        manager.save(state(latest + 1), latest + 1)
    assert check_all(directory) == latest + 1
    assert steps_in(directory) == [latest, latest + 1]
    assert not [path.name for path in directory.iterdir() if path.name.startswith((".saving-", ".old-"))]


def small(step):
    return {"w": torch.full((30,), float(step)), "v": torch.arange(5) * step, "step": step}


@pytest.mark.parametrize("ranks", (1, 2))
def test_stopped_before_each_call_of_the_system(ranks, tmp_path, monkeypatch):
    """Exhaustive where real kills are random: the disk as it is before each change that a save makes to it."""
    base = tmp_path / "base"
    for step in (1, 2):
        spmd(lambda: checkpoint.save(base, small(step), step), ranks)  # noqa: B023
    seen, lock, looking = [], threading.RLock(), threading.local()

    def before(inner):
        """Copy what a kill at this moment would leave; without its own calls being looked at."""

        def call(*arguments, **keywords):
            with lock:
                if not getattr(looking, "now", False):
                    looking.now = True
                    seen.append(tmp_path / f"{len(seen)}")
                    shutil.copytree(base, seen[-1])
                    looking.now = False
                return inner(*arguments, **keywords)

        return call

    def program():
        with checkpoint.Manager(base, keep=2) as manager:
            manager.save(small(3), 3)

    with monkeypatch.context() as watched:
        for name in ("mkdir", "open", "fsync", "rename", "replace", "unlink", "rmdir"):
            watched.setattr(os, name, before(getattr(os, name)))
        spmd(program, ranks)
    looks = [check_all(directory, small) for directory in seen]
    # Two are kept, and one is new.
    assert max(len(steps_in(directory)) for directory in seen) == 3
    assert (looks[0], looks[-1]) == (2, 3)
    assert looks == sorted(looks)
    assert len(looks) > 8
    # The next start completes what all ranks had written, and nothing else.
    written = [len(list(directory.glob(".saving-*/rank-*.json"))) == ranks for directory in seen]
    started = [checkpoint.Manager(directory).latest_step() for directory in seen]
    assert started == [3 if is_written else look for is_written, look in zip(written, looks)]
    assert started != looks
    assert [check_all(directory, small) for directory in seen] == started
    assert sorted(path.name for path in base.glob("step-*")) == ["step-00000002.1", "step-00000003.2"]
