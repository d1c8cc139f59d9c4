"""kill -9 at random moments of real saves: the latest checkpoint is whole, and none that was complete is lost."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from fshard import checkpoint
from fshard.testing import spmd
from tests.checkpoint.saving_process import state
from tests.checkpoint.states import assert_same, sampler, zeros_like

ROOT = Path(__file__).parents[2]
SECONDS = 60


class Saving:
    """The process of saving_process.py, and what it says."""

    def __init__(self):
        command = [sys.executable, "-m", "tests.checkpoint.saving_process"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )
        self.said = queue.SimpleQueue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.said.put(json.loads(line))
        self.said.put(["gone"])

    def start(self, directory, ranks, asynchronous, start, last_part=""):
        self.process.stdin.write(json.dumps([str(directory), ranks, asynchronous, start, last_part]) + "\n")
        self.process.stdin.flush()
        return self.until("pids")[-1][1:]

    def until(self, *kinds):
        """What it says up to a line of one of these kinds."""
        lines = []
        deadline = time.monotonic() + SECONDS
        while not lines or lines[-1][0] not in kinds:
            lines.append(self.said.get(timeout=max(0.0, deadline - time.monotonic())))
            assert lines[-1][0] != "gone"
        return lines

    def close(self):
        self.process.stdin.close()
        try:
            self.process.wait(SECONDS)
        finally:
            self.process.kill()
            self.reader.join(SECONDS)
            self.process.stdout.close()


@pytest.fixture(scope="module")
def saving():
    process = Saving()
    yield process
    process.close()


def check(directory, acknowledged, make=state):
    """The latest checkpoint is not older than what was complete, and every one that is there restores bitwise."""
    latest = checkpoint.latest(directory)
    assert acknowledged is None or latest >= acknowledged, "a complete checkpoint was lost"
    names = [path.name for path in directory.glob("step-*")]
    # Two are kept, and one is new.
    assert len(names) <= 3
    # A step is there twice where a kill came before `latest` named it.
    steps = {int(name[5:].partition(".")[0]) for name in names}
    assert latest is None or latest in steps
    for step in (None, *steps) if steps else ():
        expected = make(latest if step is None else step)
        assert_same(checkpoint.restore(directory, zeros_like(make(0)), step=step), expected)
    return latest


def kill_often(saving, directory, number, ranks, seed):
    """Start ranks, kill one of them at some moment, look what is there, and go on from it."""
    draw, latest = sampler(seed), -1
    for kill in range(number):
        pids = saving.start(directory, ranks, bool(kill % 2), latest + 1)
        lines = saving.until("saved")
        # The moment is the point: anywhere in a save.
        time.sleep(draw.random() * 0.3)
        os.kill(draw.choice(pids), signal.SIGKILL)
        lines += saving.until("ended")
        latest = check(directory, max(line[2] for line in lines if line[0] == "saved"))
    # The next save works, and removes what the killed ones left.
    checkpoint.save(directory, state(latest + 1), latest + 1)
    assert checkpoint.latest(directory) == latest + 1
    assert_same(checkpoint.restore(directory, zeros_like(state(0))), state(latest + 1))
    assert not [path.name for path in directory.iterdir() if path.name.startswith((".saving-", ".old-"))]


def test_a_process_killed_at_some_moments(saving, tmp_path):
    kill_often(saving, tmp_path / "run", 6, ranks=1, seed=70)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", (1, 2))
def test_killed_at_many_moments(ranks, saving, tmp_path):
    kill_often(saving, tmp_path / "run", 50 if ranks == 1 else 20, ranks=ranks, seed=72 + ranks)


@pytest.mark.parametrize("ranks", (1, 2))
def test_stopped_before_each_call_of_the_system(ranks, tmp_path, monkeypatch):
    """Exhaustive where real kills are random: the disk as it is before each change that a save makes to it."""
    base = tmp_path / "base"
    for step in (1, 2):
        spmd(lambda: checkpoint.save(base, small(step), step), ranks)  # noqa: B023
    looks, lock, inside = [], threading.RLock(), threading.local()

    def before(inner):
        """Restore from what a kill at this moment would leave; without its own calls being looked at."""

        def call(*arguments, **keywords):
            of_a_save = threading.current_thread().name.startswith("checkpoint.save")
            if getattr(inside, "looking", False) or not of_a_save:
                return inner(*arguments, **keywords)
            with lock:
                inside.looking = True
                try:
                    looks.append(check(base, 2, small))
                finally:
                    inside.looking = False
                return inner(*arguments, **keywords)

        return call

    with monkeypatch.context() as watched:
        for name in ("mkdir", "open", "fsync", "replace", "rename", "unlink", "remove", "rmdir"):
            watched.setattr(os, name, before(getattr(os, name)))

        def program():
            with checkpoint.Manager(base, keep=2) as manager:
                manager.save(small(3), 3)

        spmd(program, ranks)
    assert (looks[0], looks[-1]) == (2, 3)
    assert looks == sorted(looks)
    assert len(looks) > 15
    assert sorted(path.name for path in base.glob("step-*")) == ["step-00000002", "step-00000003"]


def small(step):
    return {"w": torch.full((30,), float(step)), "v": torch.arange(5) * step, "step": step}


def test_parts_that_come_late_or_never(saving, tmp_path):
    """The first rank's program is over: it waits for a writer that is alive, and not long for one that was killed."""
    saving.start(tmp_path / "late", 2, True, 0, "late")
    saving.until("ended")
    assert check(tmp_path / "late", None) == 0
    saving.start(tmp_path / "run", 3, True, 0, "killed")
    lines = saving.until("ended")
    assert sorted(line[1] for line in lines if line[0] == "failed") == [0, 1]
    assert check(tmp_path / "run", None) is None
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
