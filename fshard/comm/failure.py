"""Failure: what is said where a collective fails, with what every rank that can be asked was doing."""

from typing import TYPE_CHECKING

import torch.distributed as dist

from fshard import _compat
from fshard.comm.labels import parts

if TYPE_CHECKING:
    from fshard.comm.journal import Issued, Journal

# Seconds in which the other ranks may answer; those that fail with this one do so at once.
ANSWERS = 1.0

# Of the backend's own text.
WIDTH = 200


class CollectiveError(RuntimeError):
    """A collective failed: a rank is gone, late beyond the process group's timeout, or does something else."""


def explained(issued: "Issued", book: "Journal", error: Exception) -> CollectiveError:
    """Say which collective failed, and what this rank and the others finished last.

    A rank that fails leaves a note in the store by which the ranks had found each other, and reads those of the others.
    Until then nothing is written there.

    Args:
        issued: The collective.
        book: What this rank has done.
        error: What the backend says.

    Returns:
        The error, for the caller to raise.
    """
    what, last = described(issued), described(book.finished) if book.finished else "nothing"
    own, ranks = dist.get_rank(), _compat.group_ranks(issued.group)
    said = {own: f"failed in {what}; finished last: {last}"}
    failures = book.failed[issued.group] = book.failed.get(issued.group, 0) + 1
    # Notes of a group's first failure are not read at its second one.
    said |= _compat.exchange_notes(f"fshard/{issued.group}/{failures}", own, said[own], ranks, ANSWERS)
    silent = f"did not answer within {ANSWERS:g} s: it was killed, has ended, hangs or computes"
    leaves = parts(issued.label).leaves
    backend = (str(error).splitlines() or [type(error).__name__])[0]
    lines = [
        f"{what} failed on rank {own}",
        f"  backend: {backend[:WIDTH]}",
        *([f"  leaves: {leaves}"] if leaves else []),
        *(f"  rank {rank}{', this one' if rank == own else ''}: {said.get(rank, silent)}" for rank in ranks),
        f"To fix: {_remedy([rank for rank in ranks if rank not in said], said)}.",
    ]
    return CollectiveError("\n".join(lines))


def described(issued: "Issued") -> str:
    """Name a collective."""
    who, unit, _ = parts(issued.label)
    return f"{issued.op} number {issued.number} ({who}{f' of {unit}' if unit else ''}) over {issued.axis!r}"


def _remedy(silent: list[int], said: dict[int, str]) -> str:
    if silent:
        ranks = f"rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))}"
        return f"see why {ranks} did not come; where that takes long for a reason, raise the process group's timeout"
    if len(set(said.values())) == 1:
        return "all came, but not in time; raise the process group's timeout, or see which rank is late by fs.trace"
    return "let every rank run the same program; where the operations above differ, the rank behind has left one out"
