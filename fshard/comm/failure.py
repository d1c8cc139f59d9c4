"""Ranks that fail or differ: what they tell each other through the store, and the error that all of them end with.

The first rank that knows of a failure writes a note. Every rank that reads it ends its own connections, which wakes
those that wait for it, and lingers until the others have read it too: the store may go with the rank that holds it.
A thread of each process looks, where it waits for long, for a note, and for a difference between ranks.
"""

import atexit
import itertools
import json
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch.distributed as dist

from fshard import _compat
from fshard.comm.groups import TEXT, Group, Issued, Link, World
from fshard.comm.interrupts import Interrupts

# Seconds: for a call of the store, which may hang with the rank that holds it; until a note may be there where a
# connection ended; in which all ranks may fail; that a rank lingers; between two questions.
ANSWER, GRACE, ALIKE, LINGER, LOOK = 1.0, 0.35, 0.3, 0.7, 0.02

# Seconds of the thread: of waiting before the first look; between looks at the clock; between two looks at most.
PATIENCE, SLICE, SELDOM = 0.4, 0.1, 30.0
# Ranks that one look of it asks at most.
ASKED = 8

REMEDY = (
    "mend the first error; go on from the last checkpoint, or in the same processes: call fs.init_mesh on every rank, "
    "and the step again, from states of one step"
)

