"""Ranks that fail or differ: what they tell each other through the store, and the error that all of them end with.

The first rank that knows of a failure writes a note. Every rank that reads it ends its own connections, which wakes
those that wait for it. The rank whose process holds the store lingers until those that live have read it too.
A thread of each process looks, where it waits for long, for a note, and for a difference between ranks.
"""

import atexit
import itertools
import json
import math
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

from fshard import _compat
from fshard.comm.groups import TEXT_LENGTH, ChainEntry, PendingCollective, RankState, aside, is_simulated
from fshard.comm.interrupts import Interrupts
from fshard.comm.processes import describe_ended_ranks, name_ranks
from fshard.errors import name_error

# The key of the text that all ranks raise.
NOTE = "note"
# Seconds that a call of the store may take, which may hang with the rank that holds it.
STORE_TIMEOUT = 1.0
# Seconds until a note may be there after a connection has ended.
NOTE_GRACE = 0.35
# Seconds in which all ranks may fail at the same place.
SAME_FAILURE_WINDOW = 0.3
# Seconds that the rank which holds the store waits at most until the others have read the note.
LINGER_TIME = 0.7
# Seconds between two questions to the store.
STORE_POLL_INTERVAL = 0.02

# Of the thread that watches, in seconds: how long a rank waits before the first poll, how often the thread looks at the
# clock, and how long it lets pass between two polls at most.
FIRST_POLL_AFTER = 0.4
CLOCK_INTERVAL = 0.1
LONGEST_POLL_INTERVAL = 30.0
# How many ranks one poll asks at most.
MAX_RANKS_PER_POLL = 8
# How many of the last collectives a report lists.
REPORTED_ENTRIES = 4
# A wait of more than this part of the timeout has ended by the timeout.
TIMEOUT_FRACTION = 0.95

LOOK_FOR_HANG = "Look for a hang or a long computation there, or raise the mesh's timeout."

REMEDY = (
    "correct the first error. Then restart from the last checkpoint, or stay in the same processes: call fs.init_mesh "
    "on every rank and repeat the step, with states of the same step on all ranks"
)

RESTART = "correct the first error, then call fs.init_mesh on every rank or restart all ranks"
STORE_IS_GONE = (
    "The rendezvous store does not answer. The process that holds it (rank 0 or the launcher) was killed or has ended."
    f"\nTo fix: {RESTART}."
)


class CollectiveError(RuntimeError):
    """A rank failed, is gone or late beyond the mesh's timeout, or does something else; the same reason on every rank.

    >>> import torch, fshard as fs
    >>> def program():
    ...     axis = fs.axis_of(fs.init_mesh({"shard": -1}, device="cpu"))
    ...     try:
    ...         fs.psum(torch.ones(2 + fs.axis_index(axis)), axis)
    ...     except fs.comm.CollectiveError as error:
    ...         return str(error)
    >>> print(fs.testing.spmd(program, world=2)[0])
    ranks differ in a collective
      rank 0: all_reduce number 1 (psum) over 'shard' of float32 (2,), 8 bytes in psum
      rank 1: all_reduce number 1 (psum) over 'shard' of float32 (3,), 12 bytes in psum
      rank 0, this one, was in all_reduce number 1 (psum) over 'shard' of float32 (2,), 8 bytes in psum
    To fix: correct the first error. ...
    """


class Position(NamedTuple):
    """Where a rank is, as it tells others.

    Attributes:
        groups: By the name of each of its groups the entries that it has started last.
        group: The name of the group that it waits in; "" if it does not wait.
        entry: The parts of the entry that it waits for.
        step: The first part of the `awaits` of its `PendingCollective`.
        ranks: The other part: those that it waits for, as far as they are not further than `entry` and `step`.
    """

    groups: Mapping[str, Sequence[Any]]
    group: str = ""
    entry: Any = ChainEntry()
    step: float = -1
    ranks: Sequence[int] = ()

    @classmethod
    def of(cls, state: RankState) -> "Position":
        """Where this rank is."""
        # The wait is read first, as the rank may go on meanwhile: it would seem not to have started what it waits for.
        issued = state.awaited
        wait = (issued.group.name, issued.entry, *issued.awaits) if issued else ()
        groups = {group.name: list(group.chain) for group in list(state.groups.values())}
        return cls(groups, *wait)


