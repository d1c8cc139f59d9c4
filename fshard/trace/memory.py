"""Memory: a meter that is cheap enough to be read at every collective."""

import os
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch

RESIDENT, PEAK, CUDA = "resident set", "peak resident set", "CUDA allocations"


class Meter(NamedTuple):
    """What reads the memory of this process.

    Attributes:
        name: What it counts.
        read: Bytes now.
        close: To be called when it is not needed any more.
    """

    name: str
    read: Callable[[], int]
    close: Callable[[], None]


def meter() -> Meter:
    """The resident set of the process, as Linux counts it in pages; elsewhere its peak, which never falls."""
    try:
        # Kept open: to read a few bytes of it takes two microseconds.
        file = os.open("/proc/self/statm", os.O_RDONLY)
    except OSError:
        return Meter(PEAK, _peak, lambda: None)
    page = os.sysconf("SC_PAGE_SIZE")
    return Meter(RESIDENT, lambda: page * int(os.pread(file, 64, 0).split()[1]), lambda: os.close(file))


def cuda_meter(device: torch.device) -> Meter:
    """What torch's allocator has given out on a CUDA device."""
    read = torch.cuda.memory.memory_stats_as_nested_dict
    return Meter(CUDA, lambda: read(device)["allocated_bytes"]["all"]["current"], lambda: None)


def _peak() -> int:
    try:
        import resource
    except ImportError:
        return 0
    # In KiB, but for macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
