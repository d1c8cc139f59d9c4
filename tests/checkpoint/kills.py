"""Kill processes that save at random moments, start again, and count what was lost.

PYTHONPATH=. python -m tests.checkpoint.kills --kills 400
"""

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from fshard import checkpoint
from fshard.testing import spmd
from tests.checkpoint.saving_process import state
from tests.checkpoint.states import assert_same, sampler, zeros_like
from tests.test_processes import ROOT

# A save takes some ten milliseconds. A kill comes at any moment of it, or soon after a rank has written its part.
ANY_MOMENT = 0.3
SOON = 0.01


class SavingProcess(subprocess.Popen):
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


@dataclasses.dataclass
class Counts:
    """What became of saves.

    Attributes:
        kills: How often ranks were killed.
        of_all: How often all ranks were.
        left_by_all: How often all ranks were killed after all had written the newest save, but before it had its name.
        left_by_one: The same, where a rank was left to name it.
        lost_saved: Steps that a rank had been told are saved, and that were lost, or older steps in their place.
        lost_written: Steps that all ranks had written, and that the next start did not have.
    """

    kills: int = 0
    of_all: int = 0
    left_by_all: int = 0
    left_by_one: int = 0
    lost_saved: list[int] = dataclasses.field(default_factory=list)
    lost_written: list[int] = dataclasses.field(default_factory=list)


def kill_often(process, directory, kills, ranks):
    """Start ranks that save, kill one of them or all at some moment, look what is there, and go on from it.

    Every checkpoint that is there must be whole. The next start is of another number of ranks.
    """
    counts, draw, latest = Counts(), sampler(70 + kills), -1
    for kill in range(kills):
        is_asynchronous, is_close, is_of_all = bool(kill & 1), bool(kill & 2), bool(kill & 4) or ranks == 1
        pids = process.start_ranks(directory, ranks, is_asynchronous, latest + 1)
        lines = process.until("saved")
        if is_close:
            lines += process.until("written")
        # The moment is the point: anywhere in a save.
        time.sleep(draw.random() * (SOON if is_close else ANY_MOMENT))
        for pid in pids if is_of_all else [draw.choice(pids)]:
            os.kill(pid, signal.SIGKILL)
        lines += process.until("ended")
        saved = max(line[1] for line in lines if line[0] == "saved")
        written = max(written_by_all(ranks, lines))
        before = checkpoint.latest_step(directory)
        (latest,) = set(spmd(lambda: checkpoint.Manager(directory).latest_step(), draw.choice((1, 2, 4))))
        counts.kills += 1
        counts.of_all += is_of_all
        if before < written:
            counts.left_by_all += is_of_all
            counts.left_by_one += not is_of_all
        if latest < saved:
            counts.lost_saved.append(saved)
        if latest < written:
            counts.lost_written.append(written)
        check_all(directory)
    return counts


def written_by_all(ranks, lines):
    """The steps of which each rank has said that it has written its part."""
    steps = Counter(line[1] for line in lines if line[0] == "written")
    return [step for step, count in steps.items() if count == ranks]


def steps_in(directory):
    return sorted(int(path.name[5:].partition(".")[0]) for path in directory.glob("step-*"))


def check_all(directory, make=state):
    """Every checkpoint that is there restores bitwise; returns the latest."""
    latest = checkpoint.latest_step(directory)
    for step in (None, *steps_in(directory)):
        expected = make(latest if step is None else step)
        assert_same(checkpoint.restore(directory, zeros_like(make(0)), step=step), expected)
    return latest


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=400)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, SavingProcess() as process:
        counts = kill_often(process, Path(directory) / "run", args.kills, args.ranks)
        process.kill()
    for name, value in dataclasses.asdict(counts).items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
