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
from fshard.comm.failure import CollectiveError
from fshard.comm.labels import WIDTH, labelled, parts
from fshard.comm.record import AGREE
from fshard.errors import Problem
from fshard.tree import Axis

# 12 words of 63 bits: room for what one step of a large model has to say.
WORDS, BITS = 12, 63

# Whoever asks sends as many numbers first, so that ranks that ask different things hear of it.
FIRST = 4 + WORDS
# The first of them: MARK, which says that a rank asks at all, over a hash of who asks and for what.
MARK, HASH = 0x6673, 48
# Bytes of a text that needs no second message.
SHORT = 8 * (FIRST - 2)

REMEDY = "every rank must call save, unshard and to_state_dict, also with rank0_only=True"

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
    dtype = torch.float64 if any(isinstance(n, float) for n in numbers) else torch.int64
    found, kind = torch.tensor(numbers, dtype=dtype), f"the highest of {len(numbers)} {dtype}"
    for axis in _asked(axes):
        rows = _first(found.view(torch.int64).tolist(), kind, axis, label)
        found = torch.tensor([row[: len(numbers)] for row in rows], dtype=torch.int64).view(dtype).amax(0)
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
    short = _as_row(data[:SHORT], SHORT).view(torch.int64).tolist()
    found = _first([len(data), *short], "texts", axis, label)
    sizes = [row[0] for row in found]
    rows = torch.tensor([row[1:] for row in found]).view(torch.uint8)
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
        rows = _first([digest, agreed, longest, *words], "a vote" if words else "a comparison", axis, label)
        agreed = int(all(row[:2] == [digest, 1] for row in rows))
        longest = max(row[2] for row in rows)
        words = [functools.reduce(operator.or_, column) for column in list(zip(*rows, strict=True))[3 : 3 + len(words)]]
    problem = None if agreed else _first_difference(text.ljust(longest), axes, label)
    raised = (i * BITS + bit for i, word in enumerate(words) for bit in range(word.bit_length()) if word >> bit & 1)
    return Vote(problem, frozenset(raised))


def _asked(axes: Sequence[Axis]) -> list[Axis]:
    """The axes whose ranks are asked: none in a trace, where nothing has a value yet."""
    return [] if _compat.is_tracing() else [axis for axis in axes if axis.size > 1]


def _exchange(tensor: torch.Tensor, axis: Axis, label: str) -> torch.Tensor:
    backend = dist.get_backend(_compat.resolve_process_group(axis.group_name))
    return all_gather([tensor.to("cuda" if backend == "nccl" else "cpu")], axis, label)[0].cpu()


def _first(numbers: list[int], kind: str, axis: Axis, label: str) -> list[list[int]]:
    """Exchange what ranks send first, where they may have come to different places.

    Args:
        numbers: Up to FIRST - 1 are sent as so many; more are for where ranks have agreed already.
        kind: What the numbers are for.
        axis: The mesh axis.
        label: Who asks.

    Returns:
        A row of each rank, which begins with its numbers.

    Raises:
        CollectiveError: on every rank alike, if they do not all ask the same.
    """
    digest = hashlib.blake2b(f"{label}: {kind}".encode(), digest_size=HASH // 8).digest()
    tag = MARK << HASH | int.from_bytes(digest, "big")
    sent = [tag, *numbers, *[0] * (FIRST - 1 - len(numbers))]
    rows = _exchange(torch.tensor(sent), axis, label).reshape(axis.size, -1).tolist()
    if all(row[0] == tag for row in rows):
        return [row[1:] for row in rows]
    said = ["compares notes" if row[0] >> HASH == MARK else "sends something else" for row in rows]
    if len(set(said)) == 1:
        who, unit, _ = parts(labelled(label))
        own = ": ".join(part for part in (who, unit) if part and part != AGREE)
        texts = _exchange(_as_row(own.encode()[:WIDTH], WIDTH), axis, label).reshape(axis.size, -1)
        said = [bytes(text.tolist()).decode(errors="ignore").rstrip() for text in texts]
    lines = [f"  rank {rank}: {text}" for rank, text in zip(_compat.group_ranks(axis.group_name), said, strict=True)]
    raise CollectiveError("\n".join(["ranks do not do the same", *lines, f"To fix: {REMEDY}."]))


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
