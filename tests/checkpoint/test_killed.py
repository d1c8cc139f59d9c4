"""kill -9 at random moments of real saves: the latest checkpoint is whole, and none that was complete is lost."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest
import torch

from fshard import checkpoint
from fshard.testing import spmd
from tests.checkpoint.saving_process import state
from tests.checkpoint.states import assert_same, sampler, zeros_like
from tests.test_processes import ROOT


class Saving(subprocess.Popen):
    """The process of saving_process.py, and what it says; the time of a test limits how long it is waited for."""

    def __init__(self):
        command = [sys.executable, "-m", "tests.checkpoint.saving_process"]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        super().__init__(command, cwd=ROOT, **pipes)

    def start_ranks(self, *command):
        print(json.dumps([str(command[0]), *command[1:]]), file=self.stdin, flush=True)
        return self.until("pids")[-1][1:]

    def until(self, kind):
        """What it says up to a line of a kind."""
        lines = []
        while not lines or lines[-1][0] != kind:
            lines.append(json.loads(self.stdout.readline()))
        return lines


@pytest.fixture(scope="module")
def saving():
    with Saving() as process:
        yield process
        process.kill()


def steps_in(directory):
    return sorted(int(path.name[5:].partition(".")[0]) for path in directory.glob("step-*"))


def check(directory, acknowledged, make=state):
    """The latest checkpoint is not older than what was complete, and every one that is there restores bitwise."""
    latest = checkpoint.latest(directory)
    assert latest >= acknowledged, "a complete checkpoint was lost"
    for step in (None, *steps_in(directory)):
        expected = make(latest if step is None else step)
        assert_same(checkpoint.restore(directory, zeros_like(make(0)), step=step), expected)
    return latest


def written_by(ranks, lines):
    """The steps of which each rank has said that it has written its part."""
    steps = Counter(line[1] for line in lines if line[0] == "written")
    return [step for step, count in steps.items() if count == ranks]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kills, ranks", [(6, 1), *(pytest.param(n, ranks, marks=pytest.mark.slow) for n, ranks in ((50, 1), (100, 2)))]
)
def test_processes_killed_at_some_moments(kills, ranks, saving, tmp_path):
    """Start ranks, kill one of them or all at some moment, look what is there, and go on from it.

    Where a rank is left, it completes what all ranks have written, also if the killed one was about to.
    """
    directory, draw, latest = tmp_path / "run", sampler(70 + kills), -1
    for kill in range(kills):
        pids = saving.start_ranks(directory, ranks, bool(kill % 2), latest + 1)
        lines = saving.until("saved")
        # The moment is the point: anywhere in a save.
        time.sleep(draw.random() * 0.3)
        victims = pids if kill % 4 == 3 else [draw.choice(pids)]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        lines += saving.until("ended")
        complete = [line[1] for line in lines if line[0] == "saved"]
        if len(victims) < ranks:
            complete += written_by(ranks, lines)
        latest = check(directory, max(complete))
    # The next save works, and removes what the killed ones left, such as steps that none was there to remove.
    with checkpoint.Manager(directory, keep=2) as manager:
        manager.save(state(latest + 1), latest + 1)
    assert check(directory, latest + 1) == latest + 1
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
    looks = [check(directory, 2, small) for directory in seen]
    # Two are kept, and one is new.
    assert max(len(steps_in(directory)) for directory in seen) == 3
    assert (looks[0], looks[-1]) == (2, 3)
    assert looks == sorted(looks)
    assert len(looks) > 8
    assert sorted(path.name for path in base.glob("step-*")) == ["step-00000002.1", "step-00000003.2"]
