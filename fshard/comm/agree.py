"""Outermost calls: ranks compare those that begin, and hear of an error that leaves one.

A comparison is one exchange of digests over the links of each axis. Only where they differ, texts follow.
"""

import functools
import hashlib
import itertools
import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from fshard import _compat
from fshard.comm import ops, recorder
from fshard.comm.collective import Caller, rank, supports_cpu_messages
from fshard.comm.events import Label, Verb, make_label
from fshard.comm.failure import CollectiveError, all_fail, ask_store, describe_failure, notify_peers, report_at_once
from fshard.comm.groups import RankState, rank_state
from fshard.errors import Problem, refuse
from fshard.tree import Axis, Flat, flatten, is_sharded
from fshard.tree.checks import is_reachable

# The bytes of what ranks compare: NO_AXIS and a digest of their facts. Ranks that are known to differ send one byte
# instead, the number of the first axis on which they do.
DIGEST_BYTES = 16
NO_AXIS = 255
# The name of the first fact of a call, which is the name of its function.
VERB_FACT = "verb"
# What to do where ranks make different calls.
SAME_CALLS = "make the same calls in the same order on every rank, with equal strategies, dtypes and arguments"

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


@functools.lru_cache(maxsize=64)
def _write_facts(arguments: tuple[Any, ...], *leaves: tuple[Any, ...]) -> str:
    """Write as JSON what decides the collectives of a call. That is slow, and the same in every step.

    Args:
        arguments: The names and texts of arguments.
        *leaves: The paths of leaves, their specs and their dtypes.
    """
    entries = dict(arguments)
    for path, spec, dtype in zip(*leaves, strict=True):
        parts = {"dtype": dtype, **spec.__getstate__()}
        entries[path] = "\n".join(f"{name} {_write_value(value)}" for name, value in parts.items())
    return json.dumps(entries)


@functools.lru_cache(maxsize=64)
def _digest(facts: str) -> bytes:
    return bytes([NO_AXIS]) + hashlib.blake2b(facts.encode(), digest_size=DIGEST_BYTES - 1).digest()


def _write_value(value: Any) -> str:
    """Write a value so that equal values give the same text on every rank: without addresses and names of groups."""
    return re.sub(r" at 0x\w+|, group_name='[^']*'", "", repr(value))


def check_same_call(api_name: str, axes: Sequence[Axis], flat: Flat, **arguments: Any) -> None:
    """Check that all ranks begin the same call with one small message over each axis.

    Nothing is sent if the ranks of an axis cannot exchange CPU tensors: the host would have to wait for its accelerator
    in every step. In a trace nothing is sent either, and the facts are recorded in its graph.

    Args:
        api_name: The function that begins, which is no part of a running call.
        axes: The mesh axes that it communicates over.
        flat: The tree that the function was given. The dtypes, layouts, policies and transforms of its Sharded leaves
            must be the same on every rank; its other leaves decide no collective.
        **arguments: Other arguments that decide what is sent or what sums mean.

    Raises:
        ValueError: on every rank, if ranks make different calls.
        CollectiveError: if a rank failed.
    """
    if _compat.is_tracing():
        ops.record_facts(_facts_of_tree(api_name, flat, arguments))
    elif asked := _axes_to_compare(axes):
        _begin_call(api_name, dict.fromkeys(asked, _facts_of_tree(api_name, flat, arguments)))


def record_update(axes: Sequence[Axis], text: str) -> None:
    """Record an update for ranks to compare with the next collective over each axis, or in a trace in its graph.

    Args:
        axes: The mesh axes that the leaves live on. Without any nothing is compared: ranks may step whole leaves of
            their own.
        text: What must be the same on every rank.
    """
    if axes and _compat.is_tracing():
        ops.record_facts(json.dumps({"update": text}))
        return
    groups = rank_state().groups
    for axis in axes:
        if axis.group_name in groups:
            groups[axis.group_name].record_update(text)


