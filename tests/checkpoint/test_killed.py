"""kill -9 at random moments of real saves: the latest checkpoint is whole, and none that was complete is lost."""

import os
import shutil
import signal
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch

from fshard import checkpoint
from fshard.testing import spmd
from tests.checkpoint import saving_process
from tests.checkpoint.saving_process import state
from tests.checkpoint.states import assert_same, sampler, zeros_like
from tests.forked_programs import run_on_ranks


def kill_once(directory, ranks, kill, draw, first_step):
    """Start ranks that save, of which one is killed or all are at some moment, and look what is there.

    Returns the latest step, which the next start has, of another number of ranks.
    """
    is_asynchronous, is_close, is_of_all = bool(kill & 1), bool(kill & 2), bool(kill & 4) or ranks == 1
    victims = list(range(ranks)) if is_of_all else [draw.randrange(ranks)]
    arguments = (directory, first_step, is_asynchronous, is_close, victims, draw.random())
    programs = run_on_ranks(ranks, saving_process.run, *arguments)
    assert all(programs[victim].code == -signal.SIGKILL for victim in victims), programs
    events = Counter(line for program in programs for line in program.output.splitlines())
    # Ranks may be killed before they have written this for the first time.
    saved = max((int(event.split()[1]) for event in events if event.startswith("saved")), default=-1)
    written = max(int(event.split()[1]) for event, count in events.items() if event[0] == "w" and count == ranks)
    # The first rank completes what all ranks have written, if it is left.
    assert 0 in victims or checkpoint.latest_step(directory) >= written
    (latest,) = set(spmd(lambda: checkpoint.Manager(directory).latest_step(), draw.choice((1, 2, 4))))
    assert latest >= max(saved, written)
    check_all(directory)
    return latest


def steps_in(directory):
    return sorted(int(path.name[5:].partition(".")[0]) for path in directory.glob("step-*"))


def check_all(directory, make=state):
    """Every checkpoint that is there restores bitwise; returns the latest."""
    latest = checkpoint.latest_step(directory)
    for step in (None, *steps_in(directory)):
        expected = make(latest if step is None else step)
        assert_same(checkpoint.restore(directory, zeros_like(make(0)), step=step), expected)
    return latest


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kills, ranks", [(6, 1), *(pytest.param(n, ranks, marks=pytest.mark.slow) for n, ranks in ((50, 1), (100, 2)))]
)
def test_processes_killed_at_some_moments(kills, ranks, tmp_path):
    """Where the first rank is left it completes what all ranks have written; else the next start does."""
    directory, draw, latest = tmp_path / "run", sampler(70 + kills), -1
    for kill in range(kills):
        latest = kill_once(directory, ranks, kill, draw, first_step=latest + 1)
    # The next save works, and removes what the killed ones left, such as steps that none was there to remove.
    with checkpoint.Manager(directory, keep=2) as manager:
        manager.save(state(latest + 1), latest + 1)
    assert check_all(directory) == latest + 1
    assert steps_in(directory) == [latest, latest + 1]
    assert not [path.name for path in directory.iterdir() if path.name.startswith((".saving-", ".old-"))]


def small(step):
    return {"w": torch.full((30,), float(step)), "v": torch.arange(5) * step, "step": step}


class Snapshots:
    """Copies of a directory as it is before each call of the system that could change it."""

    def __init__(self, directory: Path, root: Path) -> None:
        self.directory = directory
        self.root = root
        self.copies: list[Path] = []
        self._lock = threading.RLock()
        self._is_copying = False

    def before(self, call):
        """The call, with what a kill at this moment would leave copied first."""

        def run(*arguments, **options):
            # Only the thread that copies is let in meanwhile: its own calls are not looked at.
            with self._lock:
                if not self._is_copying:
                    self._is_copying = True
                    self.copies.append(self.root / f"{len(self.copies)}")
                    shutil.copytree(self.directory, self.copies[-1])
                    self._is_copying = False
                return call(*arguments, **options)

        return run


@pytest.mark.parametrize("ranks", (1, 2))
def test_stopped_before_each_call_of_the_system(ranks, tmp_path, monkeypatch):
    """Exhaustive where real kills are random: the disk as it is before each change that a save makes to it."""
    base = tmp_path / "base"
    for step in (1, 2):
        spmd(lambda: checkpoint.save(base, small(step), step), ranks)  # noqa: B023
    snapshots = Snapshots(base, tmp_path)

    def program():
        with checkpoint.Manager(base, keep=2) as manager:
            manager.save(small(3), 3)

    with monkeypatch.context() as watched:
        for name in ("mkdir", "open", "fsync", "rename", "replace", "unlink", "rmdir"):
            watched.setattr(os, name, snapshots.before(getattr(os, name)))
        spmd(program, ranks)
    copies = snapshots.copies
    latest = [check_all(copy, small) for copy in copies]
    # Two are kept, and one is new.
    assert max(len(steps_in(copy)) for copy in copies) == 3
    assert (latest[0], latest[-1]) == (2, 3)
    assert latest == sorted(latest)
    assert len(latest) > 8
    # The next start completes what all ranks had written, and nothing else.
    written = [len(list(copy.glob(".saving-*/rank-*.json"))) == ranks for copy in copies]
    started = [checkpoint.Manager(copy).latest_step() for copy in copies]
    assert started == [3 if is_written else step for is_written, step in zip(written, latest, strict=True)]
    assert started != latest
    assert [check_all(copy, small) for copy in copies] == started
    assert sorted(path.name for path in base.glob("step-*")) == ["step-00000002.1", "step-00000003.2"]