Positions = Mapping[int, Position]
# Where a rank is that has not told.
NOWHERE = Position({})


def find_difference(positions: Positions) -> str | None:
    """Say how ranks differ in the collectives that they have started last; None if they do not."""
    started: dict[tuple[str, int], dict[int, ChainEntry]] = {}
    for rank, position in positions.items():
        for name, entries in position.groups.items():
            for entry in map(ChainEntry._make, entries):
                started.setdefault((name, entry.number), {})[rank] = entry
    differences = map(describe_difference, map(started.__getitem__, sorted(started)))
    return next(filter(None, differences), None)


def describe_difference(entries: Mapping[int, ChainEntry]) -> str | None:
    """Say how entries of one number in the group of some ranks differ, or the rows that these ranks exchange.

    Args:
        entries: By ranks, as far as they are known.

    Returns:
        A line, and one for each rank; None if the entries go together.
    """
    if len({entry.chain_hash for entry in entries.values()}) > 1:
        first = "ranks differ in a collective"
    elif not _do_rows_agree(entries):
        first = "ranks differ in the rows that they send each other"
    else:
        return None
    return "\n".join([first, *(f"  rank {rank}: {entries[rank]}" for rank in sorted(entries))])


def _do_rows_agree(entries: Mapping[int, ChainEntry]) -> bool:
    """Whether each rank awaits as many rows from another as that one sends."""
    pairs = itertools.permutations(entries.values(), 2)
    return all(
        not sender.sends or sender.sends[receiver.place] == receiver.receives[sender.place]
        for sender, receiver in pairs
    )


def find_circle(local_rank: int, positions: Positions) -> str | None:
    """Say which ranks wait for each other in a circle, in different groups.

    Answers may be old. They are still correct for ranks that wait for this one, because it has not moved since.

    Args:
        local_rank: This rank.
        positions: Where ranks are, as far as they have told.

    Returns:
        Where this rank waits, and all that it waits for by way of others; None if it waits for none that waits for it.
    """
    reached = _follow(_awaited_by(local_rank, positions), positions)
    if local_rank not in reached:
        return None
    return _add_waits("ranks wait for each other in different collectives", positions, reached)


def _follow(ranks: Iterable[int], positions: Positions) -> set[int]:
    """Find some ranks, those that they wait for, those that these wait for, and so on."""
    reached = [*ranks]
    # The list grows as it is read.
    for rank in reached:
        reached += _awaited_by(rank, positions).difference(reached)
    return set(reached)


def _add_waits(first: str, positions: Positions, ranks: Iterable[int]) -> str:
    """Write behind a line one for each of some ranks that has told where it waits."""
    lines = [first]
    for rank in sorted(positions.keys() & ranks):
        position = positions[rank]
        if position.group:
            lines.append(f"  rank {rank} waits in {ChainEntry(*position.entry)}")
    return "\n".join(lines)


def _awaited_by(rank: int, positions: Positions) -> set[int]:
    """The ranks that one waits for: those of a group that have started fewer collectives, or have not told."""
    waiting = positions.get(rank, NOWHERE)
    place = waiting.entry[0], waiting.step
    return {other for other in waiting.ranks if _place_in(waiting.group, positions.get(other, NOWHERE)) < place}


def _place_in(name: str, position: Position) -> tuple[int, float]:
    """Compute the collective and the round that a rank is in; one that does not wait there has ended its rounds."""
    number, *_ = position.groups.get(name, [[0]])[-1]
    return number, position.step if position.group == name else math.inf


def ask_store(ask: Callable[[], Any], seconds: float = 0.0) -> Any:
    """Ask the store, again and again for some seconds until it has something; None if it does not answer.

    It may be gone, or hang with the rank that holds it, so a thread asks.
    """
    answers: list[Any] = []

    def run() -> None:
        deadline = time.monotonic() + seconds
        with suppress(Exception):
            while not (value := ask()) and time.monotonic() < deadline:
                time.sleep(STORE_POLL_INTERVAL)
            answers.append(value)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    with aside() if seconds else nullcontext():
        thread.join(seconds + STORE_TIMEOUT)
    return next(iter(answers), None)


