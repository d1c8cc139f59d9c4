"""Runs that are killed go on from their last checkpoint as if nothing had been, on as many ranks as there then are."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.test_processes import ROOT, TORCHRUN

EXAMPLE, STEPS = ROOT / "examples/train_gpt.py", 60
OPTIONS = ("--preset", "tiny", "--steps", STEPS, "--save-every", 4, "--sample", 4)
TIMEOUT = 240


def train(directory, ranks, *options, kill_at=()):
    """Run the example to its end; kill a rank, by turns, each time that so many losses are there."""
    launcher = [*TORCHRUN, ranks, f"--max-restarts={len(kill_at)}"]
    command = [*launcher, EXAMPLE, "--directory", directory, *OPTIONS, *options]
    with open(directory.with_suffix(".out"), "w+") as output:
        process = subprocess.Popen([str(part) for part in command], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + TIMEOUT
            for turn, step in enumerate(kill_at):
                while step not in losses_of(directory):
                    assert time.monotonic() < deadline, f"no step {step}"
                    time.sleep(0.01)
                    assert process.poll() is None, "ended before it was killed"
                os.kill(workers_of(process.pid)[turn % ranks], signal.SIGKILL)
            code = process.wait(deadline - time.monotonic())
        finally:
            process.kill()
            output.seek(0)
            printed = output.read()
            print(printed)
    assert code == 0
    assert printed.count("exitcode: -9") == len(kill_at)
    return losses_of(directory)


def workers_of(launcher):
    """The ranks' processes, which are the launcher's children that run the example."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    example = os.fsencode(EXAMPLE)
    return [int(pid) for pid in children if example in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]


def losses_of(directory):
    """Losses by step, without a last line that is being written."""
    path = directory / "losses.txt"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [line.split() for line in lines if line.endswith("\n")]
    return {int(step): float(loss) for step, loss, _ in rows}


@pytest.mark.slow
@pytest.mark.timeout(8 * TIMEOUT)
@pytest.mark.parametrize("precision", ("float32", "bfloat16"))
def test_run_has_the_same_bits_at_other_world_sizes(tmp_path, precision):
    """With dropout, and kills on the way; the last checkpoints are both of one rank."""
    options = ("--reduction-order", "tree", "--precision", precision)
    expected = train(tmp_path / "alone", 1, *options)
    for ranks, steps in ((4, 20), (2, 32), (8, 44), (1, STEPS)):
        killed = (steps - 7,) if ranks < 8 else ()
        moved = train(tmp_path / "moved", ranks, *options, "--stop-at", steps, kill_at=killed)
    assert list(expected) == list(range(STEPS))
    assert moved == expected
    last = f"checkpoints/step-{STEPS:08}.*/*0.safetensors"
    files = (sorted((tmp_path / name).glob(last))[-1] for name in ("moved", "alone"))
    assert len({file.read_bytes() for file in files}) == 1
