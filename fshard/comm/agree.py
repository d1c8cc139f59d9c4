"""Ranks compare their calls: one small collective per axis, and the texts only where they differ."""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from fshard import _compat
from fshard.comm import ops
from fshard.comm.collective import all_gather, message_device, serves_host
from fshard.comm.events import Label, Phase, Verb, encoded, labelled
from fshard.comm.failure import CollectiveError
from fshard.comm.groups import marked
from fshard.errors import Problem, leaf_error
from fshard.tree import Axis, Flat, ModelDtypes, ReshardPolicy, Spec, is_sharded

# 12 words of 63 bits: room for what one step of a large model has to say.
WORDS, BITS = 12, 63

# Flags of a call's messages, whose numbers from FLAGS on do not fit and count as put forward.
_FAILED, _FIRST = 0, 1
FLAGS = WORDS * BITS - _FIRST
# A message by which ranks compare something has as many numbers.
FIRST = 2 + WORDS
# Bytes of a text that needs no second message.
SHORT = 8 * (FIRST - 1)

MISMATCH = "collective mismatch between ranks"
Number = TypeVar("Number", int, float)


class Vote(NamedTuple):
    """The result of a comparison between ranks.

    Attributes:
        problem: The first thing they differ in, or None.
        flags: Numbers that any rank put forward.
        told: Whether the problem is in the facts.
    """

    problem: Problem | None
    flags: frozenset[int]
    told: bool = False