def read_note(board: Any) -> str:
    """Read the note; "" if there is none."""
    return board.get(NOTE).decode() if board.check([NOTE]) else ""


def leave_note(board: Any, text: str) -> str:
    """Leave a note for all ranks, and return the one that was there first."""
    return ask_store(lambda: board.compare_set(NOTE, "", text).decode()) or text


def linger(member: Any) -> None:
    """Tell that this rank has read a note. If its process holds the store, wait until others have read it too.

    Args:
        member: The RankState or the Meeting of this rank.
    """
    board = member.board
    ask_store(lambda: board.set(f"read/{member.rank}", ""))
    if _compat.holds_store(member.store):
        keys = [f"read/{other}" for other in member.others]
        ask_store(lambda: board.check(keys), LINGER_TIME)


def notify_peers(state: RankState, text: str) -> CollectiveError:
    """Break this rank's groups: leave a note, end the connections, and linger until all others have read it.

    Returns:
        The error of the groups, for a caller that has no other one.
    """
    state.failure = cut_connections(state, text)
    linger(state)
    return make_error(state)


def cut_connections(state: RankState, text: str) -> str:
    """Leave a note, and end this rank's connections, which wakes it and those that wait for it.

    Args:
        state: This rank's.
        text: The reason.

    Returns:
        The note that was there first.
    """
    reason = leave_note(state.board, text)
    state.is_cut = True
    for group in list(state.groups.values()):
        if state.simulation is not None:
            state.simulation.wake(group.name, state.generation, reason)
            continue
        with suppress(Exception):
            group.links.cut()
            if group.pair is not None:
                _compat.cut(group.pair)
            # Otherwise an accelerator would wait for ever in a collective that the failed rank does not join.
            _compat.abort_backends(group.name)
    return reason


def fail_collective(state: RankState, issued: PendingCollective, error: BaseException) -> CollectiveError:
    """Notify the other ranks of a collective that could not start or end, and make the error of this one.

    Args:
        state: This rank's.
        issued: The collective.
        error: What the backend says.

    Returns:
        The error, whose reason is the same on every rank.
    """
    if state.failure is None:
        if state.simulation is not None:
            text = str(error)
        else:
            text = _explain_lost_wait(state, issued, error)
        notify_peers(state, text)
        lines = [f"\n  {entry}" for entry in list(issued.group.chain)[-REPORTED_ENTRIES:] if entry.number > 0]
        last = f"\nThe last collectives of this rank over these ranks:{''.join(lines)}"
        report_at_once(f"{make_error(state, issued.entry)}{last}")
    return make_error(state, issued.entry)


def report_at_once(text: str) -> None:
    """Tell torchrun, and standard error, why the call of this rank ends, because torchrun may end the process first.

    Args:
        text: The text of the CollectiveError that the rank is about to raise.
    """
    if not is_simulated():
        _compat.report_to_launcher(f"CollectiveError: {text}")


def _find_ended_ranks(state: RankState, issued: PendingCollective) -> set[int]:
    """Find the ranks whose connections in the group of a collective ended before this rank's."""
    group = issued.group
    # A wait that lasts too long ends its connection itself.
    if state.is_cut or time.monotonic() - issued.since > TIMEOUT_FRACTION * group.timeout:
        return set()
    # The links are those of all axes of a mesh.
    ended = set(group.ranks).intersection(group.links.find_ended_peers())
    if group.pair is not None:
        # The receives must live until the connections are cut.
        places, group.receives = _compat.find_lost_peers(group.pair)
        ended.update(group.ranks[place] for place in places)
    return ended


def describe_failure(rank: int, place: object, error: BaseException) -> str:
    """Say that a rank has failed at a place, such as a call, with an error."""
    return f"rank {rank} failed in {place}: {name_error(error)}"


def make_error(state: RankState, entry: ChainEntry | None = None) -> CollectiveError:
    """Make the error of groups that are broken, for a collective that this rank was in, or None."""
    where = f"\n  rank {state.rank}, this one, was in {entry}" if entry else ""
    return CollectiveError(f"{state.failure}{where}\nTo fix: {REMEDY}.")


