"""Cursors: where a forward or a backward stands in its steps, and what it gathers ahead."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from fshard.engine.use import Use


class Step(NamedTuple):
    """A step in a list of uses.

    Attributes:
        use: The use.
        needs: Whether its full tensors are needed from here on; else its gradients are due.
        sequence: The number of autograd's next node when the forward came here.
    """

    use: Use
    needs: bool
    sequence: int = 0


class Cursor:
    """A walk along steps: in a forward along a plan, in a backward along what the forward has opened and closed.

    Attributes:
        steps: The steps.
        at: The number of the next one.
    """

    def __init__(self, steps: Sequence[Step], make_room: Callable[[], None], least: int = 1) -> None:
        """Stand before the first step.

        Args:
            steps: The steps.
            make_room: Called before gathers start.
            least: How many uses are gathered ahead at least where one is needed. Where gradients are due it is always
                one: the next use, however large, takes the place of the one that is dropped there.
        """
        self.steps, self.at, self._make_room, self._least = steps, 0, make_room, least
        # Those that are full already count among those that are gathered ahead.
        self._gathers = [step.use for step in steps if step.needs and not step.use.lazy]
        self._passed = self._begun = 0

    def advance(self, to: int) -> Iterator[Step]:
        """Take the steps before one; each starts to gather uses that come next, by their bytes.

        Args:
            to: The number of that step.

        Yields:
            The steps.
        """
        while self.at < min(to, len(self.steps)):
            step = self.steps[self.at]
            self.at += 1
            if step.needs:
                self._passed += not step.use.lazy
                self._gather_ahead(step.use, self._least)
            yield step
            if not step.needs:
                self._gather_ahead(step.use, 1)

    @property
    def all_begun(self) -> bool:
        """Whether nothing is left to gather."""
        return self._begun == len(self._gathers)

    def _gather_ahead(self, use: Use, least: int) -> None:
        # No islice, which walks over what has passed.
        ahead = map(self._gathers.__getitem__, range(self._passed, len(self._gathers)))
        until = self._passed + use.unit.ahead((other.unit.nbytes for other in ahead), least)
        if until > self._begun:
            self._make_room()
            for other in self._gathers[self._begun : until]:
                other.start()
            self._begun = until
