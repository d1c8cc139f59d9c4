"""Ranks compare notes: one small collective per axis, and the texts only where they differ."""

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fshard import _compat
from fshard.comm.collective import all_gather, rank
from fshard.tree import Axis


def disagreement(lines: Sequence[str], axes: Sequence[Axis], label: str) -> str | None:
    """Compare a list of lines between all ranks of some axes.

    Args:
        lines: What this rank has, one line for each thing that must agree.
        axes: The mesh axes to compare over.
        label: Who asks, for the recorder.

    Returns:
        None where all ranks agree, on every rank alike; else which line differs first and between which ranks.
    """
    axes = [axis for axis in axes if axis.size > 1]
    text = "\n".join(lines).encode()
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
    agreed, longest = 1, len(text)
    for axis in axes:
        rows = _exchange(torch.tensor([digest, agreed, longest]), axis, label).tolist()
        agreed = int(all(row[:2] == [digest, 1] for row in rows))
        longest = max(row[2] for row in rows)
    if agreed:
        return None
    reports = [_first_difference(text, longest, axis, label) for axis in axes]
    return next((report for report in reports if report), "other ranks of the mesh disagree with each other")


def _exchange(tensor: torch.Tensor, axis: Axis, label: str) -> torch.Tensor:
    backend = dist.get_backend(_compat.resolve_process_group(axis.group_name))
    return all_gather([tensor.to("cuda" if backend == "nccl" else "cpu")], axis, label)[0].cpu()


def _first_difference(text: bytes, longest: int, axis: Axis, label: str) -> str | None:
    padded = torch.frombuffer(bytearray(text.ljust(longest, b"\0")), dtype=torch.uint8)
    rows = _exchange(padded, axis, label)
    texts = [bytes(row.tolist()).rstrip(b"\0").decode().split("\n") for row in rows]
    mine = rank(axis)
    for other, theirs in enumerate(texts):
        if theirs == texts[mine]:
            continue
        length = max(len(theirs), len(texts[mine]))
        pairs = zip(*(lines + ["nothing"] * (length - len(lines)) for lines in (texts[mine], theirs)), strict=True)
        a, b = next(pair for pair in pairs if pair[0] != pair[1])
        return f"rank {mine} of axis {axis.name!r} has {a}, rank {other} has {b}"
    return None
