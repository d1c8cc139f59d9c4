"""Cursors: the position of a forward or a backward in its list of steps, and the gathers it starts ahead."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from fshard.engine.gathered_unit import GatheredUnit


class Step(NamedTuple):
    """One step of a forward or a backward.

    Attributes:
        gathered: The gathered unit that the step is about.
        needs_full: True where the unit's full tensors are needed; False where its gradients are due.
        sequence: The number of autograd's next node when the forward reached this step.
    """

    gathered: GatheredUnit
    needs_full: bool
    sequence: int = 0


class Cursor:
    """A position in a list of steps, which starts gathers ahead of the steps that need them.

    The steps of a forward come from the model's plan. The steps of a backward are the forward's events in reverse.

    Attributes:
        steps: The steps.
        position: The number of the next step.
    """

    def __init__(self, steps: Sequence[Step], make_room: Callable[[], None]) -> None:
        """Start before the first step.

        Args:
            steps: The steps.
            make_room: Called before gathers start, to drop tensors that are no longer needed.
        """
        self.steps = steps
        self.position = 0
        self._make_room = make_room
        # Lazy units are gathered on demand, never ahead. Units that are full already stay in the list, because they
        # take memory and so count towards the bytes that may be gathered ahead.
        self._to_gather = [step.gathered for step in steps if step.needs_full and not step.gathered.is_lazy]
        self._num_passed = 0
        self._num_started = 0

    def advance(self, end: int) -> Iterator[tuple[int, Step]]:
        """Take the steps before `end`, and start the gathers that each step allows ahead of it.

        Where full tensors are needed, gathers start before the step is yielded, so that they overlap with its work.
        Where gradients are due, they start when the next step is requested, after the step's own tensors have been
        dropped. So exhaust the iterator.

        Args:
            end: The number of the first step that is not taken.

        Yields:
            The number of each step, and the step.
        """
        while self.position < end:
            number = self.position
            step = self.steps[number]
            self.position += 1
            if step.needs_full:
                # A planned unit becomes lazy only in `Forward.open`, after this step.
                if not step.gathered.is_lazy:
                    self._num_passed += 1
                self._gather_ahead(step.gathered)
                yield number, step
            else:
                yield number, step
                self._gather_ahead(step.gathered)

    @property
    def all_started(self) -> bool:
        """Whether every gather of the list has started."""
        return self._num_started == len(self._to_gather)

    def _gather_ahead(self, gathered: GatheredUnit) -> None:
        """Start the gathers that the unit's reshard policy allows ahead of it."""
        # A generator rather than a slice: the policy looks at the next few sizes of what may be thousands.
        upcoming = range(self._num_passed, len(self._to_gather))
        sizes = (self._to_gather[number].unit.nbytes for number in upcoming)
        end = self._num_passed + gathered.unit.count_ahead(sizes)
        if end <= self._num_started:
            return

        self._make_room()
        for other in self._to_gather[self._num_started : end]:
            other.start()
        self._num_started = end
