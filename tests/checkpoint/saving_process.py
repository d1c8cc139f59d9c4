"""A process that starts others which save until they are killed; starting each from nothing takes seconds.

Run by test_killed.py as `python -m tests.checkpoint.saving_process`. It reads commands of one line, a JSON list
[directory, ranks, asynchronous, start, last part], and writes lines: ["pids", ...] when the ranks are there,
["saved", rank, step] when a save is complete, and ["failed", rank, text] when it is not. The part of the last rank is
written as usual for "", is cut short by a kill for "killed", and for "late" is written when the first rank's program is
over.
"""

import functools
import json
import os
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import fshard as fs
from fshard import checkpoint

SIZE = 400_000


@functools.cache
def mesh():
    """The mesh of this process: while one is made a killed rank is known of by the timeout alone."""
    return fs.init_mesh({"shard": -1}, device="cpu")


def state(step):
    """A state whose every value follows from the step."""
    full = {"w": torch.arange(SIZE, dtype=torch.float32) + step, "v": torch.arange(1001) * step, "step": step}
    if not dist.is_initialized():
        return full
    layout = fs.zero2(mesh(), min_shard_elements=0)
    return {**fs.shard({"w": full["w"], "v": full["v"]}, layout), "step": step}


def say(*what):
    os.write(1, f"{json.dumps(what)}\n".encode())


def wait_for(path):
    while not path.exists():
        time.sleep(0.005)


def change_last_part(directory, rank, ranks, last_part):
    """Have the last rank write its part otherwise, and the first one end as soon as the part is there."""
    over = Path(f"{directory}.over")
    inner = os.fsync

    def fsync(descriptor):
        if last_part == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for(over)
        inner(descriptor)

    def tell():
        threading.main_thread().join()
        over.touch()

    if rank == ranks - 1:
        os.fsync = fsync
    elif not rank:
        threading.Thread(target=tell).start()


def run(directory, rank, ranks, asynchronous, start, last_part, store):
    torch.set_num_threads(1)
    # For a part that comes late no time ends the wait.
    sys.modules["fshard.checkpoint.save"].PATIENCE = 1e4 if last_part == "late" else 0.5
    if ranks > 1:
        limit = timedelta(seconds=20)
        dist.init_process_group("gloo", f"file://{store}", world_size=ranks, rank=rank, timeout=limit)
    manager = checkpoint.Manager(directory, keep=2, asynchronous=asynchronous)
    previous = None
    if last_part:
        change_last_part(directory, rank, ranks, last_part)
    for step in range(start, 10**6):
        manager.save(state(step), step)
        if last_part and not rank:
            wait_for(next(Path(directory).glob(".saving-*")) / f"rank-{ranks - 1:05d}.safetensors")
            raise KeyError("the first rank's program ends")
        # A save waits for the one before it.
        done = previous if asynchronous else step
        previous = step
        if done is not None:
            say("saved", rank, done)


def main():
    for line in sys.stdin:
        directory, ranks, asynchronous, start, last_part = json.loads(line)
        store = f"{directory}.store-{start}"
        pids = []
        for rank in range(ranks):
            pid = os.fork()
            if not pid:
                try:
                    run(directory, rank, ranks, asynchronous, start, last_part, store)
                except BaseException as error:
                    say("failed", rank, "".join(traceback.format_exception(error)))
                # As a program ends: threads that write are waited for.
                sys.exit(1)
            pids.append(pid)
        say("pids", *pids)
        for pid in pids:
            os.waitpid(pid, 0)
        say("ended")


if __name__ == "__main__":
    main()