RESTART = "mend the first error, and call fs.init_mesh on every rank, or start all ranks again"
STORE_IS_GONE = (
    "the store by which ranks find each other does not answer: rank 0, or the launcher, which holds it, was killed or "
    f"has ended\nTo fix: {RESTART}."
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
    To fix: mend the first error; ...
    """


class Position(NamedTuple):
    """Where a rank is, as it tells others.

    Attributes:
        waits: The group that it waits in, and the parts of the link that it waits for; None where it does not.
        groups: By the name of each of its groups the ranks there, and the links that it has started last.
    """

    waits: tuple[str, Any] | None
    groups: Mapping[str, tuple[list[int], Any]]

    @classmethod
    def of(cls, world: World) -> "Position":
        """Where this rank is."""
        at = (issued.group.name, issued.step) if (issued := world.waiting) else None
        return cls(at, {group.name: (group.ranks, list(group.trail)) for group in list(world.groups.values())})

    def at(self) -> str:
        """Say where it waits."""
        return f"waits in {Link(*self.waits[1])}" if self.waits else "runs"


Positions = Mapping[int, Position]


def difference(positions: Positions) -> str | None:
    """Say how ranks differ in the collectives that they have started last; None where they do not."""
    started: dict[tuple[str, int], dict[int, Link]] = {}
    members: dict[str, list[int]] = {}
    for rank, position in positions.items():
        for name, (members[name], trail) in position.groups.items():
            for step in map(Link._make, trail):
                started.setdefault((name, step.number), {})[rank] = step
    return next(filter(None, (unequal(started[place], members[place[0]]) for place in sorted(started))), None)


def unequal(steps: Mapping[int, Link], ranks: Sequence[int]) -> str | None:
    """Say how steps of one number in the group of some ranks differ, or the sizes of what these exchange."""
    first = "ranks differ in a collective"
    if len({step.chain for step in steps.values()}) == 1:
        first = "ranks differ in the rows that they send each other"
        pairs = [pair for pair in itertools.permutations(steps, 2) if steps[pair[0]].sends]
        if all(steps[a].sends[ranks.index(b)] == steps[b].receives[ranks.index(a)] for a, b in pairs):
            return None
    return "\n".join([first, *(f"  rank {rank}: {steps[rank]}" for rank in sorted(steps))])


def circle(own: int, positions: Positions) -> str | None:
    """Say which ranks wait for each other in a circle, in different groups.

    That this rank still waits when all have been looked at makes old answers of those true that wait for it.

    Args:
        own: This rank.
        positions: Where ranks are, as far as they have told.

    Returns:
        Who waits where; None where this rank waits for none that waits for it.
    """
    stuck, more = set[int](), {own}
    while more:
        stuck |= more
        more = {rank for rank in positions if _behind(rank, positions) & stuck} - stuck
    if not _behind(own, positions) & stuck:
        return None
    first = "ranks wait for each other in different collectives"
    return "\n".join([first, *(f"  rank {rank} {positions[rank].at()}" for rank in sorted(stuck))])


def _behind(rank: int, positions: Positions) -> set[int]:
    """The ranks that one waits for: those of a group that have started fewer collectives, or have not told."""
    position = positions.get(rank)
    if position is None or position.waits is None:
        return set()
    name, (number, *_) = position.waits
    started = {r: other.groups[name][1][-1][0] for r, other in positions.items() if name in other.groups}
    return {r for r in position.groups[name][0] if started.get(r, 0) < number}


def answer(ask: Callable[[], Any], seconds: float = 0.0) -> Any:
    """Ask the store, again and again for some seconds until it finds something; None where it does not answer.

    It may be gone, or hang with the rank that holds it.
    """
    found: list[Any] = []

    def run() -> None:
        deadline = time.monotonic() + seconds
        with suppress(Exception):
            while not (value := ask()) and time.monotonic() < deadline:
                time.sleep(LOOK)
            found.append(value)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds + ANSWER)
    return found[0] if found else None


def connected(
    world: World,
    name: str,
    look: Callable[[], object] = bool,
    run: Callable[[Callable[[], Any]], Any] = lambda make: make(),
) -> Group:
    """Find this rank's own group of an axis, or connect with its other ranks, and let the thread watch it.

    Args:
        world: This rank's.
        name: The name of the axis's process group.
        look: Called from time to time while this rank waits for the others.
        run: Runs what waits for them inside gloo.

    Returns:
        The group.

    Raises:
        CollectiveError: if one of them does not come.
    """
    group = world.groups.get(name)
    if group is None:
        ranks = dist.get_process_group_ranks(_compat.resolve_process_group(name))
        timeout = _compat.timeout_of(name)
        board = dist.PrefixStore(f"{name} of {ranks}", world.board())  # type: ignore[attr-defined]
        try:
            pair, sockets = _compat.make_pair(name, board, look, run)
        except CollectiveError:
            raise
        except RuntimeError as error:
            places = answer(lambda: _compat.absent_from_pair(board, len(ranks)))
            if places is None:
                raise CollectiveError(STORE_IS_GONE) from error
            absent = [ranks[place] for place in places]
            got = f"nothing from ranks {absent}" if absent else f"{error!s:.300}"
            raise CollectiveError(f"expected ranks {ranks} to connect in {timeout:g} s, got: {got}") from error
        group = world.groups[name] = Group(name, ranks, ranks.index(world.rank), pair, timeout, sockets)
    if world.lookout is None and group.pair is not None:
        world.lookout = Lookout(world)
        world.lookout.start()
        if world.call is not None:
            world.lookout.interrupts.listen()
    return group


def read(board: Any, kind: str, names: Iterable[object]) -> str:
    """Read the first text of a kind that one of some names has; "" if none has."""
    texts = (board.compare_set(f"{kind}/{name}", "", "").decode() for name in names)
    return next(filter(None, texts), "")


def _noted(world: World, text: str) -> str:
    """Leave a note in this rank's groups, and return the one that was there first."""
    board, groups = world.board(), list(world.groups)
    first = read(board, "note", groups) or text
    for name in groups:
        first = board.compare_set(f"note/{name}", "", first).decode()
    return first


def tell(world: World, text: str) -> None:
    """Break this rank's groups: leave a note, end the connections, and linger until the others have read it."""
    board, keys = world.board(), [f"read/{rank}" for rank in world.others]
    world.broken = answer(lambda: _noted(world, text)) or text
    cut(world)
    answer(lambda: board.set(f"read/{world.rank}", "") or board.check(keys), LINGER)


def cut(world: World) -> set[int]:
    """End this rank's connections, and return the ranks whose had ended before."""
    gone = set()
    for group in list(world.groups.values()):
        if group.pair is not None:
            gone |= {group.ranks[place] for place in _compat.cut(group.pair, group.own, len(group.ranks))}
        elif world.wake is not None:
            world.wake(group.name, world.generation, str(world.broken))
    return gone


def ended(world: World, issued: Issued, error: BaseException) -> CollectiveError:
    """Make the error of a collective that could not start or land.

    Args:
        world: This rank's.
        issued: The collective.
        error: What the backend says.

    Returns:
        The error, whose reason is the same on every rank.
    """
    if world.broken is None:
        tell(world, str(error) if world.wake is not None else _lost(world, issued, error))
    return failure(world, issued.step)


def failure(world: World, step: Link | None = None) -> CollectiveError:
    """Make the error of groups that are broken, for a collective that this rank was in, or None."""
    own = [] if step is None else [f"  rank {world.rank}, this one, was in {step}"]
    return CollectiveError("\n".join([str(world.broken), *own, f"To fix: {REMEDY}."]))


def _lost(world: World, issued: Issued, error: BaseException) -> str:
    """Say why a wait ended: by the note of a rank that knows, else which rank is gone or did not come."""
    board, group, late = world.board(), issued.group, time.monotonic() - issued.since
    answer(lambda: _positions(world, issued, 0))
    if note := answer(lambda: read(board, "note", world.groups), GRACE):
        return note
    # A wait that lasts too long ends its connection itself.
    gone = set() if late > 0.95 * group.timeout else cut(world) & {*group.ranks}
    positions = answer(lambda: _positions(world, issued, len(group.ranks))) or {world.rank: Position.of(world)}
    behind = _behind(world.rank, positions)
    # A rank may wait for others itself; it may have gone on since it told where.
    absent = sorted(gone & behind or {rank for rank in behind if not _behind(rank, positions)} or behind)
    who = " and ".join(f"rank {rank}" for rank in absent)
    if not absent:
        first = f"rank {world.rank} failed in {issued.step}: {error!s:.{TEXT}}"
    elif gone:
        first = f"{who} was killed or has ended"
    else:
        first = f"{who} did not come within {late:.0f} s: it is stopped, hangs or computes"
    # A rank that is gone may have told of an earlier wait.
    told = {rank: position for rank, position in sorted(positions.items()) if position.waits and rank not in gone}
    where = [f"  rank {rank} {position.at()}" for rank, position in told.items()]
    return "\n".join([first, *where])


def _positions(world: World, issued: Issued, most: int) -> dict[int, Position]:
    """Tell where this rank is, and read where some others are that it waits for, or those wait for."""
    board, positions = world.board(), {world.rank: Position.of(world)}
    board.set(f"at/{world.rank}", json.dumps(positions[world.rank]))
    ranks = [rank for rank in issued.group.ranks if rank != world.rank][:most]
    for rank in ranks:
        if text := read(board, "at", [rank]):
            positions[rank] = Position(*json.loads(text))
        ranks += sorted(_behind(rank, positions) - {world.rank, *ranks})[: most - len(ranks)]
    return positions


def wake_waiting(world: World, action: str, has_come: Callable[[int], bool]) -> None:
    """Wake the ranks that wait for this one in a collective which it has not started, and will not start any more.

    Ranks that are late only, in a collective that this one has started, are left alone.

    Args:
        world: This rank's, which waits for the others elsewhere.
        action: What this rank does instead.
        has_come: Tells whether another rank has come to where this one waits.
    """
    if world.broken is not None or not world.others:
        return
    positions = {world.rank: Position.of(world)} | (answer(lambda: _positions_of_some(world)) or {})
    behind = [rank for rank in positions if world.rank in _behind(rank, positions)]
    # Where a rank waits after it has come here, it is ahead of this one, which has not seen yet that all are here.
    waiting = [rank for rank in sorted(behind) if not has_come(rank)]
    if waiting:
        first = f"rank {world.rank} {action}, while others wait for it in a collective"
        tell(world, "\n".join([first, *(f"  rank {rank} {positions[rank].at()}" for rank in waiting)]))


def _positions_of_some(world: World) -> dict[int, Position]:
    """Read where some others were when they last told; simulated ranks are threads, and need not tell."""
    if world.wake is not None:
        return {peer.rank: Position.of(peer) for peer in list(world.simulated) if peer is not world}
    board = world.board()
    # Others each time, as each look asks a few.
    asked = random.sample(world.others, min(ASKED, len(world.others)))
    texts = {rank: read(board, "at", [rank]) for rank in asked}
    return {rank: Position(*json.loads(text)) for rank, text in texts.items() if text}


def all_fail(world: World, what: str) -> bool:
    """Compare with the other ranks whether all fail in the same way, at the same place, in a short time.

    Args:
        world: This rank's.
        what: The call and the class of the error.

    Returns:
        Whether they do.
    """
    world.failures += 1
    place = sum(group.trail[-1].number for group in world.groups.values())
    board, key = world.board(), f"failed/{world.failures}/{what} at {place}"
    keys = [f"{key}/{rank}" for rank in world.others]
    answer(lambda: board.set(f"{key}/{world.rank}", ""))
    return bool(answer(lambda: board.check(keys), ALIKE))


class Lookout(threading.Thread):
    """Watches one process for as long as its process groups live.

    It is a daemon, because a store that hangs would hold up the process's end; `close` ends it before.
    """

    def __init__(self, world: World) -> None:
        """Begin with a store of its own."""
        super().__init__(name="fshard watcher", daemon=True)
        self._world, self._over = weakref.ref(world), threading.Event()
        self.interrupts = Interrupts()
        # Before process groups are destroyed, as what is registered later runs first.
        atexit.register(self.close)

    def close(self) -> None:
        """End, and let this process's groups go before the interpreter does."""
        self._over.set()
        self.join(ANSWER)
        self.interrupts.close()
        if (world := self._world()) is not None:
            world.groups.clear()

    def run(self) -> None:
        """Look after 0.4 s of waiting in one place, then after 1, 2, 4 and more."""
        world: World | None = None
        since = due = 0.0
        while not self._over.wait(SLICE) and (world := self._world()) is not None:
            if self.interrupts.has_come(world.waiting):
                end_wait(world, f"rank {world.rank} failed in {world.call}: KeyboardInterrupt")
            if (waiting := world.waiting) is not None:
                if waiting.since != since:
                    since, due = waiting.since, PATIENCE
                if time.monotonic() - since >= due:
                    due = min(2 * due + 0.2, due + SELDOM)
                    with suppress(Exception):
                        # Once ranks have been woken, again and again.
                        due = 0.0 if look(world, waiting) else due
            # Between two looks the groups may go.
            world = waiting = None
        if world is None:
            self.interrupts.close()


def end_wait(world: World, text: str) -> None:
    """Leave a note, and end this rank's connections, which wakes its main thread."""
    with suppress(Exception):
        _noted(world, text)
    with suppress(Exception):
        cut(world)


def look(world: World, waiting: Issued) -> bool:
    """Tell where this rank is, read where others are, and wake it if a rank failed or ranks differ."""
    found = read(world.board(), "note", [waiting.group.name])
    if not found:
        positions = _positions(world, waiting, ASKED)
        found = difference(positions) or circle(world.rank, positions) or ""
    if not found or world.waiting is not waiting:
        return False
    _noted(world, found)
    cut(world)
    return True