def _explain_lost_wait(state: RankState, issued: PendingCollective, error: BaseException) -> str:
    """Say why a wait ended: by the note of a rank that knows, else which rank is gone or did not come.

    Args:
        state: This rank's.
        issued: The collective that it waited for.
        error: What the backend says.
    """
    seconds = time.monotonic() - issued.since
    # Ranks that end their connections by themselves leave a note before.
    ended = _find_ended_ranks(state, issued)
    # Others may ask where this rank is while it looks for a note.
    ask_store(lambda: _publish_position(state))
    note = ask_store(lambda: read_note(state.board), 0.0 if ended else NOTE_GRACE)
    if note:
        return note
    positions = _ask_positions(state, issued.awaits[1], len(issued.group.ranks))
    blamed = ended or _find_absent_ranks(issued, positions)
    if ended:
        first = describe_ended_ranks(sorted(ended))
    elif blamed:
        first = f"{name_ranks(sorted(blamed))} did not join a collective within {seconds:.0f} s. {LOOK_FOR_HANG}"
    else:
        first = f"rank {state.rank} failed in {issued.entry}: {error!s:.{TEXT_LENGTH}}"
    # A rank that is gone, or does not come, may have told of an earlier wait.
    return _add_waits(first, positions, positions.keys() - blamed)


def _find_absent_ranks(issued: PendingCollective, positions: Positions) -> set[int]:
    """Find the ranks to blame for a wait that was too long: those that wait for nobody themselves."""
    local_rank = issued.state.rank
    step, source = issued.awaits
    # A rank that is awaited over a link may have told of a later place, but its message has not come.
    first = _awaited_by(local_rank, positions) if step < 0 else {*source}
    blamed = {rank for rank in _follow(first, positions) - {local_rank} if not _awaited_by(rank, positions)}
    # A rank may have gone on since it told where it waits.
    return blamed or first


def _publish_position(state: RankState) -> None:
    """Show other ranks where this one is."""
    state.board.set(f"at/{state.rank}", json.dumps(Position.of(state)))


def _ask_positions(state: RankState, ranks: Sequence[int], limit: int = MAX_RANKS_PER_POLL) -> dict[int, Position]:
    """Read where some ranks were when they last told, and those that these wait for; this one is where it is.

    Simulated ranks are threads, and need not tell.
    """
    if state.simulation is not None:
        return {peer.rank: Position.of(peer) for peer in list(state.simulation.states)}
    board = state.board
    positions = {state.rank: Position.of(state)}
    listed = [rank for rank in ranks if rank != state.rank][:limit]

    def read() -> None:
        # The list grows as it is read.
        for rank in listed:
            text = board.compare_set(f"at/{rank}", "", "").decode()
            if text:
                positions[rank] = Position(*json.loads(text))
            awaited = _awaited_by(rank, positions).difference(listed, positions)
            listed.extend(sorted(awaited)[: limit - len(listed)])

    ask_store(read)
    # The thread that reads may go on where the store does not answer.
    return dict(positions)


def wake_waiting(state: RankState, has_come: Callable[[int], bool]) -> None:
    """Wake the ranks that wait in a collective for this one, which has called init_mesh and will not start it any more.

    Ranks that are late only, in a collective that this one has started, are left alone.

    Args:
        state: This rank's, which waits for the others in init_mesh.
        has_come: Tells whether another rank has come there.
    """
    if state.failure is not None or not state.others:
        return
    # Different ones at each look, because a look asks a few only.
    positions = _ask_positions(state, random.sample(state.others, len(state.others)))
    # A rank that has arrived here and now waits is ahead of this one, which has not yet noticed that all have arrived.
    waiting = [rank for rank in positions if state.rank in _awaited_by(rank, positions) and not has_come(rank)]
    if waiting:
        first = f"rank {state.rank} called init_mesh, while others wait for it in a collective"
        notify_peers(state, _add_waits(first, positions, waiting))


