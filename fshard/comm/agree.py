"""Ranks compare notes: one small collective per axis, and the texts only where they differ."""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from fshard import _compat
from fshard.comm import ops
from fshard.comm.collective import all_gather
from fshard.comm.failure import CollectiveError
from fshard.comm.labels import WIDTH, labelled, parts
from fshard.comm.record import AGREE
from fshard.errors import Problem
from fshard.tree import Axis, Flat, Residency, Spec, is_sharded

# 12 words of 63 bits: room for what one step of a large model has to say.
WORDS, BITS = 12, 63

# Whoever asks sends as many numbers first, so that ranks that ask different things hear of it.
FIRST = 4 + WORDS
# The first of them: MARK, which says that a rank asks at all, over a hash of who asks and for what.
MARK, HASH = 0x6673, 48
# Bytes of a text that needs no second message.
SHORT = 8 * (FIRST - 2)

REMEDY = (
    "let every rank make the same calls in the same order, also those whose result one rank alone uses, such as save "
    "and to_state_dict(rank0_only=True)"
)

Number = TypeVar("Number", int, float)


class Vote(NamedTuple):
    """What ranks found when they compared notes.

    Attributes:
        problem: The first thing they differ in, or None.
        flags: Numbers that any rank put forward.
        told: Whether the problem is in the facts.
    """

    problem: Problem | None
    flags: frozenset[int]
    told: bool = False


class Facts(NamedTuple):
    """What decides the collectives of a call, which every rank must have been told alike.

    Attributes:
        text: JSON of a text, or of a list of parts, by the name of each argument and leaf.
        digest: A digest of it, for those who send no more.
    """

    text: bytes
    digest: bytes

    @classmethod
    def of(cls, entries: Mapping[str, Any]) -> "Facts":
        """Facts by their names."""
        text = json.dumps(dict(entries)).encode()
        return cls(text, hashlib.blake2b(text).digest())


NO_FACTS = Facts(b"{}", b"")


def facts_of(verb: str, flat: Flat, **told: Any) -> Facts:
    """Take down what a verb was told: its arguments, and for each Sharded leaf its dtype, layout, policy and transform.

    Args:
        verb: Its name.
        flat: The tree that it was given; the other leaves decide no collective.
        **told: Arguments that decide collectives or what sums mean, by their names.

    Returns:
        The facts, the same text on every rank that was told the same: no group's name, no address.
    """
    sharded = [(path, leaf) for path, leaf in zip(flat.paths, flat.leaves, strict=True) if is_sharded(leaf)]
    leaves = tuple([(path, leaf.spec, leaf.local.dtype) for path, leaf in sharded])
    return _facts((("verb", verb), *((name, _text(value)) for name, value in told.items())), leaves)


@functools.lru_cache(maxsize=64)
def _facts(told: tuple[tuple[str, str], ...], leaves: tuple[tuple[str, Spec, torch.dtype], ...]) -> Facts:
    """Slow to spell out, and the same in every step."""
    return Facts.of({**dict(told), **{path: _leaf(spec, dtype) for path, spec, dtype in leaves}})


def _leaf(spec: Spec, dtype: torch.dtype) -> list[str]:
    policy = spec.residency or Residency()
    # As strategies call what a policy holds.
    names = {"inputs": "param_dtype", "outputs": "output_dtype"}
    parts = {"dtype": dtype} | {name: getattr(spec, name) for name in ("shape", "partition", "axes", "frozen")}
    parts |= {names.get(f.name, f.name): getattr(policy, f.name) for f in dataclasses.fields(policy)}
    return [f"{name} {_text(value)}" for name, value in {**parts, "transform": spec.transform}.items()]


def _text(value: Any) -> str:
    """A value as every rank that has an equal one writes it."""
    if isinstance(value, Axis):
        return f"{value.name}={value.size}"
    if type(value) in (list, tuple):
        return f"({', '.join(map(_text, value))})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # A policy has parts of its own.
        known = [] if isinstance(value, Residency) else [(f.name, getattr(value, f.name)) for f in _compared(value)]
        shown = [f"{name}={_text(part)}" for name, part in known if part is not None]
        return f"{type(value).__name__.strip('_')}({', '.join(shown)})"
    if value is None or isinstance(
        value, bool | int | float | complex | str | bytes | tuple | torch.dtype | torch.device
    ):
        return repr(value)
    # Others may write an address, or values that ranks need not share.
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def _compared(value: Any) -> list[Any]:
    return [field for field in dataclasses.fields(value) if field.compare]


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


