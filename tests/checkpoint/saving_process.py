"""What ranks do that save until one of them is killed or all are, for test_killed.py.

Each writes lines: "written" and a step when it has written its part, and "saved" and a step when it has been told that
the save is complete.
"""

import functools
import os
import random
import signal
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

import fshard as fs
from fshard import checkpoint
from fshard.checkpoint import saving
from fshard.checkpoint.unfinished import Unfinished

SIZE = 400_000
# A save takes some ten milliseconds. A kill comes at any moment of it, or soon after a rank has written its part.
ANY_MOMENT = 0.3
SOON = 0.01


@functools.cache
def mesh():
    """The mesh of this process: while one is made a killed rank is known of by the timeout alone."""
    return fs.init_mesh({"shard": -1}, device="cpu")


def state(step):
    """A state whose every value follows from the step."""
    full = {"w": torch.arange(SIZE, dtype=torch.float32) + step, "v": torch.arange(1001) * step, "step": step}
    if not dist.is_initialized():
        return full
    return {**fs.shard({"w": full["w"], "v": full["v"]}, fs.zero2(mesh(), min_shard_elements=0)), "step": step}


def write_line(word, step):
    """Write a line at once; `print` writes pieces, between which another thread may write, or a kill may come."""
    os.write(sys.stdout.fileno(), f"{word} {step}\n".encode())


def kill_within(seconds, draw):
    threading.Timer(seconds * draw.random(), os.kill, (os.getpid(), signal.SIGKILL)).start()


def run(directory, first_step, asynchronous, is_close, victims, seed):
    """Save step after step; ranks that are victims are killed at some moment, or close to the end of a part."""
    rank = int(os.environ["RANK"])
    is_victim, draw = rank in victims, random.Random(f"{seed} {rank}")
    torch.set_num_threads(1)
    report = Unfinished.report

    def report_and_write(unfinished, rank, manifest):
        report(unfinished, rank, manifest)
        step = int(unfinished.path.name[5:13])
        write_line("written", step)
        # Before the second save all ranks have completed the first one, so that starting is over.
        if is_victim and is_close and step > first_step:
            kill_within(SOON, draw)

    Unfinished.report = report_and_write
    # A rank that is left waits so long for the part of one that was killed.
    saving.OTHERS_SECONDS = 2.0
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    with checkpoint.Manager(directory, keep=2, asynchronous=asynchronous) as manager:
        for step in range(first_step, 10**6):
            manager.save(state(step), step)
            # A save waits for the one before it.
            saved = step - asynchronous
            if saved < first_step:
                continue
            write_line("saved", saved)
            if is_victim and not is_close and saved == first_step:
                kill_within(ANY_MOMENT, draw)