def check_same_facts(api_name: str, facts: Mapping[Axis, str], failure_text: str = "") -> None:
    """Check that all ranks begin the same call, as `check_same_call` does, if its facts have been written already.

    Args:
        api_name: The function that begins, which is no part of a running call.
        facts: For each axis that it communicates over, a JSON object: texts by the names of all that must be the same
            on the ranks of the axis.
        failure_text: The error with which this rank has failed instead, if it has.

    Raises:
        ValueError: on every rank, if ranks make different calls.
        CollectiveError: if a rank failed.
    """
    if asked := _axes_to_compare(facts):
        _begin_call(api_name, {axis: facts[axis] for axis in asked}, failure_text)


def _begin_call(api_name: str, facts: Mapping[Axis, str], failure_text: str = "") -> None:
    """Send the message that begins a call, and refuse the call on every rank if ranks make different ones."""
    rank_state().has_begun = True
    differences = _compare_facts(facts, Label(Verb.START, (api_name,)), failure_text)
    refuse(f"{api_name}: ranks make different calls", differences, SAME_CALLS)


def _axes_to_compare(axes: Iterable[Axis]) -> list[Axis]:
    """List the axes over which a call is compared; none if ranks cannot exchange CPU tensors on one of them."""
    asked = _axes_to_ask(axes)
    return asked if all(map(supports_cpu_messages, asked)) else []


def _facts_of_tree(api_name: str, flat: Flat, arguments: Mapping[str, Any]) -> str:
    """Write as JSON what a call was given: its name, its arguments, and its Sharded leaves."""
    # Three long tuples are faster to build than thousands of small ones.
    paths = tuple(itertools.compress(flat.paths, map(is_sharded, flat.leaves)))
    specs = tuple([leaf.spec for leaf in flat.sharded])
    dtypes = tuple([leaf.local.dtype for leaf in flat.sharded])
    texts = [(name, _write_value(value)) for name, value in arguments.items()]
    return _write_facts(((VERB_FACT, api_name), *texts), paths, specs, dtypes)


def find_disagreement(entries: Mapping[str, str], axes: Sequence[Axis], label: Caller) -> list[Problem]:
    """Compare named entries between all ranks of some axes.

    Args:
        entries: What this rank has, by the name of each thing that must agree.
        axes: The mesh axes to compare over.
        label: The name of the caller, for the recorder.

    Returns:
        Nothing if all ranks agree, else the first entry that differs. It is the same on every rank, and all of them
        must end the running call with it.

    Raises:
        CollectiveError: if a rank failed in another call.
    """
    facts = json.dumps(dict(entries))
    return _compare_facts(dict.fromkeys(_axes_to_ask(axes), facts), make_label(label))


class _FactsOfRank(NamedTuple):
    """What one rank has brought to a comparison. Those of ranks that have failed sort first.

    Attributes:
        is_ready: Whether the rank has not failed.
        rank: Its place on the axis.
        place: Its coordinates, as text.
        text: Its facts, or its error.
    """

    is_ready: bool
    rank: int
    place: str
    text: str


def _compare_facts(facts: Mapping[Axis, str], label: Label, failure_text: str = "") -> list[Problem]:
    """Compare facts over their axes, in the order of `_axes_to_ask`: find the first entry that differs.

    If the facts of a rank are the same for all its axes, every rank finds out whether there is a difference. Otherwise
    it is known on the ranks of that axis and of those compared after it.

    Returns:
        The entry, the same on every rank; none if all ranks agree.

    Raises:
        CollectiveError: if a rank failed.
    """
    first_axis = _find_differing_axis(facts, label, failure_text)
    if first_axis == NO_AXIS:
        return []
    # Ranks elsewhere on earlier axes may not know of the difference, and have gone on.
    axes = list(facts)[first_axis:]
    axis = axes[0]
    place = ", ".join(f"{axis.name}={rank(axis)}" for axis in axes)
    local = _FactsOfRank(not failure_text, rank(axis), place, failure_text or facts[axis])
    first, *others = _exchange_facts(local, axes, label)
    if first_axis == 0 or len(set(facts.values())) == 1:
        # All ranks know now why the running call ends, so that nobody needs to report it.
        rank_state().call = None
    if first.is_ready:
        return _find_first_difference(first, *others)
    text = first.text
    if label.verb == Verb.START:
        text += f"\nTo fix: correct the error above. {label.unit} has not sent any data."
    if not failure_text:
        report_at_once(text)
    raise CollectiveError(text)