def vote(
    entries: Mapping[str, str],
    flags: Iterable[int],
    axes: Sequence[Axis],
    label: str,
    facts: Facts = NO_FACTS,
    fails: int | None = None,
) -> Vote:
    """Compare named entries between all ranks of some axes, and collect flags, in one message per axis.

    Args:
        entries: What this rank has, by the name of each thing that must agree.
        flags: Numbers from 0 to WORDS * BITS - 1 that this rank puts forward; larger ones are left out.
        axes: The mesh axes to compare over.
        label: Who asks, for the recorder.
        facts: Facts to compare with the entries; where they differ, they are the problem.
        fails: A flag; where a rank puts it forward, entries are not compared.

    Returns:
        What the ranks found, the same on every rank. In a trace that is nothing, and the facts stay in its graph.
    """
    if facts is not NO_FACTS and _compat.is_tracing():
        ops.told(facts.text.decode())
    words = [0] * WORDS
    for flag in flags:
        if flag < WORDS * BITS:
            words[flag // BITS] |= 1 << flag % BITS
    return _compare(entries, words, axes, label, facts, fails)


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


def everyone(text: str, axes: Sequence[Axis], label: str) -> list[tuple[str, str]]:
    """Show every rank of several axes the texts of all of them.

    Args:
        text: This rank's.
        axes: The mesh axes.
        label: Who asks, for the recorder.

    Returns:
        The coordinates and the text of each rank.
    """
    found, asked = [text], _asked(axes)
    for axis in asked:
        found = [each for row in texts(json.dumps(found), axis, label) for each in json.loads(row)]
    return [(_place(i, asked), each) for i, each in enumerate(found)]


def _as_row(data: bytes, size: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(data.ljust(size)), dtype=torch.uint8)


def _compare(
    entries: Mapping[str, str],
    words: list[int],
    axes: Sequence[Axis],
    label: str,
    facts: Facts = NO_FACTS,
    fails: int | None = None,
) -> Vote:
    axes = _asked(axes)
    own = json.dumps(dict(entries)).encode()
    digest = int.from_bytes(hashlib.blake2b(own + facts.digest, digest_size=7).digest(), "big")
    text = own + b"\n" + facts.text
    agreed, longest = 1, len(text)
    with _compat.outside_transforms():
        for axis in axes:
            rows = _first([digest, agreed, longest, *words], "a vote" if words else "a comparison", axis, label)
            agreed = int(all(row[:2] == [digest, 1] for row in rows))
            longest = max(row[2] for row in rows)
            columns = list(zip(*rows, strict=True))[3 : 3 + len(words)]
            words = [functools.reduce(operator.or_, column) for column in columns]
        raised = frozenset(
            i * BITS + bit for i, word in enumerate(words) for bit in range(word.bit_length()) if word >> bit & 1
        )
        same = agreed or fails in raised
        problem, told = (None, False) if same else _first_difference(text.ljust(longest), axes, label)
    return Vote(problem, raised, told)


def _asked(axes: Sequence[Axis]) -> list[Axis]:
    """The axes whose ranks are asked, in one order for every verb: none in a trace, where nothing has a value yet."""
    return [] if _compat.is_tracing() else sorted((a for a in axes if a.size > 1), key=lambda axis: axis.name)


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


def _first_difference(text: bytes, axes: Sequence[Axis], label: str) -> tuple[Problem, bool]:
    """The first thing that ranks differ in, and whether it is one of their facts."""
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    for axis in axes:
        rows = _exchange(rows, axis, label)
    pairs = [bytes(row.tolist()).split(b"\n") for row in rows.reshape(-1, len(text))]
    entries, facts = ([json.loads(pair[i]) for pair in pairs] for i in (0, 1))
    # Ranks of which only some begin a call differ in what comes next.
    for told, ranks in ((True, facts), (False, entries)) if all(facts) else ((False, entries),):
        first, *others = ranks
        keys = dict.fromkeys(key for rank in ranks for key in rank)
        order = (lambda key: 0) if told else lambda key: (key != "what comes next", all(key in rank for rank in ranks))  # noqa: B023
        for key in sorted(keys, key=order):
            for index, other in enumerate(others, start=1):
                if other.get(key) != first.get(key):
                    found, needed = _differing(other.get(key, "nothing"), first.get(key, "nothing"))
                    found, needed = f"{found} on rank {_place(index, axes)}", f"{needed} as on rank {_place(0, axes)}"
                    return Problem(key, found, needed), told
    raise AssertionError("digests differ and entries do not")


def _differing(found: str | list[str], needed: str | list[str]) -> tuple[str, str]:
    """Two texts, or of two lists of parts the first that differ."""
    if isinstance(found, list) and isinstance(needed, list):
        pairs = itertools.zip_longest(found, needed, fillvalue="nothing")
        return next(pair for pair in pairs if pair[0] != pair[1])
    return tuple(side if isinstance(side, str) else (side or ["nothing"])[0] for side in (found, needed))  # type: ignore[return-value]


def _place(index: int, axes: Sequence[Axis]) -> str:
    """The coordinates of a row of the exchange, whose first axis varies fastest."""
    strides = [math.prod(axis.size for axis in axes[:i]) for i in range(len(axes))]
    return ", ".join(f"{axis.name}={index // n % axis.size}" for axis, n in zip(axes, strides, strict=True))
