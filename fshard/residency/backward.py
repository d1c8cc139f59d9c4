"""Backward: units gathered again and gradients reduced, in one order on every rank."""

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fshard import _compat, comm
from fshard.residency.slots import Slot, start_scatter
from fshard.residency.units import Unit, Use

# Reductions under way may hold this many bytes of gradients; a larger one travels alone.
IN_FLIGHT_BYTES = 32 * 1024 * 1024

# Small gradients are collected up to this many bytes and reduced together.
BUCKET_BYTES = 1024 * 1024


class Step(NamedTuple):
    """One step of the order.

    Attributes:
        kind: "exit" where the backward enters a use, "reduce" for one leaf of it, "enter" where it leaves the use.
        use: The use.
        place: The leaf, for "reduce".
        gathers: The uses whose gathers start here.
    """

    kind: str
    use: Use
    place: int = -1
    gathers: tuple[Use, ...] = ()


def order(events: Sequence[tuple[str, Use]], reduce: bool) -> list[Step]:
    """Turn the events of a forward around.

    Args:
        events: "enter" and "exit" of each use, in their order.
        reduce: Whether gradients of the call's own leaves are reduced in this backward.

    Returns:
        What to do, in this order on every rank: a unit's gradients are complete when the backward has come to where the
        unit was entered, and its tensors are needed from where its turn ended.
    """
    events = events[::-1]
    # A frozen unit is gathered again too, where its tensors were saved.
    again = [use for kind, use in events if kind == "exit" and use.regathered and use.saved]
    place = {use.index: number for number, use in enumerate(again)}
    steps: list[Step] = []
    started = passed = 0
    for kind, use in events:
        due = _due(use, reduce)
        turn = _before_last_quarter(use, due)
        if kind == "exit":
            passed = max(passed, place.get(use.index, -1) + 1)
            # The next unit comes when most of this one has gone, unless that is all at once.
            ahead = passed if turn else min(len(again), passed + use.unit.residency.prefetch)
            steps.append(Step("exit", use, gathers=tuple(again[started:ahead])))
            started = max(started, ahead)
            continue
        for n, i in enumerate(due, start=1):
            ahead = min(len(again), passed + use.unit.residency.prefetch) if n == turn else started
            steps.append(Step("reduce", use, i, tuple(again[started:ahead])))
            started = max(started, ahead)
        steps.append(Step("enter", use))
    return steps


def _due(use: Use, reduce: bool) -> list[int]:
    """The leaves whose gradients are reduced where the backward leaves a use, in their order."""
    slots = use.unit.slots
    # What was computed from leaves hands its gradient on at each use; leaves have theirs complete at the first.
    mine = [i for i, slot in enumerate(slots) if slot.trained and (slot.derived or slot.first is use)]
    for i in mine:
        slots[i].owed = not slots[i].derived
    # Large leaves come first: small ones share a node, which autograd reaches last.
    due = [i for i in mine if reduce or slots[i].derived]
    return sorted(due, key=lambda i: (slots[i].derived, not slots[i].alone, -i))


def _before_last_quarter(use: Use, due: Sequence[int]) -> int:
    """How many leaves come first without the last quarter of the bytes; their full tensors have gone by then."""
    sums = list(itertools.accumulate(use.unit.slots[i].nbytes for i in due))
    return sum(4 * total <= 3 * sums[-1] for total in sums)


def _is_left(use: Use, running: int | None) -> bool:
    """Whether autograd runs a node from before a use."""
    return running is not None and use.sequence > running


class _Bucket(NamedTuple):
    slots: list[Slot]
    grads: list[torch.Tensor]
    nbytes: int


class _Flight(NamedTuple):
    slots: list[Slot]
    finish: Any
    nbytes: int


