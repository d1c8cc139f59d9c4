"""Model walks: one application of a model, which gathers units in the plan's order whichever of them a rank enters."""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

import torch

from fshard.engine.cursor import Cursor, Step
from fshard.engine.forward import Forward, outermost_checkpoint
from fshard.engine.gathered_unit import GatheredUnit
from fshard.engine.leaf import Leaf
from fshard.engine.plan import Plan

# A number that no unit has.
NO_UNIT = -1


class UnitState(Enum):
    """Where a unit of the plan stands in a walk.

    Attributes:
        AHEAD: The walk has not come to the unit yet.
        OPEN: The function may read the unit.
        HELD: The walk has moved past the unit, and a submodule runs that may still enter it.
        PASSED: The walk has moved past the unit and left it. If it is entered or read again, it is gathered on demand.
    """

    AHEAD = auto()
    OPEN = auto()
    HELD = auto()
    PASSED = auto()


class RunningSubmodule(NamedTuple):
    """A submodule that has units inside and is running now.

    Attributes:
        units: The numbers of the units inside it.
        end: The number of the first unit that holds nothing of it. If its last parameters are merged with those that
            follow it, their unit is not inside, and comes before this one.
        checkpoint: The outermost activation checkpoint that it runs in, or None.
        grad_enabled: Whether autograd records it.
    """

    units: range
    end: int
    checkpoint: Any
    grad_enabled: bool


