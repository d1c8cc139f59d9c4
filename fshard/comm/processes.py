"""Which process a rank is, and how errors name ranks."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A process.

    Attributes:
        machine: The machine since it booted, and the part of it that numbers its processes; "" where nobody can tell.
        pid: The process's number there.
    """

    machine: str
    pid: int


def this_process() -> Process:
    """Find out which process this is."""
    pid = os.getpid()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return Process(f"{boot} {os.readlink('/proc/self/ns/pid')}", pid)
    except OSError:
        return Process("", pid)


def name_ranks(ranks: Sequence[int]) -> str:
    """List ranks in a sentence.

    >>> name_ranks([1]), name_ranks([1, 2]), name_ranks([0, 2, 5])
    ('rank 1', 'ranks 1 and 2', 'ranks 0, 2 and 5')
    """
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def describe_ended_ranks(ranks: Sequence[int]) -> str:
    """Say that the processes of some ranks have ended.

    >>> describe_ended_ranks([1]), describe_ended_ranks([1, 2])
    ('rank 1 was killed or has ended', 'ranks 1 and 2 were killed or have ended')
    """
    rest = "was killed or has ended" if len(ranks) == 1 else "were killed or have ended"
    return f"{name_ranks(ranks)} {rest}"