def _find_differing_axis(facts: Mapping[Axis, str], label: Label, failure_text: str) -> int:
    """Exchange digests over one axis after another, and find the number of the first on which ranks differ.

    Ranks that have the same place on all earlier axes find the same one, and NO_AXIS if there is none. A rank that has
    failed differs from all others.
    """
    first_axis = 0 if failure_text else NO_AXIS
    for number, (axis, text) in enumerate(facts.items()):
        # Ranks of the next axis must learn of a difference too, or they would not ask for texts with the others.
        known = _digest(text) if first_axis == NO_AXIS else bytes([first_axis])
        merge = functools.partial(_merge_digests, number)
        merged = recorder.spread(known, merge, axis, label, "a digest")
        first_axis = merged[0]
    return first_axis


def _exchange_facts(local: _FactsOfRank, axes: Sequence[Axis], label: Label) -> list[_FactsOfRank]:
    """Show all ranks of some axes the facts of the first rank, and of the first that differs from it, if one does."""
    pair = merge_objects([local], _keep_first_two, axes[:1], label, "texts")
    # The ranks of one row may differ, and those of another agree.
    longest: list[Any] = [-len(pair), pair]
    _, pair = merge_objects(longest, min, axes[1:], label, "texts")
    return [_FactsOfRank(*each) for each in pair]


def _keep_first_two(facts: list[Any], other: list[Any]) -> list[Any]:
    """Keep the facts of the first rank, and of the first whose text is another."""
    first, *rest = sorted(facts + other)
    return [first, *[each for each in rest if each[-1] != first[-1]][:1]]


def _merge_digests(number: int, known: bytes, other: bytes) -> bytes:
    """Merge what two ranks know of the digests on the axis of a number: one digest, or the first axis that differs."""
    if known == other:
        return known
    return bytes([min(known[0], other[0], number)])


def _find_first_difference(first: _FactsOfRank, other: _FactsOfRank) -> list[Problem]:
    """Find the first entry that one of two ranks lacks, or that differs between them, if there is one.

    The verb comes first, then entries that one rank lacks. The order of entries comes last: ranks send leaves in it.
    """
    expected: dict[str, str] = json.loads(first.text)
    got: dict[str, str] = json.loads(other.text)
    for entries in (expected, got):
        # Keys of an OrderedDict are in the order in which they were set.
        entries["(order)"] = "\n".join(entries)
    names = dict.fromkeys([*expected, *got])
    for name in sorted(names, key=lambda name: (name != VERB_FACT, name in expected and name in got)):
        lines = [facts.get(name, "nothing").split("\n") for facts in (got, expected)]
        for got_line, expected_line in itertools.zip_longest(*lines, fillvalue="nothing"):
            if got_line != expected_line:
                got_text = f"{got_line} on the rank at {other.place}"
                return [Problem(name, got_text, f"{expected_line} as on the rank at {first.place}")]
    return []


def all_gather_object(value: Any, axes: Sequence[Axis], label: Caller) -> list[Any]:
    """Show every rank of some axes a value of each of them.

    Args:
        value: The value of this rank, of any size, which JSON can hold. Tuples become lists.
        axes: The mesh axes.
        label: The name of the caller, for the recorder.

    Returns:
        The values in the order of the ranks, the same on every rank; of several axes the first by name varies fastest.
    """
    # The first axis varies fastest.
    order = json.dumps([rank(axis) for axis in _axes_to_ask(axes)][::-1])
    values = merge_objects({order: value}, operator.or_, axes, label, "a value of each rank")
    return [values[order] for order in sorted(values, key=json.loads)]


