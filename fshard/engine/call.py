"""One run of `value_and_grad`, or of a model: binds leaves, runs forwards and backwards, ends."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from fshard import _compat, comm
from fshard.collectives import Chain, chained, divided, settle
from fshard.engine.backward import Backward
from fshard.engine.forward import Forward
from fshard.engine.gathered_unit import GatheredUnit
from fshard.engine.graph import (
    ANY_CALL,
    Grads,
    check_derived_leaves,
    check_direct_gradients,
    deliver,
    find_used_leaves,
    outlived_graph_error,
)
from fshard.engine.leaf import Leaf
from fshard.engine.passes import Pass
from fshard.engine.plan import LeafFacts, ModuleUnit, make_plan, make_unit
from fshard.engine.saved import SavedTensorHooks
from fshard.errors import Problem, leaf_error
from fshard.tree import Axis, Flat, Sharded, is_sharded
from fshard.tree.checks import check_dense, check_versions

# Under which the function, and what autograd runs again of it, find the call that runs them.
KEY = "fshard call"


class Call:
    """Binds leaves for a function, gathers units when it asks for them, and collects gradients.

    Attributes:
        bound: The parameters as the function gets them.
        leaves: The same as the engine sees them; None for leaves that are not Sharded.
        trained: Those that take a gradient.
        at_end: Functions to run when the call ends.
        ended: Whether it has ended.
    """

    def __init__(
        self, what: str, flat: Flat, axes: Sequence[Axis], *, trains: bool = True, tree: bool = False, **told: Any
    ) -> None:
        """Bind parameters, and check that every rank begins the same call.

        Args:
            what: The verb that runs, for errors.
            flat: Its parameters.
            axes: The mesh axes that they live on.
            trains: Whether anything is differentiated.
            tree: Whether microbatches are added up in one tree with those of other ranks, rather than in turn.
            **told: The verb's other arguments that decide what is sent or what sums mean.
        """
        comm.same_call(what, axes, flat, **told)
        self._what, self._trains, self._tree = what, trains, tree
        self.bound, self.leaves = list(flat.leaves), list[Leaf | None]()
        for i, (path, own) in enumerate(zip(flat.paths, flat.leaves, strict=True)):
            if is_sharded(own):
                bound = self.bound[i] = Sharded(own.local.detach(), own.spec)
                bound.local.requires_grad_(trains and not own.spec.frozen)
                self.leaves.append(Leaf(path, bound, own.local, tree=tree))
            else:
                self.leaves.append(None)
        self._own = [leaf for leaf in self.leaves if leaf is not None]
        self.trained = [leaf for leaf in self._own if leaf.trained]
        self._versions = _compat.versions(leaf.stored for leaf in self._own)
        self.at_end: list[Callable[[], None]] = []
        self.ended = False

    def running(self) -> AbstractContextManager[None]:
        """Make the context in which `call_of` finds this call."""
        return _compat.keeping_thread_object(KEY, self)

    def has(self, leaf: Any) -> bool:
        """Whether this call bound a leaf, or it was computed from such."""
        return is_sharded(leaf) and (leaf.local.requires_grad or id(leaf.local) in self._by_tensor)

    def leaf_of(self, path: str, leaf: Sharded) -> Leaf:
        """Find the leaf that this call bound, or make a derived one."""
        known = self._by_tensor.get(id(leaf.local))
        if known is not None:
            return known
        with torch.enable_grad():
            settled = settle(path, leaf.local, leaf.spec)
        derived = Leaf(path, Sharded(settled, leaf.spec), leaf.local, derived=True)
        self._by_tensor[id(leaf.local)] = derived
        # The leaf may hold a view of its tensor alone, and the number of a tensor that is gone may be another's.
        self._computed.append(leaf.local)
        if derived.trained:
            self._derived.append(derived)
        return derived

    def begin_pass(self, units: Sequence[ModuleUnit], leaves: Mapping[str, Leaf]) -> Pass:
        """Begin a pass over the units of a model.

        Args:
            units: The units.
            leaves: All sharded leaves of the model, by their names.

        Returns:
            The pass.
        """
        if not self._forward.is_over:
            self._forward.leave_plain()
        return Pass(self._forward, make_plan(tuple(units), _facts(leaves)), leaves, self._recomputed)

    def gather(self, paths: Sequence[str], leaves: Sequence[Sharded]) -> list[torch.Tensor]:
        """Gather leaves in a plain function, as one unit."""
        found = [self.leaf_of(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
        asked = list(dict.fromkeys(found))
        if self._forward.is_over:
            use = self._recomputed(asked)
        else:
            use = GatheredUnit(make_unit(_name(asked), _facts({leaf.path: leaf for leaf in asked})), asked)
            self._forward.insert_plain(use)
        outputs = [self.output(use, leaf) for leaf in found]
        # The function holds them.
        use.outputs = {}
        return outputs

    def _recomputed(self, leaves: Sequence[Leaf]) -> GatheredUnit:
        """Find the use of leaves that a checkpoint computes with again."""
        use = None if self._backward is None else self._backward.find_recomputed(leaves)
        if use is None:
            raise ValueError(
                f"{self._what}: {_name(leaves)} is computed inside a checkpoint, so the backward cannot gather it "
                "again. Compute it outside of the checkpoint."
            )
        return use

    def output(self, use: GatheredUnit, leaf: Leaf) -> torch.Tensor:
        """Return the tensor that the function gets for one leaf of an open use."""
        recorded = torch.is_grad_enabled()
        first = leaf.trained and not self._forward.is_over and (leaf not in use.outputs or not recorded)
        if first and _compat.in_reentrant_checkpoint():
            # Its own backward would lose the gradient.
            problem = Problem(leaf.path, "a use inside a reentrant checkpoint", "one that autograd records")
            remedy = "pass use_reentrant=False to torch.utils.checkpoint.checkpoint"
            raise leaf_error(f"{self._what}: a gradient would be lost", [problem], remedy)
        if leaf.trained and recorded and leaf not in use.outputs:
            use.outputs = deliver(self._receive, use)
        return use.outputs[leaf] if leaf in use.outputs else use.wait()[leaf].detach()

    def _fetch(self, use: GatheredUnit, leaf: Leaf) -> torch.Tensor:
        """Look up a full tensor that autograd saved a handle of."""
        if self.ended:
            raise outlived_graph_error([leaf.path])
        self._catch_up()
        return use.wait()[leaf]

    def _receive(self, use: GatheredUnit, grads: Grads) -> None:
        """Take the gradients of a use's outputs."""
        if self._backward is None:
            pairs = zip(use.trained, grads, strict=True)
            raise outlived_graph_error([leaf.path for leaf, grad in pairs if grad is not None])
        check_dense(self._what, [leaf.path for leaf in use.trained], grads)
        self._backward.receive(use, grads)

    def _catch_up(self) -> None:
        if self._backward is not None:
            self._backward.catch_up()

    def _check_writes(self) -> None:
        """Refuse writes to parameters since the call began."""
        paths, stored = [leaf.path for leaf in self._own], [leaf.stored for leaf in self._own]
        check_versions(self._what, paths, stored, self._versions)

    def forward(self, f: Callable[[], Any]) -> Any:
        """Run the function.

        Args:
            f: The function.

        Returns:
            Its result.

        Raises:
            ValueError: if it wrote to a parameter.
            RuntimeError: of torch's, if it calls torch.func where tensors are gathered again.
        """
        self._by_tensor = {id(leaf.tensor): leaf for leaf in self._own}
        self._forward = Forward(self._what, self._trains, SavedTensorHooks(self._fetch))
        self._backward: Backward | None = None
        self._chain = Chain(self._catch_up)
        self._derived: list[Leaf] = []
        self._computed: list[torch.Tensor] = []
        with ExitStack() as contexts:
            if self._trains:
                for context in self._forward.saved.running(), chained(self._chain), torch.enable_grad():
                    contexts.enter_context(context)
            out = f()
        self._check_writes()
        self._forward.finish()
        return out

    def backward(self, loss: torch.Tensor, divisor: Any, *, reduce: bool, last: bool) -> None:
        """Differentiate the loss of the last forward and add its gradients to the leaves.

        Args:
            loss: This rank's scalar loss, attached to the graph.
            divisor: Summed gradients are divided by it.
            reduce: Whether gathered leaves' gradients are reduced now, rather than kept in full.
            last: Whether no other forward follows, so that tensors that were kept may be dropped.
        """
        check_derived_leaves(self._what, self._derived, self.trained)
        if last:
            for leaf in self._own:
                leaf.shared_from = None
        # Gradients of leaves that derived ones may have been computed from come behind the derived leaves' own.
        early = reduce and not self._derived
        self._backward = backward = Backward(self._forward, divisor=divisor, reduce_early=early, is_last=last)
        outputs = [out for out in (loss, *self._chain.tokens[1:]) if out.requires_grad]
        starts = [torch.ones_like(out) if out is loss else torch.zeros_like(out) for out in outputs]
        # Gradients come through derived leaves whether this rank uses them or not.
        used = find_used_leaves(loss, self.trained) if self._derived else set()
        used.update(leaf for leaf in self.trained if leaf.used)
        sources = [*self._chain.tokens[:1], ANY_CALL]
        # This graph may share nodes with the graph that computed the derived leaves.
        found = self._differentiate(outputs, starts, sources, retain_graph=bool(self._derived))
        own = [leaf for leaf, grad in zip(self.trained, found, strict=False) if grad is not None]
        check_direct_gradients(self._what, outputs, own, [*own, *self._derived] if self._tree else [])
        backward.finish()
        # Reduced gradients of derived leaves go on; again where they reach full tensors of other derived leaves.
        while pending := [
            (leaf.tensor, leaf.take_reduced()) for leaf in self._derived if leaf.reduced_grad is not None
        ]:
            tensors, grads = zip(*pending, strict=True)
            self._add_direct(self._differentiate(tensors, grads, [ANY_CALL], retain_graph=True), divisor)
            backward.reduce([leaf for leaf in self._derived if leaf.full_grad is not None])
        if reduce:
            # Leaves that were not reduced at their step, or used in earlier microbatches only.
            backward.reduce([leaf for leaf in reversed(self.trained) if leaf.must_reduce or leaf.full_grad is not None])
        # Behind all reductions, whichever of them have landed by now: their order depends on sizes of units.
        self._add_direct(found, divisor)
        backward.release()
        self._check_writes()
        for leaf in self.trained:
            if self._derived:
                leaf.used = leaf in used
            if leaf.tree_sum is not None:
                leaf.move_to_tree(leaf.tree_sum)
        self._forward.end()
        for leaf in self._by_tensor.values():
            leaf.first_gathered, leaf.shared_from = None, None if leaf.derived else leaf.shared_from

    def _differentiate(self, outputs: Any, starts: Any, sources: Sequence[torch.Tensor], retain_graph: bool) -> Grads:
        """Find the gradients of shards, and of other sources behind them."""
        sources = [*(leaf.tensor for leaf in self.trained), *sources]
        if not outputs:
            return [None] * len(sources)
        return torch.autograd.grad(outputs, sources, starts, allow_unused=True, retain_graph=retain_graph)

    def _add_direct(self, grads: Grads, divisor: Any) -> None:
        """Add gradients of maths on shards, which are this rank's own part of the sum."""
        for leaf, grad in zip(self.trained, grads, strict=False):
            if grad is not None:
                leaf.used = True
                leaf.add_reduced(divided(leaf.cast_for_sum(grad), divisor))

    def end(self) -> None:
        """Drop all that the call holds, so that memory is freed without the garbage collector."""
        self._forward.end()
        for release in self.at_end:
            release()
        for leaf in self._by_tensor.values():
            leaf.shared_from = leaf.first_gathered = None
        self.at_end, self._derived, self._computed, self._by_tensor = [], [], [], {}
        self._backward, self.ended = None, True
        del self._forward, self._chain


def _name(leaves: Sequence[Leaf]) -> str:
    return ", ".join([leaf.path for leaf in leaves])


def _facts(leaves: Mapping[str, Leaf]) -> tuple[LeafFacts, ...]:
    """Describe leaves by values."""
    return tuple([LeafFacts(name, leaf.spec, leaf.stored.element_size()) for name, leaf in leaves.items()])


def call_of(flat: Flat) -> Call | None:
    """Find the running call that leaves of a tree belong to; None where all leaves are the caller's own."""
    call: Call | None = _compat.thread_object(KEY)
    return call if call is not None and any(map(call.has, flat.leaves)) else None
