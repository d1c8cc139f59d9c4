"""The forward: gathers units in the order of the program, and knows which of them are open."""

from collections.abc import Sequence
from typing import Any

import torch

from fshard import _compat
from fshard.engine.cursor import Step
from fshard.engine.gathered_unit import GatheredUnit
from fshard.engine.saved import SavedTensorHooks


class Forward:
    """One run of the function: the units that it gathers, and the events that order its backward.

    Attributes:
        gathered_units: The gathered units, in the order in which they were opened.
        events: Where each unit was opened and closed. In reverse they are the steps of the backward: its gradients are
            due where the forward opened it, and its full tensors are needed from where the forward closed it.
        is_over: Whether the function has returned. What reads parameters from then on is a recomputed checkpoint.
        saved_hooks: The hooks by which autograd saves tensors.
    """

    def __init__(self, api_name: str, trains: bool, saved_hooks: SavedTensorHooks) -> None:
        """Begin before the first unit.

        Args:
            api_name: The public function that runs, for errors.
            trains: Whether a backward follows.
            saved_hooks: The hooks by which autograd saves tensors.
        """
        self.gathered_units: list[GatheredUnit] = []
        self.events: list[Step] = []
        self.is_over = False
        self.saved_hooks = saved_hooks
        self._api_name = api_name
        self._trains = trains
        # Whether anything that takes a gradient has been opened.
        self._has_trained = False
        self._open: list[GatheredUnit] = []
        # The units whose scopes have ended, and whose tensors are dropped when the next gather starts.
        self._to_drop: list[GatheredUnit] = []
        self._function_gather: GatheredUnit | None = None
        # The error of writes to a weight. Raised when the function has returned: an exception of its own comes first.
        self._write_error: ValueError | None = None

    def open_function_gather(self, gathered: GatheredUnit) -> None:
        """Open a unit that a function gathers by `fs.gather`, and end the scope of the one before."""
        self.end_function_scope()
        self._function_gather = gathered
        enclosing = [other for other in self._open if not other.scope_ended]
        self.open(gathered, enclosing, find_outermost_checkpoint(), torch.is_grad_enabled())

    def end_function_scope(self) -> None:
        """End the scope of the last unit that a function gathered by `fs.gather`."""
        gathered = self._function_gather
        self._function_gather = None
        if gathered is not None:
            self.end_scope(gathered)

    def open(
        self,
        gathered: GatheredUnit,
        enclosing: Sequence[GatheredUnit],
        checkpoint: Any,
        grad_enabled: bool,
        is_last_gather: bool = False,
    ) -> None:
        """Open a unit, wait for its tensors, and close the units that it does not lie inside.

        Args:
            gathered: The gathered unit.
            enclosing: The units that it lies inside, which stay open.
            checkpoint: The outermost checkpoint that will recompute with it, or None. The same on every rank.
            grad_enabled: Whether autograd records what computes with it. The same on every rank.
            is_last_gather: Whether nothing is left to gather ahead. Then the units that the backward would gather first
                stay.
        """
        keeps_some = is_last_gather and self._trains
        self.make_room(keep=self._list_first_of_backward(gathered) if keeps_some else ())
        self._close_all_but(enclosing)
        gathered.checkpoint = checkpoint
        gathered.is_lazy = True
        self.gathered_units.append(gathered)
        self._open.append(gathered)
        self.events.append(Step(gathered, needs_full=False, sequence=_compat.next_sequence_number()))
        if gathered.trained:
            self._has_trained = True
        if self._has_trained and grad_enabled:
            self._expect_backward()
        gathered.wait()
        # Most leaves have one unit, and share this tuple.
        units = (gathered,)
        for leaf in gathered.leaves:
            leaf.gathered_units += units
            if leaf.trained and not leaf.derived:
                leaf.must_reduce = True
        if self._trains:
            self.saved_hooks.watch(gathered)

    def _list_first_of_backward(self, gathered: GatheredUnit) -> list[GatheredUnit]:
        """List the units that a backward from here would gather ahead of one."""
        earlier = [other for other in reversed(self.gathered_units) if other.unit.is_regathered]
        sizes = (other.unit.nbytes for other in earlier)
        return earlier[: gathered.unit.count_ahead(sizes)]

    def _expect_backward(self) -> None:
        """Let the backward gather the open units in their turn, because something differentiable is computed there.

        Units that closed before stay lazy: no backward reads their full tensors.
        """
        for gathered in self._open:
            # The backward of a lookup does not read the table, unless a checkpoint recomputes the lookup.
            gathered.is_lazy = gathered.unit.is_embedding and gathered.checkpoint is None

    def end_scope(self, gathered: GatheredUnit) -> None:
        """End a unit's scope. Its tensors are dropped when the next gather starts, unless they stay."""
        gathered.revoke_outputs()
        gathered.scope_ended = True
        if self.is_over:
            return
        if gathered.unit.is_regathered:
            self._to_drop.append(gathered)
        try:
            gathered.check_writes(self._api_name)
        except ValueError as error:
            self._write_error = self._write_error or error

    def make_room(self, keep: Sequence[GatheredUnit] = ()) -> None:
        """Drop the tensors of the units whose scopes have ended, except for some."""
        kept = []
        for gathered in self._to_drop:
            if gathered in keep:
                kept.append(gathered)
            else:
                gathered.release()
        self._to_drop = kept

    def finish(self) -> None:
        """Close all units when the function has returned.

        Raises:
            ValueError: if the function wrote to a weight.
        """
        self.end_function_scope()
        if self._write_error is not None:
            raise self._write_error
        self._close_all_but(())
        self.is_over = True
        if not self._trains:
            self.make_room()

    def drop_references(self) -> None:
        """Drop outputs and all that refers to this forward, so that memory is freed without the garbage collector."""
        for gathered in self.gathered_units:
            gathered.revoke_outputs()
        self.gathered_units = []
        self.events = []
        self._open = []
        self._to_drop = []
        self._function_gather = None
        # A graph that outlives the call may hold these hooks, and the watched units may lead back to that graph. The
        # garbage collector cannot see that cycle, because it passes through C++.
        self.saved_hooks.watched_storages = {}

    def _close_all_but(self, enclosing: Sequence[GatheredUnit]) -> None:
        """Close open units: from here on, autograd saves their tensors as they are.

        The units of a running checkpoint stay open until it ends, because the backward needs all of them where it
        starts to recompute.
        """
        checkpoint = find_outermost_checkpoint()
        still_open = []
        closed = []
        for gathered in self._open:
            is_recomputed = checkpoint is not None and gathered.checkpoint is checkpoint
            if is_recomputed or gathered in enclosing:
                still_open.append(gathered)
            else:
                closed.append(gathered)
        for gathered in reversed(closed):
            self.events.append(Step(gathered, needs_full=True, sequence=_compat.next_sequence_number()))
            gathered.is_closed = True
        self._open = still_open


def find_outermost_checkpoint() -> Any:
    """Return the outermost checkpoint that will recompute what runs now, or None."""
    return next(reversed(_compat.checkpoints()), None)
