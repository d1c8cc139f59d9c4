"""Outermost calls: ranks compare those that begin, and hear of an error that leaves one.

A comparison is one message of fixed size per axis, and texts only where they differ.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from fshard import _compat
from fshard.comm import ops
from fshard.comm.collective import Who, all_gather, message_device, serves_host
from fshard.comm.events import Label, Phase, Verb, labelled
from fshard.comm.failure import CollectiveError, all_fail, tell
from fshard.comm.groups import World, world
from fshard.errors import Problem, leaf_error
from fshard.tree import Axis, Flat, Spec, flatten, is_sharded
from fshard.tree.checks import is_reachable

# Bytes of the first message of a comparison, and of the size of the text that it begins with; longer texts follow.
FIRST, SIZE = 112, 8
# Said in the place of a digest by a rank that has failed, or that has heard of another digest.
DIFFERS = "differs"
# The first fact of a call.
VERB = "verb"
# Values whose texts are the same on every rank.
_PLAIN = (bool, int, float, complex, str, bytes, tuple, torch.dtype, torch.device)

Number = TypeVar("Number", int, float)
P = ParamSpec("P")
R = TypeVar("R")


class Facts(NamedTuple):
    """All that decides the collectives of a call, and must be the same on every rank.

    Attributes:
        text: JSON of a text, or of a list of parts, by the name of each argument and leaf.
        digest: A digest of it, which is sent first.
    """

    text: str
    digest: str

    @classmethod
    def of(cls, entries: Mapping[str, Any]) -> "Facts":
        """Facts by their names."""
        text = json.dumps(dict(entries))
        return cls(text, hashlib.blake2b(text.encode(), digest_size=8).hexdigest())


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
    return _facts(((VERB, verb), *((name, _text(value)) for name, value in told.items())), *columns)


@functools.lru_cache(maxsize=64)
def _facts(
    told: tuple[tuple[str, str], ...], paths: tuple[str, ...], specs: tuple[Spec, ...], dtypes: tuple[torch.dtype, ...]
) -> Facts:
    """Slow to spell out, and the same in every step."""
    return Facts.of({**dict(told), **dict(zip(paths, map(_leaf, specs, dtypes), strict=True))})


def _leaf(spec: Spec, dtype: torch.dtype) -> list[str]:
    parts = {"dtype": dtype} | {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)}
    return [f"{name} {_text(value)}" for name, value in parts.items()]


def _text(value: Any) -> str:
    """A value as every rank that has an equal one writes it."""
    if isinstance(value, Axis):
        return f"{value.name}={value.size}"
    if type(value) in (list, tuple):
        return f"({', '.join(map(_text, value))})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        shown = [f"{f.name}={_text(getattr(value, f.name))}" for f in dataclasses.fields(value) if f.compare]
        return f"{type(value).__name__.strip('_')}({', '.join(shown)})"
    if value is None or isinstance(value, _PLAIN):
        return repr(value)
    # Others may write an address, or values that ranks need not share.
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def same_call(
    what: str, axes: Sequence[Axis], facts: Facts | Flat | None = None, error: Exception | None = None, **told: Any
) -> None:
    """See that every rank begins the same call, by one message over each axis of processors.

    Where accelerators alone can send, ranks send none: the host would have to wait for its accelerator in every step.

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
        facts = facts_of(what, facts, **told) if isinstance(facts, Flat) else facts or Facts.of({VERB: what})
        _compared(what, facts, sent_over, Label(Verb.START, call=what, phase=Phase.BEGIN), error)


