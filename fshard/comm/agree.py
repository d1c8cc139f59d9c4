"""Outermost calls: ranks compare those that begin, and hear of an error that leaves one.

A comparison is one message of fixed size per axis, and texts only where they differ.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from fshard import _compat
from fshard.comm import ops
from fshard.comm.collective import Caller, all_gather, rank, supports_cpu_messages
from fshard.comm.events import Label, Verb, make_label
from fshard.comm.failure import CollectiveError, all_fail, ask_store, notify_peers
from fshard.comm.groups import RankState, rank_state
from fshard.errors import Problem, leaf_error, text_of
from fshard.tree import Axis, Flat, flatten, is_sharded
from fshard.tree.checks import is_reachable

# Bytes of a digest, and of the size of what ranks say.
FIRST = 16
# Said in the place of a digest by a rank that has failed, or that has heard of another digest.
DIFFERS = b"differs"
# The first fact of a call.
VERB = "verb"

P = ParamSpec("P")
R = TypeVar("R")


@functools.lru_cache(maxsize=64)
def _facts(arguments: tuple[Any, ...], *leaves: tuple[Any, ...]) -> str:
    """Write what decides the collectives of a call, as JSON: slow to spell out, and the same in every step.

    Args:
        arguments: The names and texts of arguments.
        *leaves: The paths of leaves, their specs and their dtypes.
    """
    entries = dict(arguments)
    for path, spec, dtype in zip(*leaves, strict=True):
        parts = {"dtype": dtype} | {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)}
        entries[path] = "\n".join(f"{name} {_text(value)}" for name, value in parts.items())
    return json.dumps(entries)


@functools.lru_cache(maxsize=64)
def _digest(facts: str) -> bytes:
    return hashlib.blake2b(facts.encode(), digest_size=FIRST).digest()


def _text(value: Any) -> str:
    """A value as every rank that has an equal one writes it: without addresses and names of groups."""
    return re.sub(r" at 0x\w+|, group_name='[^']*'", "", repr(value))


def check_same_call(
    what: str, axes: Sequence[Axis], facts: Flat | Mapping[Axis, str], failed: str = "", **arguments: Any
) -> None:
    """See that every rank begins the same call, by one message over each axis of processors.

    Where accelerators alone can send, ranks send none: the host would have to wait for its accelerator in every step.
    In a trace nothing is sent either, and the facts stay in its graph.

    Args:
        what: The verb that begins, and is no part of a running call.
        axes: The mesh axes that it communicates over.
        facts: The tree that the verb was given: of each Sharded leaf its dtype, layout, policy and transform; the other
            leaves decide no collective. Or for each axis JSON of texts by the names of all that must be the same there.
        failed: The error that this rank has failed with instead, if it has.
        **arguments: With a tree, other arguments that decide what is sent or what sums mean.

    Raises:
        ValueError: on every rank, if ranks make different calls or were told different things.
        CollectiveError: if a rank failed.
    """
    axes, tracing = [axis for axis in axes if axis.size > 1], _compat.is_tracing()
    if not tracing and not (axes and all(map(supports_cpu_messages, axes))):
        return
    if isinstance(facts, Flat):
        leaves = [leaf for leaf in facts.leaves if is_sharded(leaf)]
        paths = tuple(itertools.compress(facts.paths, map(is_sharded, facts.leaves)))
        # Of thousands of leaves a few tuples are made in less time than one for each.
        columns = paths, tuple([leaf.spec for leaf in leaves]), tuple([leaf.local.dtype for leaf in leaves])
        text = _facts(((VERB, what), *((name, _text(value)) for name, value in arguments.items())), *columns)
        if tracing:
            return ops.record_facts(text)
        facts = dict.fromkeys(axes, text)
    rank_state().call.has_begun = True
    failures, difference = _differing(facts, Label(Verb.START, (what,)), failed)
    if failures:
        raise CollectiveError("\n".join([*failures, f"To fix: mend it; {what} has sent nothing yet."]))
    if difference:
        remedy = "call the same verbs in the same order on every rank, with the same strategies, dtypes and arguments"
        raise leaf_error(f"{what}: ranks were told different things", [difference], remedy)


def disagreement(entries: Mapping[str, str], axes: Sequence[Axis], label: Caller) -> Problem | None:
    """Compare named entries between all ranks of some axes.

    Args:
        entries: What this rank has, by the name of each thing that must agree.
        axes: The mesh axes to compare over.
        label: Who asks, for the recorder.

    Returns:
        None where all ranks agree, else the first entry that differs; the same on every rank, which then ends the call
        that runs.
    """
    return _differing(dict.fromkeys(axes, json.dumps(dict(entries))), make_label(label))[1]


def _differing(facts: Mapping[Axis, str], label: Label, failed: str = "") -> tuple[list[str], Problem | None]:
    """Compare facts over their axes: list all failures, and find a difference, the same on every rank."""
    if are_equal(facts, label, failed=bool(failed)):
        return [], None
    axes = _asked(tuple(facts))
    with _compat.outside_transforms():
        place = ", ".join(f"{axis.name}={rank(axis)}" for axis in axes)
        along = [_difference(all_gather_object([place, json.loads(facts[axis])], [axis], label)) for axis in axes]
        found = all_gather_object([failed, next(filter(None, along), None)], axes, label)
    # All ranks have heard why the call that runs ends.
    rank_state().call.name = None
    difference = next((Problem(*difference) for _, difference in found if difference), None)
    return [failure for failure, _ in found if failure], difference


def are_equal(facts: Mapping[Axis, str], label: Label, failed: bool = False) -> bool:
    """Compare texts over their axes, by one message over each; the answer is the same on every rank.

    Args:
        facts: The text of this rank for each axis.
        label: Who asks, for the recorder.
        failed: Whether this rank is to differ from all others.

    Returns:
        Whether all ranks of all axes have the same texts.
    """
    differs = failed
    with _compat.outside_transforms():
        for axis in _asked(tuple(facts)):
            # Ranks of another axis hear of a difference too, or they would not ask for texts with the others.
            digest = DIFFERS if differs else _digest(facts[axis])
            differs |= {digest} != set(_gathered(digest, FIRST, axis, label._replace(parts="a digest")))
    return not differs


def _difference(ranks: Sequence[tuple[str, Mapping[str, str]]]) -> Problem | None:
    """Find the first entry that some rank has not, or else has another of, than the first one; the verb before all."""
    (first, needed), *others = ranks
    keys = dict.fromkeys(itertools.chain(*[entries for _, entries in ranks]))
    for key in sorted(keys, key=lambda key: key != VERB and all(key in entries for _, entries in ranks)):
        for place, entries in others:
            sides = (side.get(key, "nothing").split("\n") for side in (entries, needed))
            for got, expected in itertools.zip_longest(*sides, fillvalue="nothing"):
                if got != expected:
                    return Problem(key, f"{got} on rank {place}", f"{expected} as on rank {first}")
    return None


def all_gather_object(value: Any, axes: Sequence[Axis], label: Caller) -> list[Any]:
    """Show every rank of some axes a value of each of them.

    Args:
        value: The value of this rank, of any size, which JSON can hold. Tuples become lists.
        axes: The mesh axes.
        label: Who asks, for the recorder.

    Returns:
        The values in the order of the ranks, the same on every rank; of several axes the first by name varies fastest.
    """
    # As other ranks read it, on one rank too.
    values = [json.loads(json.dumps(value))]
    for axis in _asked(axes):
        data = json.dumps(values).encode()
        size = max(map(int, _gathered(b"%d" % len(data), FIRST, axis, label)))
        values = []
        for row in _gathered(data, size, axis, label):
            values += json.loads(row)
    return values


def _gathered(data: bytes, size: int, axis: Axis, label: Caller) -> list[bytes]:
    """Gather bytes from all ranks, each padded with spaces to a size."""
    # The processor's name comes before those of accelerators.
    device = min(_compat.group_devices(axis.group_name))
    row = torch.frombuffer(bytearray(data.ljust(size)), dtype=torch.uint8).to(device)
    return [bytes(each) for each in all_gather([row], axis, label)[0].tolist()]


def _asked(axes: Sequence[Axis]) -> list[Axis]:
    """The axes whose ranks are asked, in one order for every verb: none in a trace, where nothing has a value yet."""
    return [] if _compat.is_tracing() else sorted((a for a in axes if a.size > 1), key=lambda axis: axis.name)


@contextmanager
def calling(api_name: str, axes: Callable[[], Sequence[Axis]], begins: bool = True) -> Iterator[None]:
    """Let an error that leaves a context reach the other ranks, if no call is running yet.

    An error before the call begins goes with the message that begins it. Later, where all fail at one place, or have
    told each other by messages, nothing more happens. Else the groups of this rank are broken, and every rank ends with
    the error's text.

    Args:
        api_name: The function.
        axes: Finds those that it communicates over.
        begins: Whether it begins by a message over them.
    """
    is_alone = torch.compiler.is_dynamo_compiling() or not dist.is_initialized() or _compat.is_tracing()
    if is_alone or rank_state().call.name is not None:
        yield
        return
    state = rank_state()
    state.call.name = api_name
    state.call.has_begun = not begins
    if state.watcher is not None:
        state.watcher.interrupts.listen()
    try:
        yield
    except BaseException as error:
        if state.watcher is not None:
            # Python has raised what came until now.
            state.watcher.interrupts.listen()
        if state.others:
            _report_failure(state, api_name, axes, error)
        raise
    finally:
        state.call.name = None
        if state.watcher is not None:
            state.watcher.interrupts.stop()


def _report_failure(
    state: RankState,
    api_name: str,
    find_axes: Callable[[], Sequence[Axis]],
    error: BaseException,
) -> None:
    """Tell the other ranks of an error that leaves a call, unless they have heard of it."""
    axes: Sequence[Axis] = ()
    with suppress(Exception):
        axes = find_axes()
    reachable = [axis for axis in axes if is_reachable(axis)]
    # Nobody of another mesh waits for this rank.
    if (reachable or not axes) and _must_report(state):
        name, message = type(error).__name__, text_of(error)
        text = f"rank {state.rank} failed in {api_name}: " + (name if message == name else f"{name}: {message}")
        if not state.call.has_begun:
            with suppress(Exception):
                check_same_call(api_name, reachable, dict.fromkeys(reachable, "{}"), failed=text)
        if _must_report(state) and not all_fail(state, f"{api_name} {name}"):
            notify_peers(state, text)
    let_go = functools.partial(_wait_for_all, list(state.waiting.in_flight.values()))
    if state.failure.reason is None:
        let_go()
    else:
        # gloo never ends the wait for a message that had come in part when its connection was cut.
        ask_store(let_go)


def _must_report(state: RankState) -> bool:
    """Whether the other ranks have not heard yet that the call fails."""
    return state.call.name is not None and state.failure.reason is None


def _wait_for_all(buffers: Sequence[torch.Tensor]) -> None:
    """Wait until the backend lets go of what it works on."""
    for buffer in buffers:
        with suppress(RuntimeError):
            ops.wait(buffer)


def axes_in(given: Any) -> Sequence[Axis]:
    """List the axes over which a function of Axis values and Sharded leaves communicates."""
    found = [leaf for leaf in flatten(given).leaves if isinstance(leaf, Axis) or is_sharded(leaf)]
    axes = ([leaf] if isinstance(leaf, Axis) else (leaf.spec.transform or leaf.spec).axes for leaf in found)
    return tuple(dict.fromkeys(itertools.chain(*axes)))


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
