"""The watcher: a thread that looks, where this rank waits for long, for a failure or a difference between ranks."""

import atexit
import sys
import threading
import time
import weakref
from contextlib import suppress

from fshard.comm.failure import Position, circle, cut, difference, note, positions_of, within
from fshard.comm.groups import World

# Seconds: of waiting before the first look; between looks at the clock; between two looks at most.
PATIENCE, SLICE, SELDOM = 0.4, 0.1, 30.0
# Ranks that one look asks at most.
ASKED = 8


class Lookout(threading.Thread):
    """Watches one process for as long as its process groups live.

    It is a daemon, because a store that hangs would hold up the process's end; `close` ends it before.
    """

    def __init__(self, world: World) -> None:
        """Begin with a store of its own."""
        super().__init__(name="fshard watcher", daemon=True)
        self._world, self._over = weakref.ref(world), threading.Event()
        # Before process groups are destroyed, as what is registered later runs first.
        atexit.register(self.close)

    def close(self) -> None:
        """Say that this process ends, and why if by an error, and let its groups go before the interpreter does."""
        error = getattr(sys, "last_value", None)
        text = "its program is over" if error is None else f"{type(error).__name__}: {error}"[:1000]
        self._over.set()
        if self.is_alive():
            self.join(1.0)
        if (world := self._world()) is not None:
            within(0.5, lambda: world.board().set(f"ended/{world.rank}", text))
            world.groups.clear()

    def run(self) -> None:
        """Look after 0.4 s of waiting in one place, then after 1, 2, 4 and more."""
        since, due = 0.0, 0.0
        # Between two looks the groups may go.
        while not self._over.wait(SLICE) and (world := self._world()) is not None:
            waiting, world = world.waiting, None
            if waiting is None or time.monotonic() - waiting.since < (due if waiting.since == since else PATIENCE):
                continue
            since, due = waiting.since, due if waiting.since == since else PATIENCE
            with suppress(Exception):
                if self._look():
                    due = 0.0
                    continue
            due = min(2 * due + 0.2, due + SELDOM)

    def _look(self) -> bool:
        """Tell where this rank is, read where others are, and wake it if a rank failed or ranks differ."""
        world = self._world()
        if world is None or (waiting := world.waiting) is None:
            return False
        board, own = world.board(), Position.of(world)
        found = note(board, [waiting.group.name])
        if not found:
            board.set(f"at/{world.rank}", own.text())
            asked = [rank for rank in waiting.group.ranks if rank != world.rank][:ASKED]
            positions = {world.rank: own, **positions_of(board, asked)}

            def known(rank: int) -> Position | None:
                if rank not in asked and rank != world.rank and len(asked) < ASKED:
                    asked.append(rank)
                    positions.update(positions_of(board, [rank]))
                return positions.get(rank)

            found = difference(positions) or circle(world.rank, known) or ""
        if not found or world.waiting is not waiting:
            return False
        for name in world.groups:
            board.compare_set(f"note/{name}", "", found)
        cut(world)
        return True
