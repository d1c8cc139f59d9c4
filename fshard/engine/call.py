"""A call: one run of `value_and_grad` or of a model, which the leaves that it binds lead back to."""

import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from fshard import _compat, comm
from fshard.collectives import Chain, chained
from fshard.engine.backward import Backward
from fshard.engine.forward import Forward
from fshard.engine.graph import ANY_CALL, deliver, mark_used, refuse_unhooked, refuse_unsummed, scattered
from fshard.engine.order import (
    CHECKPOINTED,
    LAST_GONE,
    CollectiveEvent,
    Departed,
    Facts,
    Learned,
    Order,
    PassEvent,
    UnitEvent,
    known,
    remember,
)
from fshard.engine.passes import Pass
from fshard.engine.saved import FunctionTransform, Saved
from fshard.engine.unit import Leaf, State, Unit, Use, policy_of
from fshard.errors import Problem, leaf_error
from fshard.tree import Axis, Flat, Sharded, Tree, flatten, is_sharded, unflatten


class Call:
    """Binds leaves for a function, gathers units when it asks for them, and collects gradients.

    Attributes:
        leaves: The parameters, by their place in the tree; None for leaves that are not Sharded.
        at_end: Functions to run when the call ends.
        ended: Whether it has ended.
    """

    def __init__(
        self,
        what: str,
        flat: Flat,
        axes: Sequence[Axis],
        facts: comm.Facts,
        *,
        differentiable: bool = True,
        code: Hashable = None,
        vote: bool = False,
    ) -> None:
        """Take parameters in, and see that every rank begins the same call.

        Args:
            what: The verb that runs, for errors.
            flat: Its parameters.
            axes: The mesh axes that they live on.
            facts: What the verb was told.
            differentiable: Whether gradients will be asked for.
            code: Stands for the function to be differentiated, whose order of collectives may be known.
            vote: Whether ranks vote on their order, known or not.
        """
        self._what, self._differentiable = what, differentiable
        self._self = weakref.ref(self)
        self._peers = comm.Peers(what, axes, facts)
        self._key = facts.digest, code
        learned = None if vote or not differentiable or _compat.is_tracing() else known(self._key)
        new = self._peers.begin(differentiable and learned is None)
        self._learned = None if new else learned
        self._failed: Exception | None = None
        self._phase, self._news = "f" if differentiable else what, False
        pairs = zip(flat.paths, flat.leaves, strict=True)
        self.leaves = [self._take_in(path, leaf) if is_sharded(leaf) else None for path, leaf in pairs]
        self.at_end: list[Callable[[], None]] = []
        self.ended = False
        self._begin()

    def _begin(self) -> None:
        """Prepare for a forward."""
        self._by_tensor = {id(leaf.tensor): leaf for leaf in self.leaves if leaf is not None}
        for leaf in self._by_tensor.values():
            leaf.first = None
        self._saved = Saved(self._fetch)
        self._order = Order(self._peers, self._learned, votes=self._differentiable and self._learned is None)
        self._forward = Forward(self._what, self._saved, self._order, self._opened)
        self._passes: list[Pass] = []
        self._scheduled: Pass | None = None
        self._plain: Use | None = None
        self._refetched: Use | None = None
        self._backward: Backward | None = None
        self._chain = Chain(self._collective, self._mark)

    def _take_in(self, path: str, leaf: Sharded) -> Leaf:
        local = leaf.local.detach()
        if self._differentiable and not leaf.spec.frozen:
            local.requires_grad_()
        return Leaf(path, Sharded(local, leaf.spec))

    def bound(self, leaf: Leaf) -> Sharded:
        """Make the leaf that the function gets, which leads back to this call."""
        return Sharded(leaf.tensor, leaf.spec, self._self)

    def leaf_of(self, path: str, leaf: Sharded) -> Leaf:
        """Find the leaf that this call bound, or take in one that was computed from such."""
        found = self._by_tensor.get(id(leaf.local))
        if found is None:
            found = self._by_tensor[id(leaf.local)] = Leaf(path, leaf, derived=True)
        return found

    def begin_pass(self, name: str, units: Sequence[Unit], ends: Sequence[int], apart: Sequence[bool]) -> Pass:
        """Begin a pass over the units of a model; see `Pass`."""
        if not self._forward.over:
            self._leave_outside()
        self._passes.append(Pass(self._forward, name, units, ends, apart, self._again))
        return self._passes[-1]

    def gather(self, paths: Sequence[str], leaves: Sequence[Sharded]) -> list[torch.Tensor]:
        """Gather leaves in a plain function, as one unit."""
        found = tuple(self.leaf_of(path, leaf) for path, leaf in zip(paths, leaves, strict=True))
        unit = Unit(", ".join(leaf.path for leaf in found), found)
        # A checkpoint may compute again what was gathered by itself, though a schedule names it too.
        alone = self._backward is not None and self._backward.find(unit) is not None
        within = None if alone else next((one for one in self._passes if one.has(unit)), None)
        use = self._gather(unit) if within is None else within.find(found[0], in_turn=True)[0]
        out = [self.output(use, use.unit.places[leaf]) for leaf in found]
        if within is None:
            use.outputs = {}
        return out

    def _gather(self, unit: Unit) -> Use:
        """Gather a unit outside any pass; its scope ends where the next one begins, as far as anybody can know."""
        if self._forward.over:
            return self._again(unit)
        self._leave_outside()
        self._plain = self._forward.insert(unit)
        return self._plain

    def _leave_outside(self) -> None:
        """Leave the unit that was gathered last outside of a model, and the pass over the caller's schedule."""
        use, self._plain = self._plain, None
        if use is not None:
            self._forward.leave(use)
        scheduled, self._scheduled = self._scheduled, None
        if scheduled is not None:
            scheduled.end()

    def _opened(self, use: Use) -> None:
        """Give computed leaves their autograd node on every rank, whether this one uses them or not."""
        derived = [i for i, leaf in enumerate(use.unit.leaves) if leaf.derived and leaf.trained]
        if derived and torch.is_grad_enabled():
            deliver(self, use, derived)

    def _again(self, unit: Unit) -> Use:
        """Find the use of a unit that a checkpoint computes with once more, and gather it."""
        assert self._backward is not None
        if (use := self._backward.find(unit)) is None:
            raise ValueError(f"{self._what}: a checkpoint computes {unit.name} again that the backward has left")
        return self._backward.recomputed(use)

    def output(self, use: Use, index: int) -> torch.Tensor:
        """The tensor that the function gets for one leaf of an open use."""
        if not self._forward.over:
            self._forward.compute(use)
        out, leaf = use.outputs.get(index), use.unit.leaves[index]
        if not self._forward.over and (out is None or not torch.is_grad_enabled()):
            self._refuse_reentrant(leaf)
        if out is None and leaf.trained and torch.is_grad_enabled():
            deliver(self, use, use.group_of(index))
            out = use.outputs[index]
        return use.tensor_of(leaf).detach() if out is None else out

    def _refuse_reentrant(self, leaf: Leaf) -> None:
        """Refuse a use whose gradient would be lost: a reentrant checkpoint asks for it by loss.backward() alone."""
        if self._differentiable and leaf.trained and _compat.in_reentrant_checkpoint():
            problem = Problem(leaf.path, "a use inside a reentrant checkpoint", "one that autograd records")
            remedy = "pass use_reentrant=False to torch.utils.checkpoint.checkpoint"
            raise leaf_error(f"{self._what}: a gradient would be lost", [problem], remedy)

    def _fetch(self, use: Use, index: int) -> torch.Tensor:
        """Look up a full tensor that autograd saved a handle of."""
        if self._backward is not None:
            return self._backward.fetch(use, index)
        # The function itself differentiates: gather again while it stays with this unit.
        if use.state is not State.FULL:
            if self._refetched is not None:
                self._refetched.release()
            self._refetched = use
            use.wait()
            self._saved.watch(use)
        return use.tensor_of(use.unit.leaves[index])

    def receive(self, use: Use, group: list[int], grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Take the gradients of a use's outputs, and return those from which autograd goes on."""
        leaves = use.unit.leaves
        if self._backward is None:
            refuse_unhooked(self._what, [leaves[i] for i in group])
            return list(scattered(leaves, group, grads))
        self._backward.arrived(use, group, grads)
        if leaves[group[0]].derived:
            return list(self._backward.reduced_now(use, group))
        return [None] * len(group)

    def _collective(self, name: str, axis: Axis, differentiated: bool) -> None:
        self._forward.note(CollectiveEvent(name, axis.name, differentiated))

    def _mark(self) -> Callable[[], None]:
        """Note where the function calls a collective; the backward then brings this rank's steps there."""
        uses = self._forward.open_uses()

        def passed() -> None:
            if self._backward is not None:
                self._backward.passed(uses)

        return passed

    def _drops(self) -> bool:
        """Whether some tensors are gathered again in the backward."""
        policies = [policy_of([leaf]) for leaf in self.leaves if leaf is not None]
        return bool(self._peers.axes) and self._differentiable and any(p.regather is not False for p in policies)

    def forward(
        self,
        f: Callable[[], Any],
        schedule: Callable[[], Sequence[Tree]] = tuple,
        dtype_of: Callable[[Any], torch.dtype] = lambda out: out.dtype,
    ) -> Any:
        """Run the function, and see whether every rank has.

        Args:
            f: The function.
            schedule: Makes the trees of leaves that it will gather in this order, if that is known.
            dtype_of: The dtype of the loss in the function's result.

        Returns:
            The function's result; None where this rank failed, and goes on because others follow the same order.

        Raises:
            FunctionTransform: if it calls torch.func.
            RuntimeError: if another rank failed.
            ValueError: if ranks do not gather the same units.
        """
        self._begin()
        out = None
        try:
            if self._failed is not None:
                raise self._failed
            with self._saved.hooks() if self._drops() else nullcontext():
                units = [self._unit_of(part) for part in schedule()]
                if units:
                    ends, apart = range(1, len(units) + 1), [False] * len(units)
                    self._scheduled = self.begin_pass("the schedule", units, ends, apart)
                with chained(self._chain) if self._differentiable else nullcontext():
                    out = f()
            self._end_passes()
            self._forward.finish()
            self._conclude(dtype_of(out))
        except Exception as error:
            if _compat.refuses_saved_tensor_hooks(error):
                error = FunctionTransform("f calls torch.func")
            if self._learned is None or isinstance(error, comm.CollectiveError):
                self._peers.agree(error=error, where=self._phase)
                raise error
            self._failed, out = error, None
            self._take_part()
        return out

    def evaluate(self, f: Callable[[], Any]) -> Any:
        """Run a function that applies one model, without a backward, and see whether every rank has.

        Args:
            f: The function.

        Returns:
            The function's result.

        Raises:
            RuntimeError: if another rank failed.
        """
        try:
            out = f()
            self._end_passes()
        except Exception as error:
            if not isinstance(error, comm.CollectiveError):
                # The order of one model is known: other ranks hear of the failure behind it.
                self._forward.fail()
                self._end_passes()
                self._peers.agree(error=error, where=self._phase)
            raise
        self._peers.agree(comm.Label(comm.Verb.AGREE, call=self._what, phase=comm.Phase.END))
        return out

    def _end_passes(self) -> None:
        self._leave_outside()
        for one in self._passes:
            one.end()

    def _take_part(self) -> None:
        """Gather what other ranks do, in the order that all follow, without computing anything."""
        forward, order = self._forward, self._order
        assert order.learned is not None
        forward.fail()
        while (event := order.expected) is not None:
            forward.catch_up(event.opened)
            match event:
                case UnitEvent():
                    forward.leave(forward.insert(self._unit_like(event)))
                case PassEvent():
                    forward.begin(event.name, [self._unit_like(unit) for unit in event.units], event.buckets)
                case CollectiveEvent():
                    # Its operands are the function's own: others hear of the failure by the backend.
                    assert self._failed is not None
                    raise self._failed
        self._end_passes()
        forward.catch_up(order.learned.uses)
        forward.finish()
        forward.settle(order.learned.facts)

    def _unit_like(self, event: UnitEvent) -> Unit:
        """Make a unit of an event's leaves; of those that the function would have computed, with zeros."""
        own = {leaf.path: leaf for leaf in self.leaves if leaf is not None}
        leaves = []
        for path, derived in event.members:
            if derived is None:
                leaves.append(own[path])
            else:
                spec, dtype, trained = derived
                like = next(iter(own.values())).stored
                zeros = like.new_zeros(spec.local_shape, dtype=dtype).requires_grad_(trained)
                leaves.append(Leaf(path, Sharded(zeros, spec), derived=True))
        return Unit(event.name, tuple(leaves))

    def _conclude(self, dtype: torch.dtype) -> None:
        """See at the end of a forward that every rank has come to it by the same way, and settle what it keeps."""
        forward, learned = self._forward, self._learned
        if not self._peers.axes:
            return
        needed = forward.needed()
        if learned is None:
            end = comm.Label(comm.Verb.AGREE, call="f", phase=comm.Phase.END)
            told = {"the loss": f"dtype {str(dtype).removeprefix('torch.')}"}
            flags = self._peers.agree(end, told, forward.flags())
            highest = tuple(self._peers.highest(needed)) if CHECKPOINTED in flags else ()
            facts = Facts(flags, highest, dtype)
            if not _compat.is_tracing():
                self._learned = Learned(tuple(self._order.events), len(forward.uses), facts)
            forward.settle(facts)
            return
        facts = learned.facts
        own, highest = forward.flags() & {CHECKPOINTED, LAST_GONE}, facts.needed or (0,) * len(needed)
        late = any(mine > most for mine, most in zip(needed, highest, strict=False))
        if self._order.expected is not None or dtype != facts.dtype or not own <= facts.flags or late:
            raise Departed
        self._news = self._news or not forward.flags() <= facts.flags
        forward.settle(facts)

    def _unit_of(self, part: Tree) -> Unit:
        flat = zip(*flatten(part)[:2], strict=True)
        leaves = tuple(self.leaf_of(path, leaf) for path, leaf in flat if is_sharded(leaf))
        return Unit(", ".join(leaf.path for leaf in leaves), leaves)

    def backward(
        self,
        loss: torch.Tensor | None,
        divisor: Any,
        unchanged: Callable[[], AbstractContextManager[None]],
        *,
        reduce: bool = True,
        last: bool = True,
    ) -> None:
        """Differentiate the loss of the last forward and add its gradients to the leaves.

        Args:
            loss: This rank's scalar loss, attached to the graph; None where it failed, and adds zeros.
            divisor: What gradients are divided by once they are summed.
            unchanged: Makes a context that refuses writes to parameters.
            reduce: Whether gathered leaves' gradients are reduced now, rather than kept in full.
            last: Whether no other forward follows, so that tensors that were kept may go.
        """
        leaves = [leaf for leaf in self.leaves if leaf is not None and leaf.trained]
        early = any(policy_of([leaf]).early for leaf in leaves)
        uses, events = self._forward.uses, self._forward.events
        self._backward = Backward(uses, events, divisor=divisor, reduce=reduce, early=early, last=last)
        if last:
            for leaf in self.leaves:
                if leaf is not None:
                    leaf.keeper = None
        anchors = [use.anchor for use in uses if use.anchor is not None and loss is not None]
        first, ends = self._chain.tokens[:1], self._chain.tokens[1:]
        # The next microbatch's collectives are tied anew, or its backward would run these again.
        self._chain.tokens.clear()
        outputs = [out for out in (loss, *anchors, *ends) if out is not None and out.requires_grad]
        starts = [torch.ones_like(out) if out is loss else torch.zeros_like(out) for out in outputs]
        failed = None
        direct: Sequence[torch.Tensor | None] = [None] * len(leaves)
        try:
            if outputs and leaves:
                inputs = [*(leaf.tensor for leaf in leaves), *first, ANY_CALL]
                with unchanged():
                    direct = torch.autograd.grad(outputs, inputs, starts, allow_unused=True)[: len(leaves)]
                refuse_unsummed(self._what, outputs[: len(outputs) - len(ends)], leaves, direct)
                refuse_unhooked(self._what, [leaf for leaf, g in zip(leaves, direct, strict=True) if g is not None])
        except Exception as error:
            failed = error
        failed = self._backward.finish(leaves, failed)
        for use in uses:
            use.take_back()
        if isinstance(failed, comm.CollectiveError):
            raise failed
        if failed is not None:
            self._failed, self._phase = self._failed or failed, "the backward"
            return
        if anchors and loss is not None:
            mark_used(loss, leaves)
        # Gradients from maths on shards are this rank's own part of the sum already.
        for leaf, grad in zip(leaves, direct, strict=True):
            if grad is not None:
                leaf.take(grad, divisor, own=False)
                leaf.used = leaf.used or not anchors

    def zero(self) -> torch.Tensor:
        """Make the loss of a rank that failed."""
        assert self._learned is not None
        like = next(leaf.stored for leaf in self.leaves if leaf is not None)
        return like.new_zeros((), dtype=self._learned.facts.dtype)

    @property
    def status(self) -> tuple[bool, ...]:
        """What this rank tells the others with the objective: whether it failed, departed, or saved other tensors."""
        departed = isinstance(self._failed, Departed)
        return self._failed is not None and not departed, departed, self._news

    def settle(self, failed: bool, departed: bool, news: bool) -> None:
        """Conclude by the status of all ranks.

        Args:
            failed: Whether any rank failed.
            departed: Whether any rank did not follow the order.
            news: Whether any rank saved tensors that the order does not regather.

        Raises:
            Departed: if ranks must vote; the call is to be run again.
            RuntimeError: if another rank failed.
        """
        if failed:
            own = None if isinstance(self._failed, Departed) else self._failed
            self._peers.failed(own, self._phase)
            assert own is not None
            raise own
        if self._peers.axes and not _compat.is_tracing():
            remember(self._key, None if news else self._learned, departed)
        if departed:
            raise Departed

    def end(self) -> None:
        """Drop everything: calls are many and hold much, and nothing may wait for the garbage collector."""
        for use in self._forward.uses:
            use.take_back()
        for release in self.at_end:
            release()
        self.at_end, self.ended = [], True
        self._begin()
        self._by_tensor = {}
        for leaf in self.leaves:
            if leaf is not None:
                leaf.keeper = leaf.first = None
        del self._saved, self._forward, self._chain


def call_of(what: str, flat: Flat) -> Call | None:
    """Find the running call that bound the leaves of a tree.

    Args:
        what: The verb that asks, for its error.
        flat: The tree.

    Returns:
        The call; None where all leaves are the caller's own.

    Raises:
        ValueError: if a leaf outlived the call that bound it.
    """
    found = None
    problems = []
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        if is_sharded(leaf) and leaf.call is not None:
            call = leaf.call()
            if call is None or call.ended:
                problems.append(
                    Problem(path, "a leaf bound to a call of value_and_grad that has ended", "the caller's own")
                )
            found = call or found
    if problems:
        remedy = "gather the parameters that you passed, or those that the running call binds"
        raise leaf_error(f"{what}: leaves of an ended call", problems, remedy)
    return found


def unbound(tree: Tree) -> Tree:
    """Make a tree that may outlive a call: detached, and with leaves that do not lead back."""
    flat = flatten(tree)
    leaves = list(flat.leaves)
    for i, leaf in enumerate(leaves):
        if is_sharded(leaf):
            leaves[i] = Sharded(leaf.local.detach(), leaf.spec)
        elif isinstance(leaf, torch.Tensor):
            leaves[i] = leaf.detach()
    return unflatten(flat.treedef, leaves)


def evaluated(what: str, flat: Flat, axes: Sequence[Axis], run: Callable[[Call, list[Any]], Any]) -> Any:
    """Run one model without a backward: units are gathered just in time and dropped.

    Args:
        what: The verb that runs, for errors.
        flat: The parameters.
        axes: The mesh axes that they live on.
        run: The model as a function of the call and the leaves that it binds.

    Returns:
        The function's result.
    """
    call = Call(what, flat, axes, comm.facts_of(what, flat), differentiable=False)
    pairs = zip(call.leaves, flat.leaves, strict=True)
    leaves = [leaf if own is None else call.bound(own) for own, leaf in pairs]
    try:
        return call.evaluate(lambda: run(call, leaves))
    finally:
        call.end()


def attempted(attempt: Callable[[bool], Any]) -> Any:
    """Run a call, and where ranks depart from the order that they know, again from the same random numbers.

    Args:
        attempt: Runs the call; its argument says whether ranks vote, whatever they know.

    Returns:
        Its result.
    """
    state = None if _compat.is_tracing() else _compat.random_state()
    try:
        return attempt(False)
    except Departed:
        assert state is not None
        torch.default_generator.set_state(state)
        return attempt(True)
