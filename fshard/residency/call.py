"""Call: the bookkeeping of one run of `value_and_grad`, which the leaves that it lends lead back to."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from fshard import _compat, comm
from fshard.collectives import Chain
from fshard.errors import Problem, leaf_error
from fshard.residency.backward import Backward
from fshard.residency.saved import FunctionTransform, Saved
from fshard.residency.slots import Slot, policy_of
from fshard.residency.timeline import CHECKPOINTED, Timeline
from fshard.residency.units import (
    ANY_CALL,
    Unit,
    Use,
    deliver,
    is_regathered,
    mark_used,
    refuse_unhooked,
    refuse_unsummed,
    scattered,
)
from fshard.residency.walk import Walk, schedule
from fshard.tree import Axis, Flat, Sharded, Tree, flatten, is_sharded


class Call:
    """Lends leaves to a function, gathers what it asks for and collects gradients.

    Attributes:
        slots: The parameters, by their place in the tree; None for leaves that are not Sharded.
        consensus: What ranks agree by.
        in_backward: Whether the function has returned.
        at_end, ended: What to do when the call ends, and whether it has.
    """

    def __init__(
        self, what: str, flat: Flat, axes: Sequence[Axis], facts: comm.Facts, *, differentiable: bool = True
    ) -> None:
        """Take parameters in.

        Args:
            what: The verb that runs, for errors.
            flat: Its parameters.
            axes: The mesh axes that they live on.
            facts: What the verb was told.
            differentiable: Whether gradients will be asked for.
        """
        self._what, self._differentiable = what, differentiable
        self._self = weakref.ref(self)
        self.consensus = comm.Consensus(what, axes, facts)
        self.slots = [
            self._lend(path, leaf) if is_sharded(leaf) else None
            for path, leaf in zip(flat.paths, flat.leaves, strict=True)
        ]
        self._saved = Saved(self._fetch)
        self._kept: dict[Slot, torch.Tensor] = {}
        self.at_end: list[Callable[[], None]] = []
        self.ended = False
        self._begin()

    def _begin(self) -> None:
        """Before a forward."""
        self._by_tensor = {id(slot.tensor): slot for slot in self.slots if slot is not None}
        for slot in self._by_tensor.values():
            slot.first = None
        self._log: list[str] = []
        alone = not self.consensus.axes
        self.timeline = Timeline(self._what, self._saved, self._kept, self._log, alone=alone)
        self._walks: list[Walk] = []
        self._scheduled: Walk | None = None
        self._plain: Use | None = None
        self._refetched: Use | None = None
        self._backward: Backward | None = None
        self.in_backward = False
        self._chain = Chain(self.timeline.note, self._mark)

    def _lend(self, path: str, leaf: Sharded) -> Slot:
        local = leaf.local.detach()
        if self._differentiable and not leaf.spec.frozen:
            local.requires_grad_()
        return Slot(path, Sharded(local, leaf.spec))

    def lent(self, slot: Slot) -> Sharded:
        """The leaf that the function gets, whose spec leads back to this call."""
        return Sharded(slot.tensor, slot.spec.lent_by(self._self))

    def slot_of(self, path: str, leaf: Sharded) -> Slot:
        """The slot of a leaf that this call lent, or that was computed from such."""
        slot = self._by_tensor.get(id(leaf.local))
        if slot is None:
            derived = Sharded(leaf.local, leaf.spec.lent_by(None))
            slot = self._by_tensor[id(leaf.local)] = Slot(path, derived, derived=True)
        return slot

    def begin_walk(self, name: str, units: Sequence[Unit], ends: Sequence[int], apart: Sequence[bool]) -> Walk:
        """Begin a pass over a schedule of units; see `schedule`."""
        stops = schedule(units, ends, apart)
        if not self.in_backward:
            self._turn_away()
            again = {f"unit {stop.unit.name}": f"regathered={is_regathered(stop.unit)}" for stop in stops}
            self.consensus.agree(f"{len(units)} units of {name}", again)
        self._walks.append(Walk(self, stops))
        return self._walks[-1]

    def gather(self, paths: Sequence[str], leaves: Sequence[Sharded]) -> list[torch.Tensor]:
        """Gather leaves in a plain function, as one unit."""
        slots = tuple(self.slot_of(path, leaf) for path, leaf in zip(paths, leaves, strict=True))
        unit = Unit(", ".join(slot.path for slot in slots), slots)
        # What a checkpoint computes again may have been gathered by itself, though a schedule names it too.
        alone = self._backward is not None and self._backward.find(unit) is not None
        walk = None if alone else next((walk for walk in self._walks if walk.has(unit)), None)
        use = self._enter(unit) if walk is None else walk.find(slots[0], in_turn=True)[0]
        out = [self.output(use, use.unit.places[slot]) for slot in slots]
        use.outputs = {} if walk is None else use.outputs
        return out

    def _enter(self, unit: Unit) -> Use:
        """Gather a unit outside any schedule; its scope ends where the next one begins, as far as anybody can know."""
        if self.in_backward:
            return self.again(unit)
        self._turn_away()
        self.consensus.agree(f"gather {unit.name}")
        self._plain = self.timeline.use_of(unit)
        self.open(self._plain)
        return self._plain

    def _turn_away(self) -> None:
        """Leave what was gathered last for what no schedule names.

        A rank that fails takes part in the rest of a schedule and then says so: only there can others hear it.
        """
        self._leave_plain()
        scheduled, self._scheduled = self._scheduled, None
        if scheduled is not None:
            scheduled.end()

    def _leave_plain(self) -> None:
        use, self._plain = self._plain, None
        if use is not None:
            self.timeline.leave(use)

    def open(self, use: Use, inside: Sequence[Use] = ()) -> None:
        """Enter a use into the order of the forward."""
        self.timeline.open(use, inside)
        derived = [i for i, slot in enumerate(use.unit.slots) if slot.derived and slot.trained]
        if derived and torch.is_grad_enabled():
            deliver(self, use, derived)

    def leave(self, use: Use) -> None:
        """Leave a use's scope."""
        if self.in_backward:
            use.close()
        else:
            self.timeline.leave(use)

    def again(self, unit: Unit) -> Use:
        """Find the use of a unit again that a checkpoint computes once more, and gather it."""
        assert self._backward is not None
        if (use := self._backward.find(unit)) is None:
            raise ValueError(f"{self._what}: a checkpoint computes {unit.name} again that the backward has left")
        return self._backward.recomputed(use)

    def output(self, use: Use, index: int) -> torch.Tensor:
        """What a function gets for one leaf of an open use."""
        if not self.in_backward:
            self.timeline.compute(use)
        out = use.outputs.get(index)
        if not self.in_backward and (out is None or not torch.is_grad_enabled()):
            self._refuse_reentrant(use.unit.slots[index])
        if out is None and use.unit.slots[index].trained and torch.is_grad_enabled():
            deliver(self, use, use.sharing_node(index))
            out = use.outputs[index]
        if out is None:
            full = use.wait()[index]
            assert full is not None
            out = full.detach()
        return out

    def _refuse_reentrant(self, slot: Slot) -> None:
        """Refuse a use whose gradient would be lost: a reentrant checkpoint asks for it by loss.backward() alone."""
        if self._differentiable and slot.trained and _compat.in_reentrant_checkpoint():
            problem = Problem(slot.path, "a use inside a reentrant checkpoint", "one that autograd records")
            remedy = "pass use_reentrant=False to torch.utils.checkpoint.checkpoint"
            raise leaf_error(f"{self._what}: a gradient would be lost", [problem], remedy)

    def _fetch(self, use: Use, index: int) -> torch.Tensor:
        """A gathered tensor that autograd saved."""
        if self._backward is not None:
            return self._backward.fetch(use, index)
        # The function itself differentiates: gather again while it stays with this unit.
        if use.full is None:
            if self._refetched is not None:
                self._refetched.drop_all()
            self._refetched = use
            use.wait()
            self._saved.watch(use)
        full = use.wait()[index]
        assert full is not None
        return full

    def deliver(self, use: Use, group: list[int], grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Take the gradients of a use's outputs, and return what autograd is to go on with."""
        slots = use.unit.slots
        if self._backward is None:
            refuse_unhooked(self._what, [slots[i] for i in group])
            return list(scattered(slots, group, grads))
        self._backward.arrived(use, group, grads)
        if slots[group[0]].derived:
            return list(self._backward.reduced_now(use, group))
        return [None] * len(group)

    def _drops(self) -> bool:
        """Whether some tensors are gathered again in the backward."""
        policies = [policy_of([slot]) for slot in self.slots if slot is not None]
        return bool(self.consensus.axes) and self._differentiable and any(p.regather is not False for p in policies)

    def forward(self, f: Callable[[], Any], schedule: Callable[[], Sequence[Tree]] = tuple) -> Any:
        """Run the function, then see whether every rank has.

        Args:
            f: The function.
            schedule: Makes the trees of leaves that it will gather in this order, if that is known.

        Returns:
            What the function returned.

        Raises:
            FunctionTransform: if it calls torch.func.
            RuntimeError: if another rank failed.
            ValueError: if ranks do not gather the same units.
        """
        self._begin()
        try:
            with self._saved.hooks() if self._drops() else nullcontext():
                units = [self._unit_of(part) for part in schedule()]
                if units:
                    ends, apart = range(1, len(units) + 1), [False] * len(units)
                    self._scheduled = self.begin_walk("the schedule", units, ends, apart)
                with comm.chained(self._chain) if self._differentiable else nullcontext():
                    out = f()
            self._leave_plain()
            for walk in self._walks:
                walk.end()
            self.timeline.close_but(())
        except Exception as error:
            if _compat.refuses_saved_tensor_hooks(error):
                error = FunctionTransform("f calls torch.func")
            for walk in () if isinstance(error, comm.CollectiveError) else reversed(self._walks):
                walk.abandon()
            self._conclude("f", error)
            raise error
        self._conclude("f")
        return out

    def _mark(self) -> Callable[[], None]:
        """Note where the function calls a collective; the backward then brings this rank's steps there."""
        uses = self.timeline.open_uses()

        def passed() -> None:
            if self._backward is not None:
                self._backward.passed(uses)

        return passed

    def _unit_of(self, part: Tree) -> Unit:
        flat = zip(*flatten(part)[:2], strict=True)
        slots = tuple(self.slot_of(path, leaf) for path, leaf in flat if is_sharded(leaf))
        return Unit(", ".join(slot.path for slot in slots), slots)

    def _conclude(self, phase: str, error: Exception | None = None) -> None:
        needed = [] if self.in_backward else self.timeline.needed()
        if not self.consensus.axes:
            return
        done = [*(f"{kind} {use.unit.name}" for kind, use in self.timeline.events), *self._log]
        self._log.clear()
        numbered = {f"event {i}": event for i, event in enumerate(done)}
        found = self.consensus.conclude(phase, numbered, self.timeline.flags(needed), error)
        self.timeline.drop(found)
        if CHECKPOINTED in found and error is None:
            self.timeline.postpone(self.consensus.highest(needed))

    def backward(self, loss: torch.Tensor, divisor: Any, *, reduce: bool = True, last: bool = True) -> None:
        """Differentiate the loss of the last forward and add its gradients to the slots.

        Args:
            loss: This rank's scalar loss, attached to the graph.
            divisor: What gradients are divided by once they are summed.
            reduce: Whether gathered leaves' gradients are reduced now, rather than kept in full.
            last: Whether no other forward follows, so that tensors that were kept may go.
        """
        self.in_backward = True
        slots = [slot for slot in self.slots if slot is not None and slot.trained]
        early = any(policy_of([slot]).early for slot in slots)
        events, uses = self.timeline.events, self.timeline.uses
        self._backward = Backward(events, self._log, divisor=divisor, reduce=reduce, early=early, release=last)
        if last:
            self._kept.clear()
        anchors = [use.anchor for use in uses if use.anchor is not None]
        first, ends = self._chain.tokens[:1], self._chain.tokens[1:]
        # The next microbatch's collectives are tied anew, or its backward would run these again.
        self._chain.tokens.clear()
        outputs = [out for out in (loss, *anchors, *ends) if out.requires_grad]
        starts = [torch.ones_like(out) if out is loss else torch.zeros_like(out) for out in outputs]
        failed = None
        direct: Sequence[torch.Tensor | None] = [None] * len(slots)
        try:
            if outputs and slots:
                inputs = [*(slot.tensor for slot in slots), *first, ANY_CALL]
                direct = torch.autograd.grad(outputs, inputs, starts, allow_unused=True)[: len(slots)]
                refuse_unsummed(self._what, outputs[: len(outputs) - len(ends)], slots, direct)
                refuse_unhooked(self._what, [slot for slot, g in zip(slots, direct, strict=True) if g is not None])
        except Exception as error:
            failed = error
        failed = self._backward.finish(slots, failed)
        for use in uses:
            use.close()
        self._conclude("the backward", failed)
        if failed is not None:
            raise failed
        if anchors:
            mark_used(loss, slots)
        # What came past gathering, from maths on shards, is this rank's own part of the sum already.
        for slot, grad in zip(slots, direct, strict=True):
            if grad is not None:
                slot.take(grad, divisor, own=False)
                slot.used = slot.used or not anchors

    def end(self) -> None:
        """Let go of everything: calls are many and hold much, and nothing may wait for the garbage collector."""
        for use in self.timeline.uses:
            use.close()
            for slot in use.unit.slots:
                slot.first = None
        for release in self.at_end:
            release()
        self.at_end, self.ended = [], True
        self._begin()
        self._by_tensor = {}
        self._kept.clear()
        del self._saved, self.timeline, self._chain