def merge_objects(
    value: T,
    merge: Callable[[T, T], T],
    axes: Sequence[Axis],
    label: Caller,
    parts: str = "a merged value",
) -> T:
    """Merge the values of all ranks of some axes into one.

    Ranks send on what is merged: it takes log2 W messages of each, of one value, where `all_gather_object` shows every
    rank W values.

    Args:
        value: The value of this rank, of any size, which JSON can hold. Tuples become lists.
        merge: Merges the values of some ranks and of others. It is associative and commutative, and merging what is
            merged already changes nothing.
        axes: The mesh axes.
        label: The name of the caller, for the recorder.
        parts: What the value is, for texts.

    Returns:
        The merged value, the same on every rank.
    """
    label = make_label(label)
    known = json.dumps(value).encode()
    for axis in _axes_to_ask(axes):
        known = recorder.spread(known, functools.partial(_merge_json, merge), axis, label, parts)
    # One rank sees what several would.
    return json.loads(known)


def _merge_json(merge: Callable[[Any, Any], Any], known: bytes, other: bytes) -> bytes:
    return json.dumps(merge(json.loads(known), json.loads(other))).encode()


def join_flags(flags: Sequence[bool], axes: Sequence[Axis], label: Caller) -> list[bool]:
    """Find out which flags are set on any rank of some axes.

    Args:
        flags: Those of this rank, as many on every rank.
        axes: The mesh axes.
        label: The name of the caller, for the recorder.

    Returns:
        For each flag whether it is set on any rank.
    """
    parts = f"{len(flags)} flags"
    return merge_objects(list(flags), lambda some, others: list(map(operator.or_, some, others)), axes, label, parts)


def _axes_to_ask(axes: Iterable[Axis]) -> list[Axis]:
    """List the axes whose ranks are asked, in one order for every function.

    There are none in a trace, where no tensor has a value.
    """
    if _compat.is_tracing():
        return []
    return sorted([axis for axis in axes if axis.size > 1], key=lambda axis: axis.name)


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
    if is_alone or rank_state().call:
        yield
        return
    state = rank_state()
    state.call = api_name
    state.has_begun = not begins
    if state.watcher is not None:
        state.watcher.interrupts.listen()
    with _compat.keeping_thread_object(recorder.CALL_KEY, api_name):
        try:
            yield
        except BaseException as error:
            if state.watcher is not None:
                # Forget signals that Python has already raised.
                state.watcher.interrupts.listen()
            if state.others:
                _report_failure(state, api_name, axes, error)
            raise
        finally:
            state.call = None
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
    reachable = [*filter(is_reachable, axes)]
    # Nobody of another mesh waits for this rank.
    if (reachable or not axes) and _must_report(state):
        failure_text = describe_failure(state.rank, api_name, error)
        if not state.has_begun:
            with suppress(Exception):
                check_same_facts(api_name, dict.fromkeys(reachable, "{}"), failure_text)
        if _must_report(state) and not all_fail(state, f"{api_name} {type(error).__name__}"):
            notify_peers(state, failure_text)
    in_flight = list(state.in_flight.values())

    def release() -> None:
        # Wait until the backend has released the tensors that it works on.
        for buffer in in_flight:
            with suppress(RuntimeError):
                ops.wait(buffer)

    if state.failure is None:
        release()
    else:
        # gloo never ends the wait for a message that had come in part when its connection was cut.
        ask_store(release)


def _must_report(state: RankState) -> bool:
    """Whether the other ranks have not heard yet that the call fails."""
    return state.call is not None and state.failure is None


def axes_in(arguments: Any) -> Sequence[Axis]:
    """List the axes over which a function of Axis values and Sharded leaves communicates."""
    flat = flatten(arguments)
    axes = [leaf for leaf in flat.leaves if isinstance(leaf, Axis)]
    for spec in flat.specs:
        axes += (spec.transform or spec).axes
    return tuple(dict.fromkeys(axes))


def call(f: Callable[P, R], api_name: str = "", begins: bool = True) -> Callable[P, R]:
    """Make a function an outermost call, unless one is running.

    Args:
        f: The function.
        api_name: The name that errors give it; by default its own.
        begins: Whether it begins by a message over the axes of its arguments.

    Returns:
        The function.
    """

    @functools.wraps(f)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with calling(api_name or f.__name__, lambda: axes_in((args, kwargs)), begins=begins):
            return f(*args, **kwargs)

    return run
