"""Killed at any moment of a save: the latest checkpoint is whole, and none that was complete is lost."""

import os
import shutil
import threading
from pathlib import Path

import pytest
import torch

from fshard import checkpoint
from fshard.testing import spmd
from tests.checkpoint.states import assert_same, zeros_like


def steps_in(directory):
    return sorted(int(path.name[5:].partition(".")[0]) for path in directory.glob("step-*"))


def check_all(directory):
    """Every checkpoint that is there restores bitwise; returns the latest."""
    latest = checkpoint.latest_step(directory)
    for step in (None, *steps_in(directory)):
        expected = small(latest if step is None else step)
        assert_same(checkpoint.restore(directory, zeros_like(small(0)), step=step), expected)
    return latest


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
    """The disk as it is before each change that a save makes to it."""
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
    latest = [check_all(copy) for copy in copies]
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
    assert [check_all(copy) for copy in copies] == started
    assert sorted(path.name for path in base.glob("step-*")) == ["step-00000002.1", "step-00000003.2"]
