"""Which process a rank is, and whether it has ended, as far as another process of its machine can tell."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

# The fields of /proc/<pid>/stat behind the command's name.
STATE_FIELD = 0
START_FIELD = 19


class Process(NamedTuple):
    """A process.

    Attributes:
        machine: The machine since it booted, and the part of it that numbers its processes; "" where nobody can tell.
        pid: The process's number there.
        start: When it started, which tells it from a later one of the same number.
    """

    machine: str
    pid: int
    start: str


def this_process() -> Process:
    """Find out which process this is."""
    pid = os.getpid()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return Process(f"{boot} {os.readlink('/proc/self/ns/pid')}", pid, _status(pid)[START_FIELD])
    except OSError:
        return Process("", pid, "")


def has_ended(process: Process) -> bool:
    """Tell whether a process has ended; False for one of another machine, of which this one cannot know.

    >>> has_ended(this_process()), has_ended(this_process()._replace(start="another"))
    (False, True)
    """
    if not process.machine or process.machine != this_process().machine:
        return False
    try:
        status = _status(process.pid)
    except OSError:
        return True
    # One that ended is a zombie until its parent has asked how.
    return status[STATE_FIELD] in "ZX" or status[START_FIELD] != process.start


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


def _status(pid: int) -> list[str]:
    # The command's name, in parentheses, may hold any character.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
