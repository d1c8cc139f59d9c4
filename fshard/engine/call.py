"""One run of `value_and_grad` or of a model. Bound leaves refer to it."""

import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from fshard import _compat, comm
from fshard.collectives import Chain, chained
from fshard.engine.backward import Backward
from fshard.engine.forward import Forward
from fshard.engine.graph import (
    ANY_CALL,
    Grads,
    check_graph,
    deliver,
    graph_outlived_call,
    mark_used,
    scattered,
)
from fshard.engine.order import CollectiveEvent, Departed, Order, common, known, remember
from fshard.engine.passes import Pass
from fshard.engine.saved import FunctionTransform, Saved
from fshard.engine.tree_leaf import TreeLeaf, check_sums
from fshard.engine.unit import Leaf, Unit, Use, divided_parts
from fshard.errors import Problem, leaf_error, refuse
from fshard.microbatches import Share
from fshard.tree import Axis, Flat, Sharded, Tree, flatten, is_sharded
from fshard.tree.checks import check_versions


class Call:
    """Binds leaves for a function, gathers units when it asks for them, and collects gradients.

    Attributes:
        bound: The parameters as the function gets them: Sharded ones refer to this call.
        leaves: The same as the engine sees them; None for leaves that are not Sharded.
        at_end: Functions to run when the call ends.
        ended: Whether it has ended.
        news: Whether this rank saved tensors that the order does not regather.
    """

    def __init__(
        self,
        what: str,
        flat: Flat,
        axes: Sequence[Axis],
        *,
        code: Hashable | None = None,
        share: Share | None = None,
        **told: Any,
    ) -> None:
        """Bind parameters, and check that every rank begins the same call.

        Args:
            what: The verb that runs, for errors.
            flat: Its parameters.
            axes: The mesh axes that they live on.
            code: The key of the function to differentiate, by which its order of collectives may be known; None if
                nothing is differentiated.
            share: The microbatches that this rank adds up in one tree with those of others; None adds them up in turn.
            **told: The verb's other arguments that decide what is sent or what sums mean.
        """
        facts = comm.facts_of(what, flat, **told)
        self._what, self._differentiable = what, code is not None
        self._peers = comm.Peers(what, axes, facts)
        self._key = facts.digest, code
        order = known(self._key) if self._differentiable and not _compat.is_tracing() else None
        new = self._peers.begin(self._differentiable and order is None)
        self._order = None if new else order
        self.news = False
        self.bound = [self._bind(leaf) for leaf in flat.leaves]
        given = zip(flat.paths, self.bound, flat.leaves, strict=True)
        kind = Leaf if share is None else partial(TreeLeaf, share=share)
        self.leaves = [kind(path, leaf, own.local) if is_sharded(leaf) else None for path, leaf, own in given]
        self._own = [leaf for leaf in self.leaves if leaf is not None]
        self._versions = _compat.versions(leaf.stored for leaf in self._own)
        self._share = share
        self._concluded: list[Order | None] = []
        if share is not None:
            check_sums(what, self._own, share)
        self.at_end: list[Callable[[], None]] = []
        self.ended = False
        self._begin(self._order)

    def _bind(self, leaf: Any) -> Any:
        if not is_sharded(leaf):
            return leaf
        local = leaf.local.detach()
        if self._differentiable and not leaf.spec.frozen:
            local.requires_grad_()
        return Sharded(local, leaf.spec, weakref.ref(self))

    def _begin(self, order: Order | None) -> None:
        """Prepare for a forward, whose order ranks know; without one they vote."""
        self._by_tensor = {id(leaf.tensor): leaf for leaf in self._own}
        for leaf in self._own:
            leaf.first = None
        votes = self._differentiable and self._order is None
        self._forward = Forward(self._what, self._peers, order, votes, Saved(self._fetch), self._opened)
        self._backward: Backward | None = None
        self._chain = Chain(self._collective, self._mark)

    def leaf_of(self, path: str, leaf: Sharded) -> Leaf:
        """Find the leaf that this call bound, or make a derived one."""
        found = self._by_tensor.get(id(leaf.local))
        if found is None:
            found = self._by_tensor[id(leaf.local)] = Leaf(path, leaf, leaf.local, derived=True)
            if found.trained:
                self._refuse_on_shards([found])
        return found

    def _refuse_on_shards(self, leaves: Sequence[Leaf]) -> None:
        """Refuse maths on shards where gradients are added up in one tree: its transpose runs once for each sum."""
        if self._share is not None and leaves:
            problems = [Problem(leaf.path, "maths on shards", "a gather of the parameter itself") for leaf in leaves]
            remedy = "compute with full tensors, behind the gather"
            raise leaf_error(f'{self._what}: gradients would not be one tree of sums="tree"', problems, remedy)

    def begin_pass(self, name: str, units: Sequence[Unit]) -> Pass:
        """Begin a pass over the units of a model; see `Pass`."""
        if not self._forward.over:
            self._forward.outside(None)
        one = Pass(self._forward, name, units, self._again)
        self._forward.passes.append(one)
        return one

    def schedule(self, parts: Sequence[Tree]) -> None:
        """Gather units ahead, in the order in which the function will gather them.

        Args:
            parts: A tree of bound leaves for each of its gathers.
        """
        flats = [flatten(part) for part in parts]
        units = [self._unit_of(flat.paths, flat.leaves) for flat in flats]
        if units:
            self._forward.outside(self.begin_pass("the schedule", units).end)

    def _unit_of(self, paths: Sequence[str], leaves: Sequence[Any]) -> Unit:
        pairs = zip(paths, leaves, strict=True)
        found = tuple(self.leaf_of(path, leaf) for path, leaf in pairs if is_sharded(leaf))
        return Unit(", ".join(leaf.path for leaf in found), found)

    def gather(self, paths: Sequence[str], leaves: Sequence[Sharded]) -> list[torch.Tensor]:
        """Gather leaves in a plain function, as one unit."""
        unit = self._unit_of(paths, leaves)
        # A checkpoint may recompute with a unit that was gathered by itself, though a schedule names it too.
        again = self._backward is not None and self._backward.find(unit) is not None
        within = None if again else next((one for one in self._forward.passes if one.has(unit)), None)
        if within is not None:
            use = within.find(unit.leaves[0], in_turn=True)
        elif self._forward.over:
            use = self._again(unit)
        else:
            self._forward.outside(None)
            use = self._forward.insert(unit)
            self._forward.outside(partial(self._forward.leave, use))
        out = [self.output(use, leaf) for leaf in unit.leaves]
        if within is None:
            use.outputs = {}
        return out

    def _opened(self, use: Use) -> None:
        """Make the autograd node of derived leaves on every rank, whether this one uses them or not."""
        for group in use.unit.groups:
            if use.unit.leaves[group[0]].derived and torch.is_grad_enabled():
                deliver(self.receive, use, group)

    def _again(self, unit: Unit) -> Use:
        """Find the use of a unit that a checkpoint recomputes with, and regather it."""
        assert self._backward is not None
        if (use := self._backward.find(unit)) is None:
            raise ValueError(f"{self._what}: a checkpoint computes {unit.name} again that the backward has left")
        return self._backward.recomputed(use)

    def output(self, use: Use, leaf: Leaf) -> torch.Tensor:
        """Return the tensor that the function gets for one leaf of an open use."""
        index = use.unit.places[leaf]
        out = use.outputs.get(index)
        if not self._forward.over:
            self._forward.compute(use)
            if out is None or not torch.is_grad_enabled():
                self._refuse_reentrant(leaf)
        if out is None and leaf.trained and torch.is_grad_enabled():
            deliver(self.receive, use, next(group for group in use.unit.groups if index in group))
            out = use.outputs[index]
        return use.tensor_of(leaf).detach() if out is None else out

    def _refuse_reentrant(self, leaf: Leaf) -> None:
        """Refuse a use inside a reentrant checkpoint, whose own backward would lose the gradient."""
        if self._differentiable and leaf.trained and _compat.in_reentrant_checkpoint():
            problem = Problem(leaf.path, "a use inside a reentrant checkpoint", "one that autograd records")
            remedy = "pass use_reentrant=False to torch.utils.checkpoint.checkpoint"
            raise leaf_error(f"{self._what}: a gradient would be lost", [problem], remedy)

    def _fetch(self, use: Use, index: int) -> torch.Tensor:
        """Look up a full tensor that autograd saved a handle of."""
        if self.ended:
            raise graph_outlived_call([use.unit.leaves[index].path])
        return (self._backward or self._forward).fetch(use, index)

    def receive(self, use: Use, group: Sequence[int], grads: Grads) -> Grads:
        """Take the gradients of a use's outputs, and return those from which autograd goes on."""
        leaves = [use.unit.leaves[i] for i in group]
        if self.ended:
            pairs = zip(leaves, grads, strict=True)
            raise graph_outlived_call([leaf.path for leaf, grad in pairs if grad is not None])
        if self._backward is None:
            return scattered(leaves, grads)
        self._backward.arrived(use, group, grads)
        return self._backward.reduced_now(use, group) if leaves[0].derived else [None] * len(group)

    def _collective(self, name: str, axis: Axis, differentiated: bool) -> None:
        self._forward.note(CollectiveEvent(name, axis.name, differentiated))

    def _mark(self) -> Callable[[], None]:
        """Note where a collective begins or ends; before it passes there, the backward takes all steps up to there."""
        number = self._forward.mark()
        return lambda: None if number is None or self._backward is None else self._backward.passed(number)

    def _drops(self) -> bool:
        """Whether some tensors are gathered again in the backward."""
        return bool(self._peers.axes) and any(leaf.policy.regather is not False for leaf in self._own)

    def _check_writes(self) -> None:
        """Refuse writes to parameters since the call began."""
        stored = [leaf.stored for leaf in self._own]
        check_versions(self._what, [leaf.path for leaf in self._own], stored, self._versions, stored)

    def forward(self, f: Callable[[], tuple[torch.Tensor, Any, Any]]) -> tuple[torch.Tensor, Any, Any]:
        """Run the function, and compare its course with the other ranks'.

        Args:
            f: The function: this rank's loss, count and aux.

        Returns:
            The function's result.

        Raises:
            FunctionTransform: if it calls torch.func.
            Departed: if this rank does something else than all ranks did in an earlier call.
            ValueError: if ranks do not gather the same units.
        """
        self._begin(self._order)
        try:
            # If nothing is regathered, autograd may save full tensors themselves.
            drops = self._drops() and not (self._order and self._order.keeps_all)
            hooks = self._forward.saved.hooks() if drops else nullcontext()
            with hooks, chained(self._chain), torch.enable_grad():
                out = f()
                self._check_writes()
            self._forward.finish()
            order = self._forward.conclude(out[0].dtype)
            self._concluded.append(order)
            self.news = self.news or self._forward.news
            return out
        except Departed:
            self._forward.drop()
            remember(self._key, None, departed=True)
            raise
        except Exception as error:
            if not _compat.refuses_saved_tensor_hooks(error):
                raise
            self._forward.drop()
            raise FunctionTransform("f calls torch.func") from error

    def evaluate(self, f: Callable[[], Any]) -> Any:
        """Run a function that applies one model, without a backward: units are gathered just in time and dropped.

        Args:
            f: The function.

        Returns:
            The function's result.
        """
        try:
            out = f()
            self._forward.finish()
            return out
        finally:
            self.end()

    def backward(
        self,
        loss: torch.Tensor,
        divisor: Any,
        inputs: Sequence[torch.Tensor | None] = (),
        *,
        reduce: bool = True,
        last: bool = True,
    ) -> list[torch.Tensor | None]:
        """Differentiate the loss of the last forward and add its gradients to the leaves.

        Args:
            loss: This rank's scalar loss, attached to the graph.
            divisor: Summed gradients are divided by it.
            inputs: This rank's own tensors to differentiate by too.
            reduce: Whether gathered leaves' gradients are reduced now, rather than kept in full.
            last: Whether no other forward follows, so that tensors that were kept may be dropped.

        Returns:
            The gradients of the inputs, not divided; zeros where the loss did not use them.
        """
        leaves = [leaf for leaf in self._own if leaf.trained]
        uses, scopes = self._forward.uses, self._forward.scopes
        self._backward = Backward(uses, scopes, divisor=divisor, reduce=reduce, last=last)
        if last:
            for leaf in self._own:
                leaf.keeper = None
        anchors = [use.anchor for use in uses if use.anchor is not None]
        first, ends = self._chain.tokens[:1], self._chain.tokens[1:]
        # The next microbatch's collectives are tied anew, or its backward would run these again.
        self._chain.tokens.clear()
        outputs = [out for out in (loss, *anchors, *ends) if out.requires_grad]
        starts = [torch.ones_like(out) if out is loss else torch.zeros_like(out) for out in outputs]
        direct: Grads = [None] * len(leaves)
        given = [tensor for tensor in inputs if tensor is not None]
        by_given: Grads = [None] * len(given)
        if outputs and (leaves or given):
            sources = [*(leaf.tensor for leaf in leaves), *given, *first, ANY_CALL]
            found = torch.autograd.grad(outputs, sources, starts, allow_unused=True)
            self._check_writes()
            direct, by_given = found[: len(leaves)], found[len(leaves) : len(leaves) + len(given)]
            check_graph(self._what, outputs[: len(outputs) - len(ends)], leaves, direct)
            self._refuse_on_shards([leaf for leaf, grad in zip(leaves, direct, strict=True) if grad is not None])
        self._backward.finish(leaves)
        self._forward.end()
        for leaf in leaves:
            if isinstance(leaf, TreeLeaf):
                leaf.end_microbatch(last)
        if anchors:
            mark_used(loss, leaves)
        # Gradients from maths on shards are this rank's own part of the sum already.
        pairs = [(leaf, grad) for leaf, grad in zip(leaves, direct, strict=True) if grad is not None]
        parts = divided_parts([leaf.as_part(grad, own=False) for leaf, grad in pairs], divisor)
        for (leaf, _), part in zip(pairs, parts, strict=True):
            leaf.add_reduced(part)
            leaf.used = leaf.used or not anchors
        rest = (torch.zeros_like(t) if grad is None else grad for t, grad in zip(given, by_given, strict=True))
        return [None if tensor is None else next(rest) for tensor in inputs]

    def settle(self, news: bool) -> None:
        """Remember the order of this call.

        Args:
            news: Whether any rank saved tensors that the order does not regather.
        """
        if self._peers.axes and not _compat.is_tracing():
            # A known order is remembered again, with the flags of this call.
            remember(self._key, None if news else common(self._concluded))

    def end(self) -> None:
        """Drop all that the call holds."""
        self._forward.end()
        for release in self.at_end:
            release()
        for leaf in self._own:
            leaf.keeper = leaf.first = None
        self.at_end, self._by_tensor, self._backward, self.ended = [], {}, None, True
        del self._forward, self._chain


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
    bound = [
        (path, leaf.call())
        for path, leaf in zip(flat.paths, flat.leaves, strict=True)
        if is_sharded(leaf) and leaf.call
    ]
    found = "a leaf bound to a call of value_and_grad that has ended"
    problems = [Problem(path, found, "the caller's own") for path, call in bound if call is None or call.ended]
    remedy = "gather the parameters that you passed, or those that the running call binds"
    refuse(f"{what}: leaves of an ended call", problems, remedy)
    return bound[-1][1] if bound else None


def attempted(attempt: Callable[[], Any]) -> Any:
    """Run a call; if ranks departed from the known order, run it once more from the same random numbers.

    Args:
        attempt: Runs the call.

    Returns:
        Its result.
    """
    state = None if _compat.is_tracing() else _compat.random_state()
    try:
        return attempt()
    except Departed:
        assert state is not None
        torch.default_generator.set_state(state)
        return attempt()
