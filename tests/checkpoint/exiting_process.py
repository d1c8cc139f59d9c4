"""A program that forks ranks which save and end in some way; starting each from nothing takes seconds.

Run by test_exits.py as `python -m tests.checkpoint.exiting_process DIRECTORY`. For each line of its input, a JSON list
[name, ending, ranks, patches], it forks ranks that save to DIRECTORY/name, and writes a line: the exit codes of the
ranks, and what each wrote to standard error.
"""

import contextlib
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import fshard as fs
from fshard import checkpoint
from fshard.checkpoint import background

SLOW_SECONDS = 0.4


def state(step):
    full = {"w": torch.arange(1000.0) + step, "v": torch.arange(7) * step}
    if not dist.is_initialized():
        return full
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    return fs.shard(full, fs.zero2(mesh, min_shard_elements=0))


def in_block(directory, end):
    with checkpoint.Manager(directory, keep=1) as manager:
        manager.save(state(2), 2)
        end()


def without_close(directory, end):
    checkpoint.Manager(directory, keep=1).save(state(2), 2)
    end()


def without_manager(directory, end):
    checkpoint.save(directory, state(2), 2, keep=1, asynchronous=True)
    end()


def leave():
    sys.exit(3)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)


def fail():
    raise ZeroDivisionError("an error of the step")


# For each ending a function of a directory that saves step 2, and how the program goes on.
ENDINGS = {
    f"{how.__name__}, {end.__name__}": (how, end)
    for how in (in_block, without_close, without_manager)
    for end in (leave, interrupt, fail)
} | {"without_close, end": (without_close, lambda: None)}


def slow(rank):
    """Make each file take some time to be on the disk."""
    inner = os.fsync

    def fsync(descriptor):
        time.sleep(SLOW_SECONDS * (1 + rank))
        inner(descriptor)

    os.fsync = fsync


def hang(rank):
    """Make the file of the last rank take longer than anybody waits."""
    background.EXIT_SECONDS = background.OTHERS_SECONDS = 0.3
    if rank == int(os.environ["RANKS"]) - 1:
        os.fsync = lambda descriptor: time.sleep(600)


def full_disk(rank):
    def fsync(descriptor):
        raise OSError(28, "No space left on device")

    os.fsync = fsync


PATCHES = {"slow": slow, "hang": hang, "full_disk": full_disk}


def run(directory, ending, rank, ranks, patch):
    torch.set_num_threads(1)
    os.environ["RANKS"] = str(ranks)
    if ranks > 1:
        store, limit = f"file://{directory}.store", timedelta(seconds=20)
        dist.init_process_group("gloo", store, world_size=ranks, rank=rank, timeout=limit)
    checkpoint.save(directory, state(1), 1)
    PATCHES[patch](rank)
    how, end = ENDINGS[ending]
    how(directory, end)


def main(root):
    for line in sys.stdin:
        name, ending, ranks, patch = json.loads(line)
        directory = root / name
        children = []
        for rank in range(ranks):
            pid = os.fork()
            if not pid:
                # A rank ends as a program does: its errors leave this function, and the interpreter.
                os.dup2(os.open(f"{directory}.error-{rank}", os.O_WRONLY | os.O_CREAT), 2)
                run(directory, ending, rank, ranks, patch)
                return
            children.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
        told = [Path(f"{directory}.error-{rank}").read_text() for rank in range(ranks)]
        os.write(1, f"{json.dumps([codes, told])}\n".encode())


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main(Path(sys.argv[1]))
