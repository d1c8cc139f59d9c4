"""Which machine a rank is on, and how errors name ranks."""

import os
from collections.abc import Sequence
from pathlib import Path


def find_machine() -> str:
    """Find out which machine this is since it booted, and which part of it numbers processes; "" if nobody can tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


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