def _compared(what: str, facts: Facts, axes: Sequence[Axis], label: Label, error: Exception | None = None) -> None:
    """Refuse on every rank a call of which ranks have other facts, or that one has failed in.

    In a trace nothing is sent, and the facts stay in its graph.
    """
    if _compat.is_tracing():
        ops.told(facts.text)
        return
    running = world().call
    if running is not None:
        running.begun = True
    with _compat.outside_transforms():
        if _agreed(facts.digest if error is None else DIFFERS, axes, label):
            return
        within = what if running is None else running.what
        failure = "" if error is None else f"rank {world().rank} failed in {within}: {told_of(error)}"
        texts = everyone(f"[{json.dumps(failure)}, {facts.text}]", axes, label)
    ranks = [(place, *json.loads(text)) for place, text in texts]
    failures = [failure for _, failure, _ in ranks if failure]
    if failures and error is None:
        raise CollectiveError("\n".join([*failures, f"To fix: mend it; {what} has sent nothing yet."]))
    _settle()
    if not failures:
        problem = _problem([(place, entries) for place, _, entries in ranks])
        remedy = "call the same verbs in the same order on every rank, with the same strategies, dtypes and arguments"
        raise leaf_error(f"{what}: ranks were told different things", [problem], remedy)


def _settle() -> None:
    """Note that all ranks have heard why the call that runs ends."""
    if (running := world().call) is not None:
        running.settled = True


def _agreed(digest: str, axes: Sequence[Axis], label: Label) -> bool:
    """Compare a digest with those of all ranks, by one message over each axis."""
    for axis in _asked(axes):
        # Ranks that ask for texts of another kind wait for each other.
        rows = texts(digest, axis, label._replace(parts="a digest"))
        digest = digest if all(row == digest for row in rows) else DIFFERS
    return digest != DIFFERS


def _problem(ranks: Sequence[tuple[str, Mapping[str, Any]]]) -> Problem:
    """Find the first entry that some rank has not, or else has another of, than the first one; the verb before all."""
    (first, needed), *others = ranks
    keys = dict.fromkeys(itertools.chain(*[entries for _, entries in ranks]))
    for key in sorted(keys, key=lambda key: key != VERB and all(key in entries for _, entries in ranks)):
        for place, found in others:
            pair = [found.get(key, "nothing"), needed.get(key, "nothing")]
            if pair[0] != pair[1]:
                # Of two lists of parts the first that differ.
                parts = zip(*([side] if isinstance(side, str) else side for side in pair), strict=False)
                got, expected = next(each for each in parts if each[0] != each[1])
                return Problem(key, f"{got} on rank {place}", f"{expected} as on rank {first}")
    raise AssertionError("ranks differ in a digest alone")


def disagreement(entries: Mapping[str, str], axes: Sequence[Axis], label: Who) -> Problem | None:
    """Compare named entries between all ranks of some axes.

    Args:
        entries: What this rank has, by the name of each thing that must agree.
        axes: The mesh axes to compare over.
        label: Who asks, for the recorder.

    Returns:
        None where all ranks agree, else the first entry that differs; the same on every rank, which then ends the call
        that runs. Entries that only some ranks have come before those whose texts differ.
    """
    facts, label = Facts.of(entries), labelled(label)
    with _compat.outside_transforms():
        if _agreed(facts.digest, axes, label):
            return None
        _settle()
        return _problem([(place, json.loads(text)) for place, text in everyone(facts.text, axes, label)])


def highest(numbers: Sequence[Number], axes: Sequence[Axis], label: Who) -> list[Number]:
    """Find for each of several numbers the highest that any rank has.

    Args:
        numbers: As many on every rank.
        axes: The mesh axes to compare over.
        label: Who asks, for the recorder.

    Returns:
        The highest ones, the same on every rank; NaN where any rank has it.
    """
    rows = [json.loads(text) for _, text in everyone(json.dumps(list(numbers)), axes, label)]
    return [max(column, key=lambda number: (number != number, number)) for column in zip(*rows, strict=True)]


def texts(text: str, axis: Axis, label: Who) -> list[str]:
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
    heads = _gathered(b"%0*x" % (SIZE, len(data)) + data[: FIRST - SIZE], FIRST, axis, label)
    sizes, rows = [int(head[:SIZE], 16) for head in heads], [head[SIZE:] for head in heads]
    if max(sizes) > FIRST - SIZE:
        rows = _gathered(data, max(sizes), axis, label)
    return [row[:size].decode(errors="surrogatepass") for row, size in zip(rows, sizes, strict=True)]


def _gathered(data: bytes, size: int, axis: Axis, label: Who) -> list[bytes]:
    row = torch.frombuffer(bytearray(data.ljust(size)), dtype=torch.uint8)
    return [bytes(each) for each in all_gather([row.to(message_device(axis))], axis, label)[0].tolist()]