class Facts(NamedTuple):
    """All that decides the collectives of a call, and must be the same on every rank.

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
    leaves = [leaf for leaf in flat.leaves if is_sharded(leaf)]
    paths = itertools.compress(flat.paths, map(is_sharded, flat.leaves))
    # Of thousands of leaves a few tuples are made in less time than one for each.
    columns = tuple(paths), tuple([leaf.spec for leaf in leaves]), tuple([leaf.local.dtype for leaf in leaves])
    return _facts((("verb", verb), *((name, _text(value)) for name, value in told.items())), *columns)


@functools.lru_cache(maxsize=64)
def _facts(
    told: tuple[tuple[str, str], ...], paths: tuple[str, ...], specs: tuple[Spec, ...], dtypes: tuple[torch.dtype, ...]
) -> Facts:
    """Slow to spell out, and the same in every step."""
    return Facts.of({**dict(told), **dict(zip(paths, map(_leaf, specs, dtypes), strict=True))})


def _leaf(spec: Spec, dtype: torch.dtype) -> list[str]:
    policy, dtypes = spec.reshard or ReshardPolicy(), spec.model_dtypes or ModelDtypes()
    parts = {"dtype": dtype} | {name: getattr(spec, name) for name in ("shape", "partition", "axes", "frozen")}
    parts |= {f.name: getattr(policy, f.name) for f in dataclasses.fields(policy)}
    # As strategies call these.
    parts |= {"param_dtype": dtypes.inputs, "output_dtype": dtypes.outputs}
    return [f"{name} {_text(value)}" for name, value in {**parts, "transform": spec.transform}.items()]


def _text(value: Any) -> str:
    """A value as every rank that has an equal one writes it."""
    if isinstance(value, Axis):
        return f"{value.name}={value.size}"
    if type(value) in (list, tuple):
        return f"({', '.join(map(_text, value))})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        known = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if f.compare]
        # A policy and dtypes are entries of their own.
        told = [(name, part) for name, part in known if not isinstance(part, ReshardPolicy | ModelDtypes | None)]
        shown = [f"{name}={_text(part)}" for name, part in told]
        return f"{type(value).__name__.strip('_')}({', '.join(shown)})"
    if value is None or isinstance(
        value, bool | int | float | complex | str | bytes | tuple | torch.dtype | torch.device
    ):
        return repr(value)
    # Others may write an address, or values that ranks need not share.
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def disagreement(entries: Mapping[str, str], axes: Sequence[Axis], label: str | Label) -> Problem | None:
    """Compare named entries between all ranks of some axes.

    Args:
        entries: What this rank has, by the name of each thing that must agree.
        axes: The mesh axes to compare over.
        label: Who asks, for the recorder.

    Returns:
        None where all ranks agree, else the first entry that differs; the same on every rank. Entries that only some
        ranks have come before those whose texts differ.
    """
    return vote(entries, (), axes, label).problem


def vote(
    entries: Mapping[str, str],
    flags: Iterable[int],
    axes: Sequence[Axis],
    label: str | Label,
    facts: Facts = NO_FACTS,
    fails: int | None = None,
) -> Vote:
    """Compare named entries between all ranks of some axes, and collect flags, in one message per axis.

    Args:
        entries: What this rank has, by the name of each thing that must agree.
        flags: Numbers from 0 to WORDS * BITS - 1 that this rank puts forward; larger ones are left out.
        axes: The mesh axes to compare over.
        label: Who asks, and what comes next, which ranks compare before the entries.
        facts: Facts to compare before both; where they differ, they are the problem.
        fails: A flag; where a rank puts it forward, nothing else is compared.

    Returns:
        The result, the same on every rank. In a trace that is nothing, and the facts stay in its graph.
    """
    if facts is not NO_FACTS and _compat.is_tracing():
        ops.told(facts.text.decode())
    label, axes = labelled(label), _asked(axes)
    bits = sum(1 << flag for flag in set(flags) if flag < WORDS * BITS)
    words = [bits >> BITS * i & (1 << BITS) - 1 for i in range(WORDS)]
    own = f"{encoded(label)}\n{json.dumps(dict(entries))}".encode()
    digest, agreed = int.from_bytes(hashlib.blake2b(own + facts.digest, digest_size=7).digest(), "big"), 1
    with _compat.outside_transforms():
        for axis in axes:
            rows = _first([digest, agreed, *words], "a vote", axis, label)
            agreed = int(all(row[:2] == [digest, 1] for row in rows))
            columns = list(zip(*rows, strict=True))[2 : 2 + len(words)]
            words = [functools.reduce(operator.or_, column) for column in columns]
        bits = sum(word << BITS * i for i, word in enumerate(words))
        raised = frozenset(flag for flag in range(bits.bit_length()) if bits >> flag & 1)
        same = agreed or fails in raised
        problem, told = (None, False) if same else _first_difference(facts, entries, axes, label)
    return Vote(problem, raised, told)


def highest(numbers: Sequence[Number], axes: Sequence[Axis], label: str | Label) -> list[Number]:
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


def texts(text: str, axis: Axis, label: str | Label) -> list[str]:
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


def everyone(text: str, axes: Sequence[Axis], label: str | Label) -> list[tuple[str, str]]:
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


def told_of(error: BaseException) -> str:
    """Write an error, as other ranks are told of it."""
    return f"{type(error).__name__}: {error}"


def _as_row(data: bytes, size: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(data.ljust(size)), dtype=torch.uint8)


def _asked(axes: Sequence[Axis]) -> list[Axis]:
    """The axes whose ranks are asked, in one order for every verb: none in a trace, where nothing has a value yet."""
    return [] if _compat.is_tracing() else sorted((a for a in axes if a.size > 1), key=lambda axis: axis.name)


def _exchange(tensor: torch.Tensor, axis: Axis, label: str | Label) -> torch.Tensor:
    return all_gather([tensor.to(message_device(axis))], axis, label)[0].cpu()


def _first(numbers: list[int], kind: str, axis: Axis, label: str | Label) -> list[list[int]]:
    """Exchange the first numbers of a message, which ranks that ask for another kind of thing wait for.

    Args:
        numbers: Up to FIRST are sent as so many; more are for where ranks have agreed already.
        kind: The use of the numbers.
        axis: The mesh axis.
        label: Who asks.

    Returns:
        A row of each rank, which begins with its numbers.
    """
    sent = [*numbers, *[0] * (FIRST - len(numbers))]
    label = labelled(label)._replace(kind=kind)
    return _exchange(torch.tensor(sent), axis, label).reshape(axis.size, -1).tolist()


def _first_difference(
    facts: Facts, entries: Mapping[str, str], axes: Sequence[Axis], label: Label
) -> tuple[Problem, bool]:
    """Find the first thing that ranks differ in, and whether it is one of their facts."""
    own = json.dumps([json.loads(facts.text), {"what comes next": label.event}, dict(entries)])
    told, events, others = zip(*(json.loads(text) for _, text in everyone(own, axes, label)), strict=True)
    # Ranks of which only some begin a call differ in what comes next.
    for each in (told if all(told) else (), events, others, told):
        keys = dict.fromkeys(itertools.chain(*each))
        first = [key for key in keys if each is others and not all(key in row for row in each)]
        if found := _problem(each, [*first, *keys], axes):
            return found, each is told
    raise AssertionError("ranks differ in a digest alone")


def _problem(ranks: Sequence[Mapping[str, Any]], keys: Sequence[str], axes: Sequence[Axis]) -> Problem | None:
    """Find the first key for which some rank has another value than the first one."""
    for key in keys:
        for index, other in enumerate(ranks):
            if other.get(key) != ranks[0].get(key):
                found, needed = _differing(other.get(key, "nothing"), ranks[0].get(key, "nothing"))
                return Problem(key, f"{found} on rank {_place(index, axes)}", f"{needed} as on rank {_place(0, axes)}")
    return None


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


class Peers:
    """The ranks of some axes, during one call.

    Attributes:
        axes: The mesh axes that have several ranks.
    """

    def __init__(self, what: str, axes: Sequence[Axis], facts: Facts = NO_FACTS) -> None:
        """Name the ranks.

        Args:
            what: The verb that runs, for errors.
            axes: The mesh axes.
            facts: The facts of the call, which go with its first message.
        """
        self.axes = [axis for axis in axes if axis.size > 1]
        self._what, self._facts = what, facts

    def begin(self, new: bool, error: Exception | None = None) -> bool:
        """See by one message that every rank begins the same call.

        Where accelerators alone can send, they send none for a call that they know: the host would have to wait for its
        accelerator in every step.

        Args:
            new: Whether this rank does not know the order of the call.
            error: The error that this rank has failed with instead, or None.

        Returns:
            Whether the call is new to any rank.

        Raises:
            ValueError: on every rank, if ranks make different calls or were told different things.
            CollectiveError: if another rank failed.
        """
        if not self.axes or (not new and not _compat.is_tracing() and not all(map(serves_host, self.axes))):
            return new
        event, begins = Label(Verb.START, call=self._what, phase=Phase.BEGIN), marked(begun=True)
        flags = [*([_FAILED] if error is not None else []), *([_FIRST] if new else [])]
        found = self._voted(event, {}, flags)
        if _FAILED not in found:
            return bool(found)
        text = "" if error is None else f"rank {dist.get_rank()} failed in {begins or self._what}: {told_of(error)}"
        failures = [said for _, said in everyone(text, self.axes, event) if said]
        if error is None:
            raise CollectiveError("\n".join([*failures, f"To fix: mend it; {self._what} has sent nothing yet."]))
        marked(settled=True)
        return new

    def agree(
        self, event: Label, entries: Mapping[str, str] = MappingProxyType({}), flags: Collection[int] = ()
    ) -> frozenset[int]:
        """Refuse on every rank collectives that do not match, before they start.

        Args:
            event: What comes next.
            entries: Its parts, by a name for each.
            flags: Numbers from 0 that this rank puts forward; from FLAGS on they are left out.

        Returns:
            The numbers that any rank put forward.

        Raises:
            ValueError: if ranks make different calls.
        """
        return frozenset(flag - _FIRST for flag in self._voted(event, entries, [_FIRST + flag for flag in flags]))

    def _voted(self, event: Label, entries: Mapping[str, str], flags: Collection[int]) -> frozenset[int]:
        facts, self._facts = self._facts, NO_FACTS
        found = vote(entries, flags, self.axes, event, facts, fails=_FAILED)
        if found.problem is not None:
            marked(settled=True)
            self._refuse(found.problem, found.told)
        return found.flags

    def _refuse(self, problem: Problem, told: bool) -> None:
        if told:
            remedy = (
                "call the same verbs in the same order on every rank, with the same strategies, dtypes and arguments"
            )
            raise leaf_error(f"{self._what}: ranks were told different things", [problem], remedy)
        remedy = "let every rank gather the same units in the same order; one that has no use for a unit takes part"
        raise leaf_error(f"{self._what}: {MISMATCH}", [problem], remedy)


def same_call(
    what: str, axes: Sequence[Axis], facts: Facts | Flat = NO_FACTS, error: Exception | None = None, **told: Any
) -> None:
    """See that every rank begins the same call, by one message over each axis of processors.

    Args:
        what: The verb that begins, and is no part of a running call.
        axes: The mesh axes that it communicates over.
        facts: Its facts, or the tree whose leaves it was given.
        error: The error that this rank has failed with instead, or None.
        **told: With a tree, other arguments that decide what is sent or what sums mean.

    Raises:
        ValueError: on every rank, if ranks make different calls or were told different things.
        CollectiveError: if another rank failed.
    """
    sent_over = [axis for axis in axes if axis.size > 1]
    if sent_over and all(map(serves_host, sent_over)):
        facts = facts_of(what, facts, **told) if isinstance(facts, Flat) else facts
        Peers(what, axes, facts).begin(new=False, error=error)
