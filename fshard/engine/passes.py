"""Passes: applications of a model, whose units are gathered in the plan's order whichever of them a rank enters."""

from collections.abc import Callable, Mapping, Sequence

import torch

from fshard.engine.cursor import Cursor, Step
from fshard.engine.forward import Forward, outermost_checkpoint
from fshard.engine.gathered_unit import GatheredUnit
from fshard.engine.leaf import Leaf
from fshard.engine.plan import Plan


class Pass:
    """One application of a model.

    A rank that jumps ahead in the plan gathers the units in between; they are held while a submodule runs that may
    still come to them, and else dropped at once. One that leaves a submodule has passed all units inside it. So ranks
    that enter different units stay in step. A unit behind the cursor is gathered on demand.
    """

    def __init__(
        self,
        forward: Forward,
        plan: Plan,
        leaves: Mapping[str, Leaf],
        recomputed: Callable[[Sequence[Leaf]], GatheredUnit],
    ) -> None:
        """Begin before the first unit.

        Args:
            forward: The forward that it is a part of.
            plan: The units.
            leaves: The leaves by their names.
            recomputed: Finds the use of some leaves that a checkpoint computes with again.
        """
        self._forward, self._plan, self._leaves, self._recomputed = forward, plan, leaves, recomputed
        self._uses = [GatheredUnit(unit, [leaves[name] for name in unit.leaf_names]) for unit in plan.units]
        self._cursor = Cursor([Step(use, needs_full=True) for use in self._uses], forward.make_room)
        self._open: dict[int, GatheredUnit] = {}
        self._held: dict[int, GatheredUnit] = {}
        # Units whose scopes last; units inside the submodules that run, with the checkpoints that these are part of and
        # whether autograd records: what a rank that enters a unit changes, others do not know.
        self._scopes: list[int] = []
        self._running = [(range(len(self._uses)), outermost_checkpoint(), torch.is_grad_enabled())]

    def enter(self, number: int | None, inside: range | None) -> None:
        """Begin to run a submodule.

        Args:
            number: Of the module's unit whose scope it is, which opens; None where it is that of none.
            inside: The module's units that it holds, if it holds several.
        """
        if inside is not None:
            first, last = self._plan.unit_of[inside.start], self._plan.unit_of[inside.stop - 1]
            # The last one may be part of what follows.
            units = range(first, last + (self._plan.units[last].last_module_unit < inside.stop))
            self._running.append((units, outermost_checkpoint(), torch.is_grad_enabled()))
        if number is not None:
            self._reach(self._plan.unit_of[number], True)
            self._scopes.append(self._plan.unit_of[number])

    def leave(self, number: int | None, inside: range | None, failed: bool) -> None:
        """End a submodule.

        Args:
            number: As for `enter`.
            inside: As for `enter`.
            failed: Whether an error ends it: no other rank may be at its end.
        """
        stop = 0 if number is None else self._plan.unit_of[self._plan.ends[number] - 1] + 1
        if inside is not None:
            stop = self._running[-1][0].stop
        # Whichever of the units inside it a rank has entered, all ranks are behind them now.
        if self._cursor.position < stop and not failed and not self._forward.is_over:
            self._advance(stop)
        if inside is not None:
            units, *_ = self._running.pop()
            for n in [n for n in self._held if n in units]:
                self._forward.leave(self._held.pop(n))
        if number is not None and self._scopes:
            n = self._scopes.pop()
            if (
                n not in self._scopes
                and self._plan.ends[number] == self._plan.units[n].last_module_unit + 1
                and n in self._open
            ):
                self._end(n, False)

    def find(self, name: str) -> GatheredUnit:
        """Find an open use that holds a leaf; one that is read outside of its scope is opened.

        Args:
            name: The leaf's name.

        Returns:
            The use.
        """
        numbers = self._plan.units_holding[name]
        if self._forward.is_over and len(numbers) > 1:
            # Of several units (tied leaves) the one that the backward comes to.
            unit = self._recomputed([self._leaves[name]]).unit
            numbers = [n for n in numbers if self._plan.units[n] is unit] or numbers
        number = next((n for n in numbers if n in self._open), None)
        if number is None:
            # Of several units (tied leaves) the next that has not been opened.
            number = next((n for n in numbers if n >= self._cursor.position), numbers[0])
            self._reach(number, False)
        use = self._open[number]
        # Who reads a table outside of its module may do more than look rows up.
        use.lazy = use.lazy and (self._forward.is_over or number in self._scopes)
        return use

    def end(self) -> None:
        """Pass over the rest of the plan, and leave everything."""
        self._scopes = []
        self._leave_others(-1)
        if not self._forward.is_over:
            self._advance(len(self._uses))
        for use in self._held.values():
            self._forward.leave(use)

    def _end(self, number: int, may_return: bool) -> None:
        """Leave a unit, or hold it while a submodule runs that may come to it again."""
        use = self._open.pop(number)
        # Or it was merged of several.
        last = self._plan.units[number].last_module_unit
        may_return = may_return or number in self._plan.unit_of[last - 1 : last]
        if may_return and any(number in units for units, *_ in self._running[1:]):
            self._held[number] = use
        else:
            self._forward.leave(use)

    def _leave_others(self, number: int) -> None:
        for other in [n for n in self._open if n != number and n not in self._scopes]:
            self._end(other, False)

    def _reach(self, number: int, jumps: bool) -> None:
        """Open a unit; reading a leaf moves the cursor to the next unit at most."""
        self._leave_others(number)
        if number not in self._open:
            if self._forward.is_over:
                use = self._uses[number]
                self._open[number] = self._recomputed(use.leaves) if use.leaves else use
            elif number in self._held:
                self._open[number] = self._held.pop(number)
            elif number == self._cursor.position or (jumps and number > self._cursor.position):
                self._advance(number + 1, number)
            else:
                # It is gathered on demand.
                use = GatheredUnit(self._plan.units[number], self._uses[number].leaves)
                around = [self._open[n] for n in self._scopes]
                self._forward.open(use, around, outermost_checkpoint(), torch.is_grad_enabled())
                self._open[number] = use

    def _advance(self, to: int, entered: int = -1) -> None:
        """Open units in their turn; those that this rank has not entered are held or left."""
        for step in self._cursor.advance(to):
            use, number = step.gathered, self._cursor.position - 1
            units, checkpoint, grad = next(found for found in reversed(self._running) if number in found[0])
            here = outermost_checkpoint() if number == entered else checkpoint
            around = [self._uses[n] for n in use.unit.enclosing]
            self._forward.open(use, around, here, grad, is_last_gather=self._cursor.all_started)
            self._open[number] = use
            if number != entered:
                self._end(number, entered in units)