def all_fail(state: RankState, place: str) -> bool:
    """Compare with the other ranks whether all fail in the same way, at the same place, in a short time.

    Args:
        state: This rank's.
        place: The call and the class of the error.

    Returns:
        Whether they do.
    """
    state.failed_calls += 1
    started = sum(group.chain[-1].number for group in state.groups.values())
    board = state.board
    key = f"failed/{state.failed_calls}/{place} at {started}"
    keys = [f"{key}/{rank}" for rank in state.others]
    ask_store(lambda: board.set(f"{key}/{state.rank}", ""))
    simulation = state.simulation
    if simulation is not None:
        # The others may not have had their turns.
        ask_store(lambda: board.check(keys) or simulation.is_idle(), simulation.timeout / 2)
        return bool(board.check(keys))
    return bool(ask_store(lambda: board.check(keys), SAME_FAILURE_WINDOW))


class FailureWatcher(threading.Thread):
    """Watches one process for as long as its process groups live.

    It is a daemon, because a store that hangs would hold up the process's end; `close` ends it before.
    """

    def __init__(self, state: RankState) -> None:
        """Begin with a store of its own."""
        super().__init__(name="fshard watcher", daemon=True)
        self._rank_state = weakref.ref(state)
        self._over = threading.Event()
        self.interrupts = Interrupts()
        # When the wait began that goes on, and after how many seconds of it the others are polled.
        self._since = 0.0
        self._next_poll = 0.0
        # The wait that others have read of; None if there is none, or they have read that it is over.
        self._published: tuple[float, Any] | None = None
        # Before process groups are destroyed, as what is registered later runs first.
        atexit.register(self.close)

    def close(self) -> None:
        """End, and let this process's groups go before the interpreter does."""
        self._over.set()
        self.join(STORE_TIMEOUT)
        state = self._rank_state()
        if state is not None:
            state.groups.clear()

    def leave_to_parent(self) -> None:
        """Let a forked child, which does not have this thread, end without it.

        The thread may have held a lock at the fork, which nobody would let go of in the child.
        """
        self._over = threading.Event()
        # Else the child would write its signals to the pipe of its parent.
        self.interrupts.stop()

    def run(self) -> None:
        """Look at this rank until it is gone."""
        while not self._over.wait(CLOCK_INTERVAL):
            state = self._rank_state()
            if state is None:
                break
            self._look_at(state)
            # Between two looks the groups may go.
            state = None
        # Nothing else holds this thread now.
        atexit.unregister(self.close)

    def _look_at(self, state: RankState) -> None:
        """End a wait if Ctrl-C came; poll the others after 0.4 s in one wait, then after 1, 2, 4 and more."""
        # A signal is told once, so the wait that it may have come in is looked for behind it.
        has_interrupt = self.interrupts.has_come()
        issued = state.awaited
        if has_interrupt and issued is not None:
            cut_connections(state, describe_failure(state.rank, state.call or issued.entry, KeyboardInterrupt()))
        wait = (issued.since, issued.awaits) if issued else None
        if self._published not in (None, wait):
            # Others would take this rank for one that waits, and look for the cause of their waits elsewhere.
            with suppress(Exception):
                _publish_position(state)
            self._published = wait
        if issued is None:
            return
        if issued.since != self._since:
            self._since = issued.since
            self._next_poll = FIRST_POLL_AFTER
        if time.monotonic() - self._since < self._next_poll:
            return
        self._next_poll = min(2 * self._next_poll + 0.2, self._next_poll + LONGEST_POLL_INTERVAL)
        self._published = wait
        with suppress(Exception):
            if poll_peers(state, issued):
                # The main thread may be about to wait on another connection: end them again at the next look.
                self._next_poll = 0.0


def poll_peers(state: RankState, issued: PendingCollective) -> bool:
    """Tell where this rank waits, read where others are, and end the wait if a rank failed or ranks differ.

    Args:
        state: This rank's.
        issued: The collective that it waits for.

    Returns:
        Whether the wait was ended.
    """
    reason = read_note(state.board)
    if not reason:
        _publish_position(state)
        positions = _ask_positions(state, issued.awaits[1])
        reason = find_difference(positions) or find_circle(state.rank, positions) or ""
    if not reason or state.awaited is not issued:
        return False
    cut_connections(state, reason)
    return True
