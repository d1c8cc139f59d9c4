"""Model walks: one application of a model, which gathers in the plan's order even if ranks enter different units."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fshard.engine.cursor import Cursor, Step
from fshard.engine.forward import Forward, find_outermost_checkpoint
from fshard.engine.gathered_unit import GatheredUnit
from fshard.engine.leaf import Leaf
from fshard.engine.plan import Plan

# A number that no unit has.
NO_UNIT = -1


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

    A unit of the plan is in one of these states on this rank:

        AHEAD     The walk has not come to the unit yet.
        READABLE  The function may read the unit.
        HELD      The walk has moved past the unit, and a submodule runs that may still enter it.
        PASSED    The walk has moved past the unit and left it. It is gathered on demand if it is entered or read again.

    How it changes its state:

        AHEAD    -> READABLE  its submodule is entered, or the unit is read when it is the next one
        AHEAD    -> HELD      a later unit inside the same running submodule is entered
        AHEAD    -> PASSED    the walk moves past it otherwise
        HELD     -> READABLE  its submodule is entered, or the unit is read
        HELD     -> PASSED    the submodule that it was held for ends
        READABLE -> PASSED    its scope ends, or another unit outside of it becomes readable; HELD if it is merged
        PASSED   -> READABLE  its submodule is entered again, or the unit is read: it is gathered on demand

    The walk knows what the function may read. `Forward` knows for which units autograd saves handles: the open ones.

    When the function has returned, the walk stands still. A checkpoint then recomputes with the units of the forward.

    Attributes:
        leaves: The leaves of the model's sharded parameters, by name.
    """

    def __init__(
        self,
        forward: Forward,
        plan: Plan,
        leaves: Mapping[str, Leaf],
        prepare_recompute: Callable[[Sequence[Leaf]], GatheredUnit],
    ) -> None:
        """Start before the first unit.

        Args:
            forward: The forward that the model is applied in.
            plan: The units of the model.
            leaves: The leaves of the model's sharded parameters, by name.
            prepare_recompute: Returns the gathered unit with which a checkpoint recomputes some leaves. May
                communicate.
        """
        self._forward = forward
        self._plan = plan
        self.leaves = leaves
        self._prepare_recompute = prepare_recompute
        self._planned: list[GatheredUnit] = []
        for unit in plan.units:
            unit_leaves = [leaves[name] for name in unit.leaf_names]
            self._planned.append(GatheredUnit(unit, unit_leaves))
        steps = [Step(gathered, needs_full=True) for gathered in self._planned]
        self._cursor = Cursor(steps, forward.make_room)
        # The units in the states READABLE and HELD, by number. The cursor tells which of the others are AHEAD.
        self._readable: dict[int, GatheredUnit] = {}
        self._held: dict[int, GatheredUnit] = {}
        # The numbers of the units whose submodules are running, outermost first.
        self._scopes: list[int] = []
        # The submodules that are running, outermost first. A unit that this rank does not enter has the checkpoint of
        # the submodule around it, because every rank enters that one. Every unit has the grad mode of the submodule
        # around it, because that mode decides whether the backward gathers the unit in its turn, on every rank.
        end = len(plan.units)
        whole_model = RunningSubmodule(range(end), end, find_outermost_checkpoint(), torch.is_grad_enabled())
        self._running = [whole_model]

    def enter(self, module_unit: int | None, inner_module_units: range | None) -> None:
        """Make the unit of a submodule that begins to run readable.

        Args:
            module_unit: The number of the submodule's module unit, or None if it has none.
            inner_module_units: The numbers of the module units inside it; None if there are none.
        """
        if inner_module_units is not None:
            self._running.append(self._describe_submodule(inner_module_units))
        if module_unit is None:
            return
        number = self._plan.unit_of[module_unit]
        self._make_number_readable(number, may_jump=True)
        self._scopes.append(number)

    def leave(self, module_unit: int | None, inner_module_units: range | None, *, has_failed: bool) -> None:
        """Move past the units of a submodule that ends, and end the scope of the submodule's unit.

        Args:
            module_unit: The argument that `enter` was called with.
            inner_module_units: The argument that `enter` was called with.
            has_failed: Whether the submodule raised an exception. Other ranks may not get to its end, so the walk does
                not move either.
        """
        # Ranks may have entered different units inside the submodule. From here on they are all past its end.
        end = self._find_end(module_unit, inner_module_units)
        if self._cursor.position < end and not has_failed and not self._forward.is_over:
            # A unit that is merged with what follows stays readable, as on ranks that have entered it.
            is_shared = inner_module_units is not None and end > self._running[-1].units.stop
            self._advance(end, entered=end - 1 if is_shared else NO_UNIT)
        if inner_module_units is not None:
            submodule = self._running.pop()
            for number in list(self._held):
                if number in submodule.units:
                    self._forward.end_scope(self._held.pop(number))
        if module_unit is not None:
            self._end_scope(module_unit)

    def make_readable(self, name: str) -> GatheredUnit:
        """Make a unit that holds a leaf readable, if none is. This may communicate.

        Args:
            name: The leaf's name.

        Returns:
            The gathered unit.
        """
        number = self._choose_unit(name)
        if number not in self._readable:
            self._make_number_readable(number, may_jump=False)
        gathered = self._readable[number]
        if gathered.is_lazy and not self._forward.is_over:
            # Code that reads an embedding table outside of its module may do more than look up rows, and then the
            # backward needs the table.
            gathered.is_lazy = number in self._scopes
        return gathered

    def finish(self) -> None:
        """Move past the rest of the plan, and leave every unit."""
        self._scopes = []
        self._leave_units_except(None)
        if not self._forward.is_over:
            self._advance(len(self._planned))
        for gathered in self._held.values():
            self._forward.end_scope(gathered)

    def _describe_submodule(self, inner_module_units: range) -> RunningSubmodule:
        first = self._plan.unit_of[inner_module_units.start]
        last = self._plan.unit_of[inner_module_units.stop - 1]
        # The last unit may be merged with units that follow the submodule. Then it is not inside.
        is_inside = self._plan.units[last].last_module_unit < inner_module_units.stop
        units = range(first, last + 1 if is_inside else last)
        return RunningSubmodule(units, last + 1, find_outermost_checkpoint(), torch.is_grad_enabled())

    def _find_end(self, module_unit: int | None, inner_module_units: range | None) -> int:
        """Find the number of the first unit that holds nothing of the submodule that ends; 0 if it has no units."""
        if inner_module_units is not None:
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
            recomputed = self._prepare_recompute([self.leaves[name]])
            matching = [number for number in numbers if self._plan.units[number] is recomputed.unit]
            numbers = matching or numbers
        for number in numbers:
            if number in self._readable:
                return number
        for number in numbers:
            if number >= self._cursor.position:
                return number
        return numbers[0]

    def _make_number_readable(self, number: int, *, may_jump: bool) -> None:
        """Make a unit readable, unless it is readable already. This may communicate.

        Args:
            number: The unit's number.
            may_jump: Whether the cursor may move past other units to this one. Entering a submodule may; reading a
                leaf moves the cursor to the next unit at most.
        """
        self._leave_units_except(number)
        if number in self._readable:
            return
        # An AHEAD unit that this rank alone reads before its turn is gathered as a PASSED one.
        end = len(self._planned) if may_jump else self._cursor.position + 1
        if self._forward.is_over:
            planned = self._planned[number]
            self._readable[number] = self._prepare_recompute(planned.leaves) if planned.leaves else planned
        elif number in self._held:
            self._readable[number] = self._held.pop(number)
        elif self._cursor.position <= number < end:
            self._advance(number + 1, entered=number)
        else:
            # The walk has moved past the unit, or this rank alone reads it ahead of its turn.
            gathered = GatheredUnit(self._plan.units[number], self._planned[number].leaves)
            enclosing = [self._readable[scope] for scope in self._scopes]
            self._forward.open(gathered, enclosing, find_outermost_checkpoint(), torch.is_grad_enabled())
            self._readable[number] = gathered

    def _advance(self, end: int, entered: int = NO_UNIT) -> None:
        """Gather the units before `end` in the plan's order, and leave or hold those that this rank does not enter.

        Args:
            end: The number of the first unit that is not gathered.
            entered: The unit that this rank enters, which stays readable.
        """
        for number, step in self._cursor.advance(end):
            # The innermost one around the unit. The outermost one is the whole model.
            submodule = next(submodule for submodule in reversed(self._running) if number in submodule.units)
            checkpoint = submodule.checkpoint
            if number == entered:
                checkpoint = find_outermost_checkpoint()
            enclosing = [self._planned[outer] for outer in step.gathered.unit.enclosing]
            is_last = self._cursor.all_started
            self._forward.open(step.gathered, enclosing, checkpoint, submodule.grad_enabled, is_last_gather=is_last)
            self._readable[number] = step.gathered
            if number != entered:
                self._leave_or_hold(number, may_return=entered in submodule.units)

    def _leave_or_hold(self, number: int, *, may_return: bool = False) -> None:
        """Leave a readable unit, or hold it while a submodule runs that may enter it again."""
        gathered = self._readable.pop(number)
        # A merged unit belongs to several submodules, which are entered one after another.
        may_return = may_return or gathered.unit.is_merged
        # The first of the running submodules is the whole model.
        if may_return and any(number in submodule.units for submodule in self._running[1:]):
            self._held[number] = gathered
        else:
            self._forward.end_scope(gathered)

    def _leave_units_except(self, number: int | None) -> None:
        """Leave or hold every readable unit whose submodule is not running, except one."""
        for other in list(self._readable):
            if other != number and other not in self._scopes:
                self._leave_or_hold(other)

    def _end_scope(self, module_unit: int) -> None:
        """End the scope of a submodule's unit, and leave the unit if no other submodule is to read it."""
        number = self._scopes.pop()
        if number in self._scopes or number not in self._readable:
            return
        # A merged unit stays readable until its last submodule has run.
        if self._plan.ends[module_unit] == self._plan.units[number].last_module_unit + 1:
            self._leave_or_hold(number)