def everyone(text: str, axes: Sequence[Axis], label: Who) -> list[tuple[str, str]]:
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
    # The first axis varies fastest.
    places = itertools.product(*[range(axis.size) for axis in reversed(asked)])
    texts_of = zip(places, found, strict=True)
    return [(", ".join(f"{a.name}={i}" for a, i in zip(asked, at[::-1], strict=True)), text) for at, text in texts_of]


def told_of(error: BaseException) -> str:
    """Write an error, as other ranks are told of it."""
    return f"{type(error).__name__}: {error}"


def _asked(axes: Sequence[Axis]) -> list[Axis]:
    """The axes whose ranks are asked, in one order for every verb: none in a trace, where nothing has a value yet."""
    return [] if _compat.is_tracing() else sorted((a for a in axes if a.size > 1), key=lambda axis: axis.name)


class calling:  # noqa: N801
    """Let an error that leaves a context reach the other ranks, if no call is running yet.

    An error before the call begins goes with the message that begins it. Later, where all fail at one place, or have
    told each other by messages, nothing more happens. Else the groups of this rank are broken, and every rank ends with
    the error's text.

    Attributes:
        begun: Whether the message that begins the call has been sent.
        settled: Whether ranks have told each other of the error.
    """

    __slots__ = ("_axes", "_begins", "begun", "settled", "what", "world")

    def __init__(self, what: str, axes: Callable[[], Sequence[Axis]], begins: bool = True) -> None:
        """Name the call.

        Args:
            what: The function.
            axes: Finds those that it communicates over.
            begins: Whether it begins by a message over them.
        """
        self.what, self._axes, self._begins, self.begun, self.settled = what, axes, begins, False, False

    def __enter__(self) -> "calling":
        self.world: World | None = None
        if torch.compiler.is_dynamo_compiling():
            return self
        if dist.is_initialized() and not _compat.is_tracing() and world().call is None:
            self.world = world()
            self.world.call = self
        return self

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if self.world is None:
            return
        try:
            if error is not None and self.world.others:
                self._tell(self.world, error)
        finally:
            self.world.call = None

    def _tell(self, own: World, error: BaseException) -> None:
        axes: Sequence[Axis] = ()
        with suppress(Exception):
            axes = self._axes()
        reached = [axis for axis in axes if is_reachable(axis)]
        told = own.broken is not None or isinstance(error, CollectiveError)
        # Nobody of another mesh waits for this rank.
        if not told and (reached or not axes):
            if self._begins and not self.begun and isinstance(error, Exception):
                with suppress(Exception):
                    same_call(self.what, reached, error=error)
            if not self.settled and own.broken is None and not all_fail(own, f"{self.what} {type(error).__name__}"):
                tell(own, f"rank {own.rank} failed in {self.what}: {told_of(error)}")
        for buffer in [ref() for ref in own.flying.values()]:
            # The backend lets go of what it works on, now that it has ended.
            with suppress(RuntimeError):
                ops.wait(buffer) if buffer is not None else None
        own.flying.clear()


def axes_in(given: Any) -> Sequence[Axis]:
    """List the axes over which a function of Axis values and Sharded leaves communicates."""
    leaves = flatten(given).leaves
    specs = {id(leaf.spec): leaf.spec for leaf in leaves if is_sharded(leaf)}
    found = [leaf for leaf in leaves if isinstance(leaf, Axis)]
    return tuple(dict.fromkeys([*found, *(a for spec in specs.values() for a in (spec.transform or spec).axes)]))


def call(f: Callable[P, R], what: str = "", begins: bool = True) -> Callable[P, R]:
    """Make a function an outermost call, unless one is running.

    Args:
        f: The function.
        what: Its name, if that is another than its own.
        begins: Whether it begins by a message over the axes of its arguments.

    Returns:
        The function.
    """

    @functools.wraps(f)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with calling(what or f.__name__, lambda: axes_in((args, kwargs)), begins):
            return f(*args, **kwargs)

    return run
