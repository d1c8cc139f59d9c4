"""A process that starts others which save until they are killed; starting each from nothing takes seconds.

Run by test_killed.py as `python -m tests.checkpoint.saving_process`. It reads commands of one line, a JSON list
[directory, ranks, asynchronous, start], and writes lines: ["pids", ...] when the ranks are there, ["written", step,
rank] when a rank has written its part, ["saved", step] when a save is complete on a rank, and ["ended"] when all ranks
are over.
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
from fshard.checkpoint import background
from fshard.checkpoint.unfinished import Unfinished

SIZE = 400_000
# A rank that is left waits so long for the part of one that was killed.
OTHERS_SECONDS = 2.0


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
    background.OTHERS_SECONDS = OTHERS_SECONDS
    tell_of_parts()
    with checkpoint.Manager(directory, keep=2, asynchronous=asynchronous) as manager:
        for step in range(start, 10**6):
            manager.save(state(step), step)
            # A save waits for the one before it.
            if step - asynchronous >= start:
                say("saved", step - asynchronous)


def tell_of_parts():
    """Say when this rank has written its part, which the package does not."""
    inner = Unfinished.report

    def report(unfinished, rank, content):
        inner(unfinished, rank, content)
        say("written", int(unfinished.path.name[5:13]), rank)

    Unfinished.report = report


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
