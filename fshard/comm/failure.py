"""Ranks that fail or differ: what they tell each other through the store, and the error that all of them end with.

The first rank that knows of a failure writes a note. Every rank that reads it ends its own connections, which wakes
those that wait for it, and lingers until the others have read it too: the store may go with the rank that holds it.
"""

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from fshard import _compat
from fshard.comm.groups import TEXT, Group, Link, Waiting, World

T = TypeVar("T")

# So many steps of a group are told to others.
TOLD = 16

# Seconds: for a call of the store, which may hang with the rank that holds it; until a note may be there where a
# connection ended; in which all ranks may fail; that a rank lingers; between two looks.
ANSWER, GRACE, ALIKE, LINGER, LOOK = 1.0, 0.35, 0.3, 0.7, 0.02

REMEDY = (
    "mend the first error; go on from the last checkpoint, or in the same processes: call fs.init_mesh on every rank, "
    "and the step again with the state before it"
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
        waits: The group and number of the collective that it waits in; None where it does not.
        ranks: Those of this group.
        groups: The last steps of each of its groups, by name.
        places: Its place in each.
    """

    waits: tuple[str, int] | None
    ranks: list[int]
    groups: Mapping[str, list[Link]]
    places: Mapping[str, int]

    @classmethod
    def of(cls, world: World) -> "Position":
        """Where this rank is."""
        waiting, known = world.waiting, list(world.groups.values())
        at = None if waiting is None else (waiting.group.name, waiting.step.number)
        groups = {group.name: list(group.trail)[-TOLD:] for group in known}
        places = {group.name: group.own for group in known}
        return cls(at, [] if waiting is None else waiting.group.ranks, groups, places)

    def number(self, group: str) -> int:
        """How many collectives it has started in a group."""
        return self.groups[group][-1].number if self.groups.get(group) else 0

    def text(self) -> str:
        """Write it, for `read`."""
        return json.dumps(self)

    @classmethod
    def read(cls, text: str) -> "Position":
        """Read what `text` wrote."""
        waits, ranks, groups, places = json.loads(text)
        steps = {name: [Link(*step) for step in trail] for name, trail in groups.items()}
        return cls(tuple(waits) if waits else None, ranks, steps, places)

    def at(self) -> str:
        """Say where it waits."""
        if self.waits is None:
            return "runs"
        name, number = self.waits
        return f"waits in {next(str(step) for step in reversed(self.groups[name]) if step.number == number)}"


def difference(positions: Mapping[int, Position]) -> str | None:
    """Find what ranks differ in.

    Args:
        positions: Where they are.

    Returns:
        The first difference; None where there is none, as far as their last steps tell.
    """
    for name in dict.fromkeys(name for position in positions.values() for name in position.groups):
        members = {rank: position for rank, position in positions.items() if name in position.groups}
        trails = {rank: {step.number: step for step in p.groups[name]} for rank, p in members.items()}
        for number in sorted(set().union(*trails.values())):
            steps = {rank: trail[number] for rank, trail in trails.items() if number in trail}
            if found := unequal(steps, {rank: members[rank].places[name] for rank in steps}):
                return found
    return None


def unequal(steps: Mapping[int, Link], places: Mapping[int, int]) -> str | None:
    """Say how steps of one number in one group differ between ranks, or the sizes of what these exchange."""
    differ = len({step.chain for step in steps.values()}) > 1
    unfit = any(
        sends[places[b]] != receives[places[a]]
        for a, b in itertools.permutations(steps, 2)
        if (sends := steps[a].sends) is not None and (receives := steps[b].receives) is not None
    )
    if not differ and not unfit:
        return None
    first = "ranks differ in a collective" if differ else "ranks differ in the bytes that they send each other"
    sizes = {rank: "" if differ else f", sends {s.sends}, awaits {s.receives}" for rank, s in steps.items()}
    return "\n".join([first, *(f"  rank {rank}: {steps[rank]}{sizes[rank]}" for rank in sorted(steps))])


def circle(own: int, look: Callable[[int], Position | None]) -> str | None:
    """Find ranks that wait for each other in a circle, in different groups.

    A rank waits for those that have started fewer collectives of its group. That this rank still waits when all have
    been looked at makes old answers of the others true.

    Args:
        own: This rank.
        look: Finds where a rank is, as far as it has told.

    Returns:
        Who waits where; None where there is no circle.
    """
    path: list[tuple[int, Position]] = []

    def follow(rank: int) -> bool:
        position = look(rank)
        if position is None or position.waits is None or any(rank == other for other, _ in path):
            return bool(path) and rank == own
        path.append((rank, position))
        name, number = position.waits
        behind = [r for r in position.ranks if r != rank and (p := look(r)) is not None and p.number(name) < number]
        if any(follow(other) for other in behind):
            return True
        path.pop()
        return False

    if not follow(own):
        return None
    lines = [f"rank {rank} {position.at()}" for rank, position in path]
    return "\n".join(["ranks wait for each other in different collectives", *(f"  {line}" for line in sorted(lines))])


def within(seconds: float, ask: Callable[[], T]) -> T | None:
    """Ask the store, which may be gone, or hang with the rank that holds it; None where it does not answer in time."""
    found: list[T] = []

    def run() -> None:
        with suppress(Exception):
            found.append(ask())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def connected(world: World, name: str) -> Group:
    """Find this rank's own group of an axis, or connect with its other ranks.

    Raises:
        CollectiveError: if one of them does not come.
    """
    try:
        return world.group(name)
    except RuntimeError as error:
        needed = f"all of ranks {_compat.group_ranks(name)} to connect within {_compat.timeout_of(name):g} s"
        raise CollectiveError(f"expected {needed}, got: {error!s:.300}; see which of them failed") from error


def read(board: Any, key: str) -> str:
    """Read what is under a key, "" if nothing is, by one operation on the store."""
    return str(board.compare_set(key, "", "").decode())


def note(board: Any, groups: Iterable[str]) -> str:
    """Read the note of a failure; "" if there is none in some groups."""
    return next(filter(None, (read(board, f"note/{name}") for name in groups)), "")


def tell(world: World, text: str, seconds: float = LINGER) -> None:
    """Break this rank's groups: leave a note, end the connections, and linger until the others have read it.

    Args:
        world: This rank's.
        text: The reason.
        seconds: How long to linger.
    """
    board, groups = world.board(), list(world.groups.values())

    def write() -> str:
        first = note(board, world.groups) or text
        for group in groups:
            first = board.compare_set(f"note/{group.name}", "", first).decode()
        board.set(f"read/{world.rank}", "")
        return first

    world.broken = within(ANSWER, write) or text
    cut(world)
    others, deadline = sorted({*world.others} - world.gone), time.monotonic() + seconds
    within(seconds, lambda: _until(lambda: board.check([f"read/{rank}" for rank in others]), deadline))


def cut(world: World) -> list[int]:
    """End this rank's connections, and return the ranks whose had ended before."""
    gone = set()
    for group in list(world.groups.values()):
        if group.pair is not None:
            gone |= {group.ranks[place] for place in _compat.cut(group.pair, group.own, len(group.ranks))}
        elif world.wake is not None:
            world.wake(group.name, world.generation, str(world.broken))
    return sorted(gone)


def _until(found: Callable[[], T], deadline: float) -> T:
    """Look again and again, until something is found or the time is up."""
    while not (value := found()) and time.monotonic() < deadline:
        time.sleep(LOOK)
    return value


def ended(world: World, waiting: Waiting, error: BaseException) -> CollectiveError:
    """Make the error of a collective that could not start or land.

    Args:
        world: This rank's.
        waiting: Where it is.
        error: What the backend says.

    Returns:
        The error, whose reason is the same on every rank.
    """
    if world.broken is None and world.wake is not None:
        tell(world, str(error), 0.0)
    elif world.broken is None:
        late = time.monotonic() - waiting.since
        board, deadline = world.board(), time.monotonic() + GRACE
        said = within(GRACE + ANSWER, lambda: _until(lambda: note(board, world.groups), deadline))
        tell(world, said or _lost(world, waiting.group, waiting.step, late, error))
    return failure(world, waiting.step)


def failure(world: World, step: Link | None = None) -> CollectiveError:
    """Make the error of groups that are broken, for a collective that this rank was in, or None."""
    own = [] if step is None else [f"  rank {world.rank}, this one, was in {step}"]
    return CollectiveError("\n".join([str(world.broken), *own, f"To fix: {REMEDY}."]))


def _lost(world: World, group: Group, step: Link, late: float, error: BaseException) -> str:
    """Say which rank is gone or did not come, where nobody has left a note."""
    # A wait that lasts too long ends its connection itself.
    slow, broken = late > 0.95 * group.timeout, cut(world)
    gone = [] if slow else [rank for rank in broken if rank in group.ranks]
    world.gone.update(gone)
    board = world.board()
    positions = {world.rank: Position.of(world)}

    def ask() -> None:
        board.set(f"at/{world.rank}", positions[world.rank].text())
        while (missing := [rank for rank in group.ranks if rank not in positions]) and time.monotonic() < deadline:
            positions.update(positions_of(board, missing))
            time.sleep(LOOK)

    deadline = time.monotonic() + GRACE
    within(GRACE + ANSWER, ask)

    def behind(ranks: Sequence[int], name: str, number: int) -> list[int]:
        return [rank for rank in ranks if rank not in positions or positions[rank].number(name) < number]

    def waits(rank: int) -> bool:
        """Whether a rank waits for others itself; it may have gone on since it told where."""
        at = positions.get(rank)
        return at is not None and at.waits is not None and bool(behind(at.ranks, *at.waits))

    late_ones = behind(group.ranks, group.name, step.number)
    absent = [r for r in gone if r in late_ones] or [r for r in late_ones if not waits(r)] or late_ones or gone
    who = f"rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}"
    said = within(ANSWER, lambda: [text for rank in absent if (text := read(board, f"ended/{rank}"))])
    if not absent:
        first = f"rank {world.rank} failed in {step}: {error!s:.{TEXT}}"
    elif gone:
        first = f"{who} was killed or has ended{f': {said[0]}' if said else ''}"
    else:
        first = f"{who} did not come within {late:.0f} s: it is stopped, hangs or computes"
    where = [f"  rank {rank} {position.at()}" for rank, position in sorted(positions.items()) if position.waits]
    return "\n".join([first, *where, f"  the last collective in which these ranks met: {group.finished or 'none'}"])


def positions_of(board: Any, ranks: Sequence[int]) -> dict[int, Position]:
    """Read where ranks are, as far as they have told."""
    found = {rank: read(board, f"at/{rank}") for rank in ranks}
    return {rank: Position.read(text) for rank, text in found.items() if text}


def all_fail(world: World, what: str) -> bool:
    """Compare with the other ranks whether all fail in the same way, at the same place.

    Args:
        world: This rank's.
        what: The call and the class of the error.

    Returns:
        Whether they do, in a short time.
    """
    world.failures += 1
    board, place = world.board(), sum(group.number for group in world.groups.values())
    own, others = f"{what} at {place}", world.others
    keys = [f"failed/{world.failures}/{rank}" for rank in others]

    def compare() -> bool:
        board.set(f"failed/{world.failures}/{world.rank}", own)
        deadline = time.monotonic() + ALIKE
        return bool(_until(lambda: board.check(keys), deadline)) and all(board.get(key).decode() == own for key in keys)

    return bool(within(ALIKE + ANSWER, compare))
