"""A process that starts others which save until they are killed; starting each from nothing takes seconds.

Run by test_killed.py as `python -m tests.checkpoint.saving_process`. It reads commands of one line, a JSON list
[directory, ranks, asynchronous, start], and writes lines: ["pids", ...] when the ranks are there, ["saved", step] when
a save is complete on a rank, and ["ended"] when all ranks are over.
"""

import functools
import json
import os
import sys
from datetime import timedelta

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


def run(directory, rank, ranks, asynchronous, start, store):
    torch.set_num_threads(1)
    if ranks > 1:
        limit = timedelta(seconds=20)
        dist.init_process_group("gloo", f"file://{store}", world_size=ranks, rank=rank, timeout=limit)
    manager = checkpoint.Manager(directory, keep=2, asynchronous=asynchronous)
    for step in range(start, 10**6):
        manager.save(state(step), step)
        # A save waits for the one before it.
        if step - asynchronous >= start:
            say("saved", step - asynchronous)


def main():
    for line in sys.stdin:
        directory, ranks, asynchronous, start = json.loads(line)
        store, pids = f"{directory}.store-{start}", []
        for rank in range(ranks):
            pid = os.fork()
            if not pid:
                try:
                    run(directory, rank, ranks, asynchronous, start, store)
                finally:
                    # Also where a rank that is left ends by an error.
                    os._exit(1)
            pids.append(pid)
        say("pids", *pids)
        for pid in pids:
            os.waitpid(pid, 0)
        say("ended")


if __name__ == "__main__":
    main()