class ModelWalk:
    """One application of a model.

    Ranks may enter different submodules, for example when each rank routes its tokens to other experts. They must
    still start the same gathers in the same order. So the walk moves along the model's plan:

    - A rank that enters a unit further ahead also gathers the units in between. They are held while a submodule runs
      that may still enter them; otherwise they are dropped at once.
    - A rank that leaves a submodule has moved past all units that hold parameters of it.
    - A unit that the walk has moved past is gathered on demand.

    How a unit changes its state on this rank:

        AHEAD  -> OPEN    its submodule is entered, or the unit is read when it is the next one
        AHEAD  -> HELD    a later unit inside the same running submodule is entered
        AHEAD  -> PASSED  the walk moves past it otherwise
        HELD   -> OPEN    its submodule is entered, or the unit is read
        HELD   -> PASSED  the submodule that it was held for ends
        OPEN   -> PASSED  its scope ends, or another unit opens outside of it; HELD if it was merged from several units
        PASSED -> OPEN    its submodule is entered again, or the unit is read: it is gathered on demand

    When the function has returned, the walk stands still. A checkpoint then recomputes with the units of the forward.
    """

    def __init__(
        self,
        forward: Forward,
        plan: Plan,
        leaves: Mapping[str, Leaf],
        find_recomputed: Callable[[Sequence[Leaf]], GatheredUnit],
    ) -> None:
        """Start before the first unit.

        Args:
            forward: The forward that the model is applied in.
            plan: The units of the model.
            leaves: The leaves of the model, by name.
            find_recomputed: Returns the gathered unit with which a checkpoint recomputes some leaves.
        """
        self._forward = forward
        self._plan = plan
        self._leaves = leaves
        self._find_recomputed = find_recomputed
        self._planned: list[GatheredUnit] = []
        for unit in plan.units:
            unit_leaves = [leaves[name] for name in unit.leaf_names]
            self._planned.append(GatheredUnit(unit, unit_leaves))
        steps = [Step(gathered, needs_full=True) for gathered in self._planned]
        self._cursor = Cursor(steps, forward.make_room)
        # The units in the states OPEN and HELD, by number. The cursor tells which of the others are AHEAD.
        self._open: dict[int, GatheredUnit] = {}
        self._held: dict[int, GatheredUnit] = {}
        # The numbers of the units whose submodules are running, outermost first.
        self._scopes: list[int] = []
        # The submodules that are running, outermost first. A unit that this rank does not enter has the checkpoint of
        # the submodule around it, because every rank enters that one. Every unit has the grad mode of the submodule
        # around it, because that mode decides whether the backward gathers the unit in its turn, on every rank.
        end = len(plan.units)
        whole_model = RunningSubmodule(range(end), end, outermost_checkpoint(), torch.is_grad_enabled())
        self._running = [whole_model]

    def enter(self, module_unit: int | None, inner_units: range | None) -> None:
        """Open the unit of a submodule that begins to run.

        Args:
            module_unit: The number of the submodule's own module unit, or None if it has none.
            inner_units: The numbers of the module units inside the submodule, or None if there are not several.
        """
        if inner_units is not None:
            self._running.append(self._describe_submodule(inner_units))
        if module_unit is None:
            return
        number = self._plan.unit_of[module_unit]
        try:
            self._open_unit(number, may_jump=True)
        except BaseException:
            # The submodule does not run, so it is not left either. The forward may go on without it.
            if inner_units is not None:
                self._running.pop()
            raise
        self._scopes.append(number)

    def leave(self, module_unit: int | None, inner_units: range | None, *, failed: bool) -> None:
        """Move past the units of a submodule that ends, and close the submodule's own unit.

        Args:
            module_unit: The argument that `enter` was called with.
            inner_units: The argument that `enter` was called with.
            failed: Whether the submodule raised an exception. Other ranks may not get to its end, so the walk does not
                move either.
        """
        # Ranks may have entered different units inside the submodule. From here on they are all past its end.
        end = self._find_end(module_unit, inner_units)
        if self._cursor.position < end and not failed and not self._forward.is_over:
            # A unit that goes on behind the submodule stays open, as on ranks that have entered it.
            goes_on = inner_units is not None and end > self._running[-1].units.stop
            self._advance(end, entered=end - 1 if goes_on else NO_UNIT)
        if inner_units is not None:
            self._leave_held_units(self._running.pop(), failed)
        if module_unit is not None and self._scopes:
            self._end_scope(module_unit, failed)

    def find(self, name: str) -> GatheredUnit:
        """Return an open unit that holds a leaf; open one if the leaf is read outside of its submodule.

        Args:
            name: The leaf's name.

        Returns:
            The gathered unit.
        """
        number = self._choose_unit(name)
        if number not in self._open:
            self._open_unit(number, may_jump=False)
        gathered = self._open[number]
        if gathered.lazy and not self._forward.is_over:
            # Code that reads an embedding table outside of its module may do more than look up rows, and then the
            # backward needs the table.
            gathered.lazy = number in self._scopes
        return gathered

    def end(self) -> None:
        """Move past the rest of the plan, and leave every unit."""
        self._scopes = []
        self._close_units_except(None)
        if not self._forward.is_over:
            self._advance(len(self._planned))
        for gathered in self._held.values():
            self._forward.leave(gathered)

    def _describe_submodule(self, inner_units: range) -> RunningSubmodule:
        first = self._plan.unit_of[inner_units.start]
        last = self._plan.unit_of[inner_units.stop - 1]
        # The last unit may be merged with units that follow the submodule. Then it is not inside.
        is_inside = self._plan.units[last].last_module_unit < inner_units.stop
        units = range(first, last + 1 if is_inside else last)
        return RunningSubmodule(units, last + 1, outermost_checkpoint(), torch.is_grad_enabled())

    def _find_end(self, module_unit: int | None, inner_units: range | None) -> int:
        """Find the number of the first unit that holds nothing of the submodule that ends; 0 if it has no units."""
        if inner_units is not None:
            return self._running[-1].end
        if module_unit is not None:
            last_module_unit = self._plan.ends[module_unit] - 1
            return self._plan.unit_of[last_module_unit] + 1
        return 0

    def _choose_unit(self, name: str) -> int:
        """Choose the unit to read a leaf from; a tied leaf is part of several units."""
        numbers: Sequence[int] = self._plan.units_holding[name]
        if self._forward.is_over and len(numbers) > 1:
            # A checkpoint recomputes: prefer the unit that the backward has come to.
            recomputed = self._find_recomputed([self._leaves[name]])
            matching = [number for number in numbers if self._plan.units[number] is recomputed.unit]
            numbers = matching or numbers
        for number in numbers:
            if number in self._open:
                return number
        for number in numbers:
            if number >= self._cursor.position:
                return number
        return numbers[0]

    def _state_of(self, number: int) -> UnitState:
        if number in self._open:
            return UnitState.OPEN
        if number in self._held:
            return UnitState.HELD
        if number >= self._cursor.position:
            return UnitState.AHEAD
        return UnitState.PASSED

    def _open_unit(self, number: int, may_jump: bool) -> None:
        """Open a unit, unless it is open already.

        Args:
            number: The unit's number.
            may_jump: Whether the cursor may move past other units to this one. Entering a submodule may; reading a
                leaf moves the cursor to the next unit at most.
        """
        self._close_units_except(number)
        state = self._state_of(number)
        if state is UnitState.OPEN:
            return
        if self._forward.is_over:
            planned = self._planned[number]
            self._open[number] = self._find_recomputed(planned.leaves) if planned.leaves else planned
        elif state is UnitState.HELD:
            self._open[number] = self._held.pop(number)
        elif state is UnitState.AHEAD and (may_jump or number == self._cursor.position):
            self._advance(number + 1, entered=number)
        else:
            self._open_on_demand(number)

    def _open_on_demand(self, number: int) -> None:
        """Gather a unit that the walk has moved past, or that this rank alone reads ahead of its turn."""
        gathered = GatheredUnit(self._plan.units[number], self._planned[number].leaves)
        enclosing = [self._open[scope] for scope in self._scopes]
        self._forward.open(gathered, enclosing, outermost_checkpoint(), torch.is_grad_enabled())
        self._open[number] = gathered

    def _advance(self, end: int, entered: int = NO_UNIT) -> None:
        """Open the units before `end` in the plan's order, and close those that this rank does not enter.

        Args:
            end: The number of the first unit that is not opened.
            entered: The unit that this rank enters, which stays open.
        """
        for step in self._cursor.advance(end):
            number = self._cursor.position - 1
            submodule = self._innermost_submodule(number)
            checkpoint = submodule.checkpoint
            if number == entered:
                checkpoint = outermost_checkpoint()
            enclosing = [self._planned[outer] for outer in step.gathered.unit.enclosing]
            is_last = self._cursor.all_started
            self._forward.open(step.gathered, enclosing, checkpoint, submodule.grad_enabled, is_last_gather=is_last)
            self._open[number] = step.gathered
            if number != entered:
                self._close(number, may_return=entered in submodule.units)

    def _innermost_submodule(self, number: int) -> RunningSubmodule:
        """Return the innermost running submodule around a unit. The outermost one is the whole model."""
        return next(submodule for submodule in reversed(self._running) if number in submodule.units)

    def _close(self, number: int, *, may_return: bool = False, failed: bool = False) -> None:
        """Leave an open unit, or hold it while a submodule runs that may enter it again."""
        gathered = self._open.pop(number)
        # A unit that was merged from several belongs to several submodules, which are entered one after another.
        last = self._plan.units[number].last_module_unit
        is_merged = last > 0 and self._plan.unit_of[last - 1] == number
        # The first of the running submodules is the whole model.
        if (may_return or is_merged) and any(number in submodule.units for submodule in self._running[1:]):
            self._held[number] = gathered
        else:
            self._forward.leave(gathered, failed=failed)

    def _close_units_except(self, number: int | None) -> None:
        """Close every open unit whose submodule is not running, except one."""
        for other in list(self._open):
            if other != number and other not in self._scopes:
                self._close(other)

    def _leave_held_units(self, submodule: RunningSubmodule, failed: bool) -> None:
        """Leave the units that were held for a submodule, which has ended."""
        for number in list(self._held):
            if number in submodule.units:
                self._forward.leave(self._held.pop(number), failed=failed)

    def _end_scope(self, module_unit: int, failed: bool) -> None:
        """End the scope of a submodule's unit, and close the unit if nothing else uses it."""
        number = self._scopes.pop()
        if number in self._scopes or number not in self._open:
            return
        # A merged unit stays open until its last submodule has run.
        if self._plan.ends[module_unit] == self._plan.units[number].last_module_unit + 1:
            self._close(number, failed=failed)
