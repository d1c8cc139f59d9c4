"""What ranks do that keep copies of each other's states, each on a host of its own, for test_neighbours.py.

Hosts are pretended: a rank has a directory in the place of its host's memory.
"""

import os
import signal
import threading
import time
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

import fshard as fs
from fshard import checkpoint
from fshard.ext.memory import neighbours
from fshard.ext.memory.slots import list_parts
from tests.checkpoint.saving_process import mesh, state, write_line
from tests.checkpoint.states import assert_same, zeros_like

# The last one is not on the disk, where every second step is.
STEPS = 5
SECONDS = 30.0


def manager(directory, host):
    """Begin as a rank of a job with so many ranks on each host as LOCAL_WORLD_SIZE says."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=SECONDS))
    return checkpoint.Manager(f"{directory}/disk", memory=f"{directory}/host-{host}", every=2)


def be_one_of(ranks_on_host):
    os.environ |= {"FSHARD_JOB_ID": "1", "LOCAL_WORLD_SIZE": f"{ranks_on_host}"}
    return int(os.environ["RANK"]) // ranks_on_host


def wait_for_copies(kept):
    """Wait until this host has the copy of the newest state of each rank whose copies it keeps."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    source = (rank - int(os.environ["LOCAL_WORLD_SIZE"])) % ranks
    newest = kept._memory._number - 1
    deadline = time.monotonic() + SECONDS
    numbers = []
    while newest not in numbers:
        assert time.monotonic() < deadline, numbers
        values = [(part.number, part.outline.values["rank"]) for part in list_parts(kept._memory._directory)]
        numbers = [number for number, writer in values if writer == source]


def save(directory, ranks_on_host, way="all are killed"):
    """Save some steps, and be killed when all copies have come; or end well although no neighbour keeps any."""
    host = be_one_of(ranks_on_host)
    if way == "neighbours are gone":
        neighbours.receive_slot = refuse
    if way == "neighbours are slow":
        neighbours.receive_slot = lambda *arguments, **options: threading.Event().wait()
        neighbours.END_TIME = 0.1
    with warnings.catch_warnings(action="error"):
        kept = manager(directory, host)
        for step in range(1, STEPS + 1):
            kept.save(state(step), step)
            kept.wait()
            fs.psum(torch.ones(()), fs.axis_of(mesh()))
        if way == "all are killed":
            wait_for_copies(kept)
            fs.psum(torch.ones(()), fs.axis_of(mesh()))
            os.kill(os.getpid(), signal.SIGKILL)
        kept.close()


def refuse(*_, **__):
    raise ConnectionResetError("gone")


def restore(directory, ranks_on_host, *hosts):
    """Restore on some hosts, and write the step and the warnings."""
    place = be_one_of(ranks_on_host)
    with warnings.catch_warnings(record=True) as caught, manager(directory, hosts[place]) as kept:
        warnings.simplefilter("always")
        step = kept.latest_step()
        caught.clear()
        assert_same(kept.restore(zeros_like(state(0))), state(step))
        write_line("restored", step)
        for warning in caught:
            write_line("warned", warning.message)