class Backward:
    """One backward pass over the uses of a forward."""

    def __init__(
        self,
        events: Sequence[tuple[str, Use]],
        log: list[str],
        *,
        divisor: Any,
        reduce: bool,
        early: bool,
        release: bool,
    ) -> None:
        """Before the first step.

        Args:
            events: Those of the forward, as for `order`.
            log: Where collectives are noted.
            divisor: What reduced gradients of the call's own leaves are divided by.
            reduce: Whether gradients of the call's own leaves are reduced in this backward.
            early: Whether they are as they appear.
            release: Whether tensors kept from use to use may go.
        """
        self._divisor, self._log, self._reduces = divisor, log, reduce
        self._uses = [use for kind, use in events if kind == "enter"]
        self._steps = order(events, reduce)
        self._early, self._release = early, release
        self._at = 0
        self._ready: set[tuple[int, int]] = set()
        self._place = {(s.kind, s.use.index, s.place): n for n, s in enumerate(self._steps)}
        self._buckets: dict[Any, _Bucket] = {}
        self._last_gather = max((n for n, step in enumerate(self._steps) if step.gathers), default=-1)
        self._late: list[Slot] = []
        self._pinned: list[Use] = []
        self._flying: deque[_Flight] = deque()
        self._failed: Exception | None = None

    def fetch(self, use: Use, index: int) -> torch.Tensor:
        """A gathered tensor that was saved in the forward."""
        self._advance(self._place["exit", use.index, -1] + 1)
        full = use.wait()[index]
        if full is None:
            # Dropped already: autograd came back to a leaf whose gradient it had finished.
            use.full = None
            full = use.wait()[index]
            assert full is not None
        return full

    def find(self, unit: Unit) -> Use | None:
        """The use whose forward runs again: the unit's last one that the backward has not left, or still holds."""
        self._pass_left()
        uses = (use for use in reversed(self._uses) if use.unit.slots == unit.slots)
        left = (use for use in uses if self._at <= self._place["enter", use.index, -1] or use in self._pinned)
        return next(left, None)

    def recomputed(self, use: Use) -> Use:
        """Gather a use again whose forward is about to run again, with all that the backward needs before it.

        Its gradients come later, after those of the uses behind it: only gathers are taken out of turn.
        """
        # A checkpoint runs once, but several, or one in another, may need a use one after another.
        use.until = None if use.checkpoints == 1 else use.until
        self._pass_left()
        to = self._place["exit", use.index, -1]
        if all(step.kind == "exit" for step in self._steps[self._at : to]):
            self._advance(to + 1)
        for step in self._steps[self._at : to + 1]:
            for gathered in step.gathers:
                gathered.start()
        return use

    def _pass_left(self) -> None:
        """Take the steps of uses that autograd has left: all nodes that may have used them have run."""
        running = _compat.running_sequence_number()
        left = [self._place["enter", use.index, -1] for use in self._uses if _is_left(use, running)]
        self._advance(max(left, default=-1) + 1)

    def passed(self, uses: Sequence[Use]) -> None:
        """Take all steps before a collective of the function's own, whatever this rank has reached of them.

        Args:
            uses: Those that were open where it was called.
        """
        self._pass_left()
        self._advance(max((self._place["exit", use.index, -1] for use in uses), default=-1) + 1)

    def arrived(self, use: Use, group: Sequence[int], grads: Sequence[torch.Tensor | None]) -> None:
        """Take this rank's full gradients for some leaves of a use."""
        for i, grad in zip(group, grads, strict=True):
            slot = use.unit.slots[i]
            if grad is not None:
                slot.take_partial(grad)
            if use.full is not None and use.until is None and (use.regathered or self._release):
                use.drop(i, spare=self._at <= self._last_gather)
            self._ready.add((use.index, i))
        while self._at < len(self._steps) and self._is_ready(self._steps[self._at]):
            self._take(self._steps[self._at])

    def _is_ready(self, step: Step) -> bool:
        """Whether a step can be taken before the backward has come to it."""
        if step.kind == "reduce":
            return (step.use.index, step.place) in self._ready
        # Tensors that are gathered again come when they are needed, and stay until nobody does.
        if step.kind == "exit":
            return not step.gathers
        # A checkpoint may compute with a use again until autograd has left it, whether or not a reduction is due there.
        return not step.use.regathered and (
            not step.use.checkpoints or _is_left(step.use, _compat.running_sequence_number())
        )

    def reduced_now(self, use: Use, group: Sequence[int]) -> list[torch.Tensor]:
        """Finish the gradients of leaves that autograd goes on from."""
        last = max(self._place["reduce", use.index, i] for i in group)
        self._advance(last + 1)
        self._flush()
        while self._flying:
            self._land()
        out = []
        for i in group:
            slot = use.unit.slots[i]
            assert slot.grad is not None
            out.append(slot.grad)
            slot.grad = None
        return out

    def finish(self, slots: Sequence[Slot], failed: Exception | None) -> Exception | None:
        """Take every step that is left, with zeros for what this rank did not use, and wait for all reductions.

        Args:
            slots: All leaves of the call.
            failed: What the backward has failed with; nothing is sent after a collective has.

        Returns:
            What the backward or a hook has failed with.
        """
        if isinstance(failed, comm.CollectiveError):
            return failed
        self._failed = self._failed or failed
        self._advance(len(self._steps))
        for slot in slots:
            self._run_hooks(slot)
        late, self._late = self._late, []
        # Some may only have been used in microbatches before, which left the reduction to this one.
        for slot in (*late, *(slot for slot in slots if slot.owed and slot not in late)) if self._reduces else ():
            self._reduce(slot)
        self._flush()
        while self._flying:
            self._land()
        return self._failed

    def _advance(self, to: int) -> None:
        while self._at < to:
            self._take(self._steps[self._at])

    @_compat.outside_selective_checkpoint()
    def _take(self, step: Step) -> None:
        self._at += 1
        if step.kind == "enter":
            step.use.settle()
            self._pinned.append(step.use)
            for use in self._pinned:
                if (use.regathered or self._release) and (use.until is None or use.until >= step.use.index):
                    use.full = None
            self._pinned = [use for use in self._pinned if use.until is not None and use.until < step.use.index]
        elif step.kind == "exit":
            for use in step.gathers:
                use.start()
        else:
            slot = step.use.unit.slots[step.place]
            if self._early or slot.derived:
                self._reduce(slot)
            else:
                self._late.append(slot)
            for use in step.gathers:
                use.start()

    def _run_hooks(self, slot: Slot) -> None:
        """Run a leaf's hooks; other ranks wait for what follows, so that an error of theirs is raised at the end."""
        try:
            if self._failed is None:
                slot.run_hooks()
        except Exception as error:
            self._failed = error

    def _reduce(self, slot: Slot) -> None:
        self._run_hooks(slot)
        grad, slot.partial, slot.owed = slot.partial, None, False
        grad = slot.zeros() if grad is None else grad
        transform = slot.spec.transform
        # Counted in the gathered dtype: on a rank with one microbatch that used the leaf, the sum may be narrower.
        nbytes = slot.nbytes
        if slot.alone:
            self._start(_Bucket([slot], [grad], nbytes))
            return
        size = transform.bucket_bytes if transform else None
        if size and (full := self._buckets.get(transform)) and full.nbytes + nbytes > size:
            self._start(self._buckets.pop(transform))
        slots, grads, before = self._buckets.get(transform, _Bucket([], [], 0))
        slots.append(slot)
        grads.append(grad)
        self._buckets[transform] = bucket = _Bucket(slots, grads, before + nbytes)
        if bucket.nbytes >= (size or BUCKET_BYTES):
            self._start(self._buckets.pop(transform))

    def _flush(self) -> None:
        for bucket in self._buckets.values():
            self._start(bucket)
        self._buckets = {}

    @_compat.outside_selective_checkpoint()
    def _start(self, bucket: _Bucket) -> None:
        while self._flying and bucket.nbytes + sum(flight.nbytes for flight in self._flying) > IN_FLIGHT_BYTES:
            self._land()
        paths = [slot.path for slot in bucket.slots]
        self._log.append(f"reduce {', '.join(paths)}")
        units = dict.fromkeys(slot.first.unit.name for slot in bucket.slots if slot.first is not None)
        with torch.no_grad(), comm.concerning(", ".join(units), paths):
            finish = start_scatter(bucket.slots, bucket.grads)
        self._flying.append(_Flight(bucket.slots, finish, bucket.nbytes))

    @_compat.outside_selective_checkpoint()
    def _land(self) -> None:
        slots, finish, _ = self._flying.popleft()
        with torch.no_grad():
            for slot, grad in zip(slots, finish(), strict=True):
                own = bool(slot.spec.transform and slot.spec.transform.new_gradients)
                # Divided now, while it is in the processor's cache.
                slot.take(grad, 1 if slot.derived else self._divisor, own)
