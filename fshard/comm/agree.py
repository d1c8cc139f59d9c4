"""Ranks compare notes: one small collective per axis, and the texts only where they differ."""

import functools
import hashlib
import json
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from fshard import _compat
from fshard.comm.collective import all_gather
from fshard.errors import Problem
from fshard.tree import Axis

# 12 words of 63 bits: room for what one step of a large model has to say.
WORDS, BITS = 12, 63
# Bytes of a text that needs no second message.
SHORT = 1016

Number = TypeVar("Number", int, float)


class Vote(NamedTuple):
    """What ranks found when they compared notes.

    Attributes:
        problem: The first thing they differ in, or None.
        flags: Numbers that any rank put forward.
    """

    problem: Problem | None
    flags: frozenset[int]


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
    return _compare(entries, [], axes, label).problem


def vote(entries: Mapping[str, str], flags: Iterable[int], axes: Sequence[Axis], label: str) -> Vote:
    """Compare named entries between all ranks of some axes, and collect flags, in one message per axis.

    Args:
        entries: What this rank has, by the name of each thing that must agree.
        flags: Numbers from 0 to WORDS * BITS - 1 that this rank puts forward; larger ones are left out.
        axes: The mesh axes to compare over.
        label: Who asks, for the recorder.

    Returns:
        What the ranks found, the same on every rank.
    """
    words = [0] * WORDS
    for flag in flags:
        if flag < WORDS * BITS:
            words[flag // BITS] |= 1 << flag % BITS
    return _compare(entries, words, axes, label)


def highest(numbers: Sequence[Number], axes: Sequence[Axis], label: str) -> list[Number]:
    """Find for each of several numbers the highest that any rank has.

    Args:
        numbers: As many on every rank.
        axes: The mesh axes to compare over.
        label: Who asks, for the recorder.

    Returns:
        The highest ones, the same on every rank.
    """
    if not _asked(axes):
        return list(numbers)
    found = torch.tensor(numbers, dtype=torch.float64 if any(isinstance(n, float) for n in numbers) else torch.int64)
    for axis in _asked(axes):
        found = _exchange(found, axis, label).reshape(axis.size, -1).amax(0)
    return found.tolist()


def texts(text: str, axis: Axis, label: str) -> list[str]:
    """Show every rank of an axis what each of them has to say.

    Args:
        text: What this rank has to say, of any length.
        axis: The mesh axis.
        label: Who asks, for the recorder.

    Returns:
        The texts in the order of the ranks, the same on every rank.
    """
    if not _asked([axis]):
        return [text]
    # Names of files may have bytes that are no text.
    data = text.encode(errors="surrogatepass")
    # Short ones travel with their sizes.
    short = len(data).to_bytes(8, "little") + data[:SHORT]
    rows = _exchange(_as_row(short, 8 + SHORT), axis, label).reshape(axis.size, -1)
    sizes = [int.from_bytes(bytes(row[:8].tolist()), "little") for row in rows]
    rows = rows[:, 8:]
    if max(sizes) > SHORT:
        rows = _exchange(_as_row(data, max(sizes)), axis, label).reshape(axis.size, -1)
    return [bytes(rows[i, :size].tolist()).decode(errors="surrogatepass") for i, size in enumerate(sizes)]


def _as_row(data: bytes, size: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(data.ljust(size)), dtype=torch.uint8)


def _compare(entries: Mapping[str, str], words: list[int], axes: Sequence[Axis], label: str) -> Vote:
    axes = _asked(axes)
    text = json.dumps(dict(entries)).encode()
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
    agreed, longest = 1, len(text)
    for axis in axes:
        rows = _exchange(torch.tensor([digest, agreed, longest, *words]), axis, label).tolist()
        agreed = int(all(row[:2] == [digest, 1] for row in rows))
        longest = max(row[2] for row in rows)
        words = [functools.reduce(operator.or_, column) for column in list(zip(*rows, strict=True))[3:]]
    problem = None if agreed else _first_difference(text.ljust(longest), axes, label)
    raised = (i * BITS + bit for i, word in enumerate(words) for bit in range(word.bit_length()) if word >> bit & 1)
    return Vote(problem, frozenset(raised))


def _asked(axes: Sequence[Axis]) -> list[Axis]:
    """The axes whose ranks are asked: none in a trace, where nothing has a value yet."""
    return [] if _compat.is_tracing() else [axis for axis in axes if axis.size > 1]


def _exchange(tensor: torch.Tensor, axis: Axis, label: str) -> torch.Tensor:
    backend = dist.get_backend(_compat.resolve_process_group(axis.group_name))
    return all_gather([tensor.to("cuda" if backend == "nccl" else "cpu")], axis, label)[0].cpu()


def _first_difference(text: bytes, axes: Sequence[Axis], label: str) -> Problem:
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    for axis in axes:
        rows = _exchange(rows, axis, label)
    first, *others = ranks = [json.loads(bytes(row.tolist())) for row in rows.reshape(-1, len(text))]
    keys = dict.fromkeys(key for entries in ranks for key in entries)
    for key in sorted(keys, key=lambda key: (key != "what comes next", all(key in entries for entries in ranks))):
        for index, entries in enumerate(others, start=1):
            if entries.get(key) != first.get(key):
                found, needed = (entries.get(key, "nothing"), first.get(key, "nothing"))
                return Problem(key, f"{found} on rank {_place(index, axes)}", f"{needed} as on rank {_place(0, axes)}")
    raise AssertionError("digests differ and entries do not")


def _place(index: int, axes: Sequence[Axis]) -> str:
    """The coordinates of a row of the exchange, whose first axis varies fastest."""
    strides = [math.prod(axis.size for axis in axes[:i]) for i in range(len(axes))]
    return ", ".join(f"{axis.name}={index // n % axis.size}" for axis, n in zip(axes, strides, strict=True))
