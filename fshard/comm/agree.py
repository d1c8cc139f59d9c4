"""Ranks compare notes: one small collective per axis, and the texts only where they differ."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from fshard import _compat
from fshard.comm.collective import all_gather
from fshard.errors import Problem
from fshard.tree import Axis


def disagreement(entries: Mapping[str, str], axes: Sequence[Axis], label: str) -> Problem | None:
    """Compare named entries between all ranks of some axes.

    Args:
        entries: What this rank has, by the name of each thing that must agree.
        axes: The mesh axes to compare over.
        label: Who asks, for the recorder.

    Returns:
        None where all ranks agree, else the first entry that differs; the same on every rank. Entries that only some
        ranks have come before those whose texts differ.
    """
    axes = [axis for axis in axes if axis.size > 1]
    text = json.dumps(dict(entries)).encode()
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
    agreed, longest = 1, len(text)
    for axis in axes:
        rows = _exchange(torch.tensor([digest, agreed, longest]), axis, label).tolist()
        agreed = int(all(row[:2] == [digest, 1] for row in rows))
        longest = max(row[2] for row in rows)
    return None if agreed else _first_difference(text.ljust(longest), axes, label)


def _exchange(tensor: torch.Tensor, axis: Axis, label: str) -> torch.Tensor:
    backend = dist.get_backend(_compat.resolve_process_group(axis.group_name))
    return all_gather([tensor.to("cuda" if backend == "nccl" else "cpu")], axis, label)[0].cpu()


def _first_difference(text: bytes, axes: Sequence[Axis], label: str) -> Problem:
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    for axis in axes:
        rows = _exchange(rows, axis, label)
    first, *others = ranks = [json.loads(bytes(row.tolist())) for row in rows.reshape(-1, len(text))]
    keys = dict.fromkeys(key for entries in ranks for key in entries)
    for key in sorted(keys, key=lambda key: all(key in entries for entries in ranks)):
        for index, entries in enumerate(others, start=1):
            if entries.get(key) != first.get(key):
                found, needed = (entries.get(key, "nothing"), first.get(key, "nothing"))
                return Problem(key, f"{found} on rank {_place(index, axes)}", f"{needed} as on rank {_place(0, axes)}")
    raise AssertionError("digests differ and entries do not")


def _place(index: int, axes: Sequence[Axis]) -> str:
    """The coordinates of a row of the exchange, whose first axis varies fastest."""
    strides = [math.prod(axis.size for axis in axes[:i]) for i in range(len(axes))]
    return ", ".join(f"{axis.name}={index // n % axis.size}" for axis, n in zip(axes, strides, strict=True))
