"""What ranks do that save and end in some way, for test_exits.py."""

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import fshard as fs
from fshard import checkpoint
from fshard.checkpoint import saving

SLOW_SECONDS = 0.1


def state(step):
    full = {"w": torch.arange(1000.0) + step, "v": torch.arange(7) * step}
    if not dist.is_initialized():
        return full
    return fs.shard(full, fs.zero2(fs.init_mesh({"shard": -1}, device="cpu"), min_shard_elements=0))


def in_block(directory, end):
    with checkpoint.Manager(directory, keep=1) as manager:
        manager.save(state(2), 2)
        end()


def without_close(directory, end):
    checkpoint.Manager(directory, keep=1).save(state(2), 2)
    end()


def leave():
    sys.exit(3)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)


def fail():
    raise ZeroDivisionError("an error of the step")


# For each ending a function of a directory that saves step 2, how the program goes on, and its exit code.
ENDINGS = {
    "in_block, interrupt": (in_block, interrupt, -signal.SIGINT),
    "in_block, fail": (in_block, fail, 1),
    "without_close, leave": (without_close, leave, 3),
    "without_close, end": (without_close, lambda: None, 0),
}


def make_disk_slow(rank, ranks):
    """Make each file take some time to be on the disk."""
    fsync = os.fsync

    def slow_fsync(descriptor):
        time.sleep(SLOW_SECONDS * (1 + rank))
        fsync(descriptor)

    os.fsync = slow_fsync


def make_disk_hang(rank, ranks):
    """Make the file of the last rank take longer than anybody waits."""
    saving.EXIT_SECONDS = saving.OTHERS_SECONDS = 0.3
    if rank == ranks - 1:
        os.fsync = lambda descriptor: time.sleep(600)


def fill_disk(rank, ranks):
    def failing_fsync(descriptor):
        raise OSError(28, "No space left on device")

    os.fsync = failing_fsync


PATCHES = {"slow": make_disk_slow, "hang": make_disk_hang, "full disk": fill_disk}


def run(directory, ending, patch):
    """What each rank does."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    checkpoint.save(directory, state(1), 1)
    PATCHES[patch](rank, ranks)
    save_and_end, end, _ = ENDINGS[ending]
    save_and_end(directory, end)
