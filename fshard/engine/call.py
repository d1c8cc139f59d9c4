"""Engine calls: one run of `value_and_grad` or of a model, from binding its leaves to the end of its backward."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from fshard import _compat, comm
from fshard.collectives import divide, record_on_tape
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
)
from fshard.engine.leaf import Leaf
from fshard.engine.microbatch import Microbatch
from fshard.engine.model_walk import ModelWalk
from fshard.engine.plan import LeafFacts, ModuleUnit, make_plan, make_unit
from fshard.engine.saved import SavedTensorHooks
from fshard.engine.started import Started, take_over
from fshard.tree import Axis, Flat, Sharded, is_sharded
from fshard.tree.checks import check_dense, check_versions

# The thread-local key under which `find_call` finds the running call, also when autograd recomputes a checkpoint.
KEY = "fshard call"


class EngineCall:
    """Binds leaves for a function, gathers units when the function asks for them, and collects gradients.

    A call runs `forward` and then `backward` for each microbatch, and `end` when all of them are done.

    Attributes:
        bound: The parameters that the function receives.
        leaves: For each parameter the leaf that owns its gradient; None for parameters that are not Sharded.
        trained: The leaves that take a gradient.
        at_end: Functions to run when the call ends.
        microbatches_begun: How many microbatches have begun.
    """

    def __init__(
        self,
        api_name: str,
        flat: Flat,
        axes: Sequence[Axis],
        *,
        trains: bool = True,
        **compared: Any,
    ) -> None:
        """Bind parameters, and check that every rank starts the same call.

        Args:
            api_name: The public function that runs, for errors.
            flat: The parameters.
            axes: The mesh axes that the parameters live on.
            trains: Whether anything is differentiated.
            **compared: Other arguments that must be equal on every rank, because they decide what is sent or what sums
                mean.
        """
        # An error here goes with the message that begins the call.
        started = {index: take_over(leaf) for index, leaf in enumerate(flat.leaves) if isinstance(leaf, Started)}
        comm.check_same_call(api_name, axes, flat, **compared)
        self.bound = list(flat.leaves)
        self.leaves: list[Leaf | None] = [None] * len(self.bound)
        for index, (path, param) in enumerate(flat.named_leaves):
            if is_sharded(param):
                tensor = param.local.detach().requires_grad_(trains and not param.spec.frozen)
                bound = Sharded(tensor, param.spec)
                self.bound[index] = bound
                leaf = Leaf(path, bound, param.local, has_backward=trains)
                leaf.started = started.get(index)
                self.leaves[index] = leaf
        self._sharded_leaves = [leaf for leaf in self.leaves if leaf is not None]
        self.trained = [leaf for leaf in self._sharded_leaves if leaf.trained]
        self.at_end: list[Callable[[], None]] = []
        self.microbatches_begun = 0
        self._api_name = api_name
        self._trains = trains
        self._stored = [leaf.stored for leaf in self._sharded_leaves]
        self._stored_versions = _compat.versions(self._stored)
        # From the first forward to the end of the call.
        self._microbatch: Microbatch | None = None
        # The call whose function makes this one.
        self._outer: EngineCall | None = _compat.thread_object(KEY)

    def make_current(self) -> AbstractContextManager[None]:
        """Make the context in which `find_call` finds this call."""
        return _compat.keeping_thread_object(KEY, self)

    def has_any(self, params: Sequence[Any]) -> bool:
        """Return whether this call bound one of some parameters, or its function computed one from those it bound."""
        return self._microbatch is not None and any(map(self._microbatch.has, params))

    def has_all(self, flat: Flat) -> bool:
        """Return whether a tree has the very leaves that this call bound, each with its tensor and all elements."""
        tensors = [leaf.tensor for leaf in self._sharded_leaves]
        are_bound = list(map(id, flat.leaves + flat.tensors)) == list(map(id, self.bound + tensors))
        # A tensor that was donated itself is empty.
        return are_bound and list(map(torch.Tensor.numel, tensors)) == list(map(torch.Tensor.numel, self._stored))

    @property
    def is_recomputing(self) -> bool:
        """Whether the function has returned, so that only a checkpoint runs parts of it again."""
        return self._running_microbatch().forward.is_over

    def begin_walk(self, units: Sequence[ModuleUnit], params: Mapping[str, Any]) -> ModelWalk:
        """Begin to apply a model. This may make derived leaves.

        Args:
            units: The units of the model.
            params: The parameters of the model, by name.

        Returns:
            The walk along the model's units.
        """
        microbatch = self._running_microbatch()
        leaves = {}
        for name, param in params.items():
            if is_sharded(param):
                leaves[name] = microbatch.get_or_derive_leaf(f"[{name!r}]", param)
        if not microbatch.forward.is_over:
            microbatch.forward.end_function_scope()
        specs = [leaf.spec for leaf in leaves.values()]
        sizes = [leaf.stored.itemsize for leaf in leaves.values()]
        plan = make_plan(tuple(units), tuple(leaves), tuple(specs), tuple(sizes))
        return ModelWalk(microbatch.forward, plan, leaves, self._prepare_recompute)

    def gather(self, paths: Sequence[str], params: Sequence[Sharded]) -> list[torch.Tensor]:
        """Gather the parameters that a function asks for by `fs.gather`, as one unit."""
        microbatch = self._running_microbatch()
        leaves = [microbatch.get_or_derive_leaf(path, param) for path, param in zip(paths, params, strict=True)]
        unique_leaves = list(dict.fromkeys(leaves))
        if microbatch.forward.is_over:
            gathered = self._prepare_recompute(unique_leaves)
        else:
            facts = [LeafFacts(leaf.path, leaf.spec, leaf.stored.itemsize) for leaf in unique_leaves]
            unit = make_unit(_join_paths(unique_leaves), tuple(facts))
            gathered = GatheredUnit(unit, unique_leaves)
            microbatch.forward.open_function_gather(gathered)
        outputs = [self.get_output(gathered, leaf) for leaf in leaves]
        # From here on the function holds the outputs. The unit would keep them alive for longer.
        gathered.outputs = {}
        return outputs

    def _prepare_recompute(self, leaves: Sequence[Leaf]) -> GatheredUnit:
        """Return the gathered unit with which a checkpoint recomputes some leaves. This may communicate."""
        backward = self._running_backward()
        gathered = None if backward is None else backward.prepare_recompute(leaves)
        if gathered is None:
            raise self._make_recompute_error(leaves)
        return gathered

    def _make_recompute_error(self, leaves: Sequence[Leaf]) -> ValueError:
        """Make the error of a checkpoint that gathers what its forward did not gather."""
        # A leaf that the checkpoint computes is another one each time.
        computed = [leaf for leaf in leaves if leaf.derived and not leaf.gathered_units]
        if computed:
            return ValueError(
                f"{self._api_name}: {_join_paths(computed)} is computed inside a checkpoint, so the backward cannot "
                "gather it again. Compute it outside of the checkpoint."
            )
        together = " together" if len(leaves) > 1 else ""
        return ValueError(
            f"{self._api_name}: a checkpoint gathers {_join_paths(leaves)}{together} when it is recomputed, but did "
            "not in its forward. Make the checkpointed function gather the same leaves each time."
        )

    def get_output(self, gathered: GatheredUnit, leaf: Leaf) -> torch.Tensor:
        """Return the tensor that the function receives for one leaf of an open unit."""
        if leaf.trained:
            output = gathered.outputs.get(leaf)
            is_recorded = torch.is_grad_enabled()
            if output is None or not is_recorded:
                self._refuse_reentrant_checkpoint(leaf)
            if output is None and is_recorded:
                gathered.outputs = deliver(self._receive, gathered)
                output = gathered.outputs[leaf]
            if output is not None:
                return output
        return gathered.wait()[leaf].detach()

    def _refuse_reentrant_checkpoint(self, leaf: Leaf) -> None:
        """Refuse to read a leaf in the forward of a reentrant checkpoint.

        Such a checkpoint runs its forward without autograd, and then a backward of its own inside the backward, where
        the engine would lose the gradient.
        """
        if self._running_microbatch().forward.is_over or not _compat.in_reentrant_checkpoint():
            return
        raise ValueError(
            f"{self._api_name}: {leaf.path} is read inside a reentrant checkpoint, which would lose its gradient. Pass "
            "use_reentrant=False to torch.utils.checkpoint.checkpoint."
        )

    def _running_microbatch(self) -> Microbatch:
        assert self._microbatch is not None
        return self._microbatch

    def _running_backward(self) -> Backward | None:
        return None if self._microbatch is None else self._microbatch.backward

    def _fetch(self, gathered: GatheredUnit, leaf: Leaf) -> torch.Tensor:
        """Return the full tensor for which autograd saved a handle."""
        if self._microbatch is None:
            raise self._make_outlived_graph_error([leaf])
        self._catch_up()
        return gathered.wait()[leaf]

    def _receive(self, gathered: GatheredUnit, grads: Grads) -> None:
        """Take the gradients of a unit's outputs."""
        backward = self._running_backward()
        if backward is None:
            pairs = zip(gathered.trained, grads, strict=True)
            raise self._make_outlived_graph_error([leaf for leaf, grad in pairs if grad is not None])
        check_dense(self._api_name, [leaf.path for leaf in gathered.trained], grads)
        backward.receive(gathered, grads)

    def _make_outlived_graph_error(self, leaves: Sequence[Leaf]) -> ValueError:
        """Make the error of a backward that reaches leaves of this call, which has ended."""
        running: EngineCall | None = _compat.thread_object(KEY)
        api_name = self._api_name if running is None else running._api_name
        return ValueError(
            f"{api_name}: the loss uses full tensors of {_join_paths(leaves)} from an earlier call, which no longer "
            "receive gradients. Gather inside each call, or use full.detach() for a constant."
        )

    def _catch_up(self) -> None:
        """Take the steps that the backward has passed, if one is running."""
        backward = self._running_backward()
        if backward is not None:
            backward.catch_up()

    def _check_writes(self) -> None:
        """Refuse in-place writes to parameters since the call began."""
        paths = (leaf.path for leaf in self._sharded_leaves)
        check_versions(self._api_name, paths, self._stored, self._stored_versions)

    def forward(self, f: Callable[[], Any]) -> Any:
        """Run the function.

        Args:
            f: The function.

        Returns:
            Its result.

        Raises:
            ValueError: if the function wrote to a parameter.
            RuntimeError: from torch, if the function calls torch.func where tensors are gathered again.
        """
        forward = Forward(self._api_name, self._trains, SavedTensorHooks(self._api_name, self._fetch))
        microbatch = Microbatch(forward, self._sharded_leaves, self._catch_up)
        self._microbatch = microbatch
        self.microbatches_begun += 1
        with ExitStack() as contexts:
            if self._trains:
                contexts.callback(forward.saved_hooks.remove)
                contexts.enter_context(record_on_tape(microbatch.tape))
                contexts.enter_context(torch.enable_grad())
            out = f()
        self._check_writes()
        forward.finish()
        return out

    def backward(self, loss: torch.Tensor, divisor: Any, *, reduce: bool, defers_outer: bool, last: bool) -> None:
        """Differentiate the loss of the last forward, and add its gradients to the leaves.

        Gradients reach a leaf in three ways: through full tensors, whose gradients are reduced over ranks; through
        derived leaves, whose reduced gradients are differentiated further; and directly, from math on shards. The order
        of additions follows from the program alone, never from timing, so that results have the same bits every time.

        Args:
            loss: This rank's loss, a scalar attached to the graph.
            divisor: The number that summed gradients are divided by.
            reduce: Whether to reduce gradients over ranks now, rather than keep this rank's full gradients.
            defers_outer: Whether to leave the sum over the outermost of several axes to the last microbatch.
            last: Whether this is the last microbatch, so that tensors kept from one to the next can be dropped.
        """
        microbatch = self._running_microbatch()
        self._refuse_lost_gradients(loss)
        used: set[Leaf] = set()
        if microbatch.derived:
            check_derived_leaves(self._api_name, microbatch.derived, self.trained)
            used = {leaf for leaf in self.trained if leaf.used}
            # A derived leaf passes gradients on whether this rank uses it or not. Only the graph tells.
            used |= find_used_leaves(loss, self.trained)
        if last:
            for leaf in self._sharded_leaves:
                leaf.shared_from = None
        backward = Backward(
            microbatch.forward,
            divisor=divisor,
            # With derived leaves, hold reductions back: the gradients of the leaves that they were computed from arrive
            # after their own.
            reduce_early=reduce and not microbatch.derived,
            defers_outer=defers_outer,
            is_last=last,
        )
        microbatch.backward = backward

        direct_grads = self._differentiate_loss(loss, microbatch)
        backward.finish()
        self._reduce_derived(backward, microbatch.derived, divisor)
        if reduce:
            # The leaves that were not reduced at their step, and those that only earlier microbatches used.
            late = []
            for leaf in self.trained:
                is_deferred = last and leaf.inner_sum is not None
                if leaf.must_reduce or leaf.full_grad is not None or is_deferred:
                    late.append(leaf)
            backward.reduce(late[::-1])
        # Add direct gradients after all reductions. Which reductions have finished before this point depends on the
        # sizes of units, and so would the order of additions.
        self._add_direct(direct_grads, divisor)
        backward.release()

        self._check_writes()
        if microbatch.derived:
            for leaf in self.trained:
                leaf.used = leaf in used
        microbatch.drop_references(keep_shared=not last)

    def _refuse_lost_gradients(self, loss: torch.Tensor) -> None:
        """Refuse a loss that depends on leaves of a call around this one, which returns its gradients as constants."""
        outer = self._outer
        while outer is not None:
            used = find_used_leaves(loss, outer.trained)
            lost = [leaf for leaf in outer.trained if leaf in used]
            if lost:
                raise ValueError(
                    f"{self._api_name}: the loss depends on {_join_paths(lost)}, by which the call around this one "
                    "differentiates, and that gradient would be lost. Pass both trees, as in "
                    "value_and_grad(f)((params, others)), or use full.detach() for a constant."
                )
            outer = outer._outer

    def _differentiate_loss(self, loss: torch.Tensor, microbatch: Microbatch) -> Grads:
        """Run autograd from the loss. Gradients of full tensors arrive at `_receive`.

        Returns:
            The gradients of math on shards, one for each trained leaf, and those of other sources after them.
        """
        tokens = microbatch.tape.tokens
        outputs = [out for out in (loss, *tokens[1:]) if out.requires_grad]
        cotangents = []
        for out in outputs:
            # Tokens carry no value; they make autograd run the transposes of collectives. The first one is a source.
            cotangents.append(torch.ones_like(out) if out is loss else torch.zeros_like(out))
        # The graph that computed the derived leaves may share nodes with this one, and is differentiated later.
        retain_graph = bool(microbatch.derived)
        grads = self._differentiate(outputs, cotangents, [*tokens[:1], ANY_CALL], retain_graph)

        direct = [leaf for leaf, grad in zip(self.trained, grads, strict=False) if grad is not None]
        if direct or microbatch.derived:
            check_direct_gradients(self._api_name, outputs, self._sharded_leaves, direct, microbatch.derived)
        return grads

    def _reduce_derived(self, backward: Backward, derived: Sequence[Leaf], divisor: Any) -> None:
        """Differentiate the reduced gradients of derived leaves further, down to the leaves that the call bound.

        A derived leaf may be computed from the full tensor of another one, so this repeats until none has a gradient.
        """
        while True:
            pending = [leaf for leaf in derived if leaf.reduced_grad is not None]
            if not pending:
                return
            tensors = [leaf.tensor for leaf in pending]
            reduced = [leaf.take_reduced() for leaf in pending]
            grads = self._differentiate(tensors, reduced, [ANY_CALL], retain_graph=True)
            self._add_direct(grads, divisor)
            backward.reduce([leaf for leaf in derived if leaf.full_grad is not None])

    def _differentiate(
        self,
        outputs: Sequence[torch.Tensor],
        cotangents: Grads,
        other_sources: Sequence[torch.Tensor],
        retain_graph: bool,
    ) -> Grads:
        """Return the gradients of the trained leaves' shards, and those of other sources after them."""
        sources = [leaf.tensor for leaf in self.trained]
        sources += other_sources
        if not outputs:
            return [None] * len(sources)
        return torch.autograd.grad(outputs, sources, cotangents, allow_unused=True, retain_graph=retain_graph)

    def _add_direct(self, grads: Grads, divisor: Any) -> None:
        """Add the gradients of math on shards, which are already this rank's share of the sum."""
        for leaf, grad in zip(self.trained, grads, strict=False):
            if grad is not None:
                leaf.used = True
                leaf.add_reduced(divide(leaf.cast_for_sum(grad), divisor))

    def end(self) -> None:
        """Drop every reference to what the call used, so that memory is freed without the garbage collector.

        A graph that outlives the call may hold the call's hooks through C++, and the collector cannot see such a cycle.
        """
        if self._microbatch is not None:
            self._microbatch.drop_references(keep_shared=False)
        for release in self.at_end:
            release()
        self.at_end = []
        self._microbatch = None


def _join_paths(leaves: Sequence[Leaf]) -> str:
    return ", ".join([leaf.path for leaf in leaves])


def find_call(flat: Flat) -> EngineCall | None:
    """Return the running call that bound a leaf of a tree; None if no call runs or all leaves are the caller's own."""
    call: EngineCall | None = _compat.thread_object(KEY)
    return call if call is not None and call.has_any(flat.leaves) else None
