"""value_and_grad and accumulate: the loss and its sharded, reduced gradients in one call."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fshard import _compat, comm
from fshard.collectives import (
    REDUCTIONS,
    Over,
    check_agrees,
    check_not_reduced,
    closed,
    denominator,
    divided,
    named,
    reduction_axes,
    refuse_wrong_sums,
    shared_axes,
    total,
)
from fshard.engine import Call
from fshard.errors import expect
from fshard.microbatches import Share, check_batches, order_of, share_of, tree_total
from fshard.transforms.compose import in_tree
from fshard.transforms.state import ABSENT, joined, states_of
from fshard.tree import (
    Sharded,
    Tree,
    flatten,
    is_sharded,
    is_trained,
    like,
    tensor_of,
    tree_leaves,
    tree_map,
    unflatten,
)
from fshard.tree.checks import (
    check_differentiable,
    check_floating,
    check_local,
    check_loss,
    check_reduce,
    check_sums,
    describe,
    refuse_writes,
)


def value_and_grad(
    f: Callable[..., Any],
    *,
    reduce: str = "mean",
    reduce_over: Over = None,
    has_aux: bool = False,
    sums: str | None = None,
    transform_state: Tree = ABSENT,
) -> Callable[..., Any]:
    """Turn a local loss into a function of its objective and the gradients, sharded as the parameters are.

    `f` gets the sharded parameters and gathers where it needs them, by `model.apply` or `fs.gather`. It may compute
    leaves from shards and gathered tensors before, and gather those. A leaf that ranks hold whole must be gathered
    before the loss uses it, or passed to `fs.pvary`: both sum its gradient. The result is that of
    torch.func.grad_and_value(lambda p: fs.objective(f(fs.gather(p)), like=p))(params), except that gradients are
    summed before they are divided, as `scatter_grads` does; and units are gathered just in time, dropped
    and gathered again in the backward as their strategy says, and gradients are reduced as they appear. Under a
    torch.func transform, or where parameters are part of an outer graph, it is that very expression; of plain tensors
    alone, which say nothing of ranks, it is torch.func.grad_and_value on each rank by itself. Follows
    jax.value_and_grad.

    Every rank makes the same gathers and collectives in the same order; a rank that has no use for a unit of a model
    passes it over, except inside a checkpoint that other ranks compute again. Ranks that differ end with an error on
    all of them. `f` runs once.

    Args:
        f: Called as f(params, *args, **kwargs); returns this rank's scalar loss, or (sum, count) for "weighted". By
            several trees it is differentiated where `params` is a tuple of them.
        reduce: "mean" over ranks, "sum", or "weighted": sum of sums divided by the sum of counts,
            which is NaN where nobody counts anything; `skip_nonfinite` leaves such a step out.
        reduce_over: The mesh axes that batches are split over, as axes or names: losses are reduced over them. Losses
            must agree between ranks of every other axis, where each rank's graph has its part of the gradient, summed
            by `psum_invariant` or `broadcast` in the loss. None means the axes that the transforms of all leaves
            declare.
        has_aux: Whether f returns (loss, aux) instead; aux is any tree of tensors and stays this rank's own.
        sums: "tree" as for `accumulate`, with one microbatch on each rank; None adds up in the order of ranks.
        transform_state: The state of transforms that have one, such as state.transform_state of a TrainState. Where it
            is passed, even as None, the new state is returned too.

    Returns:
        A function of f's arguments. It returns (objective, grads), or ((objective, aux), grads): the objective is equal
        on every rank and has no graph, because the gradients are there already; grads have the parameters' structure,
        specs and dtypes, and None where a leaf is frozen, or where no rank's loss used it: `fs.update` leaves it as it
        is. Where another rank used it, this one counts as zeros. Under torch.func, unused leaves have zeros too. With
        `transform_state` the new state comes third.

    Raises:
        ValueError: by the function returned, if `reduce` is unknown or the loss does not fit it, a leaf that takes a
            gradient is not floating, leaves are plain among Sharded ones, a leaf's gradient is not complete over an
            axis of `reduce_over`, or would not be summed over ranks as it should, the loss differs between ranks of an
            axis that nothing is reduced over, ranks gather different units, `f` wrote to a parameter, or it runs in
            inference mode.
        RuntimeError: by the function returned, if another rank failed.

    >>> import torch, fshard as fs
    >>> params = fs.shard({"w": torch.tensor([1.0, 2.0])}, fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")))
    >>> loss, grads = fs.value_and_grad(lambda p, x: (x * fs.gather(p)["w"].square()).sum())(params, 10.0)
    >>> loss, grads["w"].local
    (tensor(50.), tensor([20., 40.]))
    """
    start = partial(_Job, "value_and_grad", reduce, reduce_over, has_aux, sums, transform_state)

    def run(params: Tree, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        value, (aux,), grads, *state = start([lambda tree: f(tree, *args, **kwargs)], params).run()
        objective = (value, aux) if has_aux else value
        return objective, grads, *state

    return comm.call(run, "value_and_grad")


Function = Callable[[Tree], Any]
Parts = tuple[torch.Tensor, Any, Any]
Found = tuple[torch.Tensor, Sequence[Any], list[Any]]


@dataclass
class _Job:
    """One differentiation of the objective of several local losses, by the engine or by the reference.

    Attributes:
        functions: Each maps parameters to this rank's loss of one microbatch.
        communicate: As for `accumulate`.
    """

    what: str
    reduce: str
    over: Over
    has_aux: bool
    sums: str | None
    transform_state: Tree
    functions: Sequence[Function]
    params: Tree
    communicate: str | None = None

    def __post_init__(self) -> None:
        """Check the parameters."""
        check_reduce(self.reduce, self.what)
        check_sums(self.what, self.sums)
        remedy = "shard the parameters on these axes alone"
        expect(not self.sums or self.over is None, self.what, 'reduce_over or sums="tree"', "both", remedy)
        self.flat = flatten(self.params)
        check_local(self.what, self.flat)
        self.axes = reduction_axes(self.flat, self.what, self.over)
        self.shared = shared_axes(self.flat, self.axes)
        check_floating(self.what, self.flat)
        check_differentiable(self.what)
        self.states = states_of(self.what, self.flat, self.transform_state)
        self.share: Share | None = None
        self.told: dict[str, Any] = {"reduce": self.reduce, **named(self.axes, self.over)}
        if self.communicate:
            self.told |= {"microbatches": len(self.functions), "communicate": self.communicate}
        if self.sums:
            self.told["sums"] = self.sums
            self.share = share_of(self.axes)
            self.share.check(self.what, len(self.functions))

    def run(self) -> tuple[Any, ...]:
        """Run the functions.

        Returns:
            The objective, each function's aux, the gradients, and the new state where one was passed.
        """
        tensors = tree_leaves(self.params)
        outer = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        # The result must be differentiable itself, or there is nothing to gather.
        by_torch = outer or not self.flat.specs or _compat.transforms_active() or _compat.any_dual(tensors)
        value, auxes, grads = self._reference() if by_torch else self._engine()
        check_agrees(value, self.flat, self.axes, self.what)
        pairs = zip(self.flat.leaves, grads, strict=True)
        wrapped = [Sharded(grad, leaf.spec) if is_sharded(leaf) and grad is not None else grad for leaf, grad in pairs]
        found = value, auxes, unflatten(self.flat.treedef, wrapped)
        if self.transform_state is ABSENT:
            return found
        return *found, joined(self.flat, self.states)

    def _local(self, function: Function, leaves: list[Any]) -> Parts:
        """Compute this rank's loss of one microbatch, with its count and aux."""
        before = REDUCTIONS.get()
        out = function(unflatten(self.flat.treedef, leaves))
        paired = not self.has_aux or (isinstance(out, tuple) and len(out) == 2)
        expect(paired, self.what, "f to return the pair (loss, aux) for has_aux=True", describe(out))
        loss, aux = out if self.has_aux else (out, None)
        check_loss(loss, self.reduce, self.what)
        value, count = loss if self.reduce == "weighted" else (loss, None)
        if REDUCTIONS.get() > before:
            check_not_reduced(value, self.axes, self.what)
        return value, count, aux

    def _divisor(self, counts: Sequence[Any]) -> Any:
        """Compute the divisor of sums over ranks and microbatches."""
        if self.reduce == "weighted":
            numbers = self._summed([count.detach().to(torch.float64) for count in counts])
            return self._total(denominator(numbers, self.axes, self.reduce))
        return denominator(None, self.axes, self.reduce) * (len(counts) if self.reduce == "mean" else 1)

    def _summed(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Add up numbers of this rank's microbatches, or put them into slots of one tree over all ranks."""
        return self.share.slots(values) if self.share else sum(values[1:], values[0])

    def _total(self, summed: torch.Tensor) -> torch.Tensor:
        """Finish the sum over ranks."""
        return tree_total(summed) if self.share else summed

    def _engine(self) -> Found:
        flat = self.flat
        if self.share:
            leaves = [leaf and Sharded(leaf.local, in_tree(leaf.spec, self.axes)) for leaf in flat.leaves]
            flat = flat._replace(leaves=leaves)
        call = Call(self.what, flat, self.shared, tree=bool(self.share), **self.told)
        several = bool(self.share) or len(self.functions) > 1
        for leaf, state in zip(call.leaves, self.states, strict=True):
            if leaf is not None:
                leaf.state = state
                leaf.accumulated = several
        with call.running():
            try:
                return self._run(call)
            finally:
                call.end()

    def _run(self, call: Call) -> Found:
        values, counts, auxes = [], [], []
        # With one microbatch each gradient can be divided as soon as it is reduced.
        single = len(self.functions) == 1 and not self.share
        for left, function in enumerate(self.functions, 1 - len(self.functions)):
            value, count, aux = call.forward(partial(self._local, function, call.bound))
            count, aux = tree_map(_detached, (count, aux))
            values.append(value.detach())
            counts.append(count)
            auxes.append(aux)
            now = self._divisor(counts) if single else 1
            last = not left
            call.backward(value, now, reduce=last or self.communicate != "once", last=last)
            del value
        later = 1 if single else self._divisor(counts)
        mine = {leaf.path: leaf.used for leaf in call.trained}
        value, used = closed(self._summed(values), mine, self.axes, self.shared)
        grads: list[Any] = [None] * len(call.leaves)
        for i, leaf in enumerate(call.leaves):
            if leaf is not None and used.get(leaf.path):
                grads[i] = leaf.take_grad(later)
                self.states[i] = leaf.state
        return divided(self._total(value), now if single else later), auxes, grads

    def _reference(self) -> Found:
        """Differentiate by torch.func; every unit is gathered when a function asks for it, and kept."""
        needed = 'no sums="tree" inside torch.func, nor of plain tensors'
        expect(not self.sums, self.what, needed, "it", "leave it out")
        comm.same_call(self.what, self.shared, self.flat, **self.told)
        trained = [i for i, leaf in enumerate(self.flat.leaves) if is_trained(leaf)]
        paths = [self.flat.paths[i] for i in trained]
        own = [tensor_of(self.flat.leaves[i]) for i in trained]
        rest: list[Tree] = []

        def loss_of(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
            leaves = list(self.flat.leaves)
            for i, tensor in zip(trained, tensors, strict=True):
                leaves[i] = like(leaves[i], tensor)
            parts = [self._local(function, leaves) for function in self.functions]
            # torch.func carries only tensors out of the transform; the rest of the tree goes by this list.
            rest.append(parts)
            carried = [leaf for leaf in tree_leaves(parts) if isinstance(leaf, torch.Tensor)]
            value = self._summed([value for value, *_ in parts])
            sharded = zip(paths, trained, tensors, strict=True)
            specs = [(path, self.flat.leaves[i].spec, tensor) for path, i, tensor in sharded if self.flat.specs]
            refuse_wrong_sums(self.what, value, specs)
            return value, carried

        with refuse_writes(self.what, paths, own), _compat.without_saved_tensor_hooks():
            found, (value, outputs) = torch.func.grad_and_value(loss_of, has_aux=True)(own)
        _, counts, auxes = zip(*_with_tensors(rest.pop(), outputs), strict=True)
        divisor = self._divisor(counts)
        grads = dict(zip(trained, [divided(grad, divisor) for grad in found], strict=True))
        by_leaf = [grads.get(i) for i in range(len(self.flat.leaves))]
        return divided(total(value, self.axes), divisor), auxes, by_leaf


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _with_tensors(tree: Tree, tensors: Sequence[torch.Tensor]) -> Tree:
    """Put tensors in the places of those of a tree."""
    left = iter(tensors)
    return tree_map(lambda leaf: next(left) if isinstance(leaf, torch.Tensor) else leaf, tree)


def accumulate(
    f: Callable[..., Any],
    *,
    reduce: str = "mean",
    reduce_over: Over = None,
    has_aux: bool = False,
    communicate: str | None = None,
    sums: str | None = None,
    transform_state: Tree = ABSENT,
) -> Callable[..., Any]:
    """Turn a local loss of one microbatch into a function of many: `value_and_grad` of their common objective.

    Activations of one microbatch are held at a time, but inside torch.func, and of plain tensors alone, those of all.
    The objective is the mean over microbatches and ranks, or with "weighted" the true mean over all items, however
    unequally they are spread. Gradients are added up in the dtype that they are reduced in, if it is wider than the
    dtype that they are computed in, or stored in.

    Args:
        f: Called as f(params, microbatch, *args, **kwargs); returns this rank's scalar loss, or (sum, count) for
            "weighted".
        reduce: As for `value_and_grad`; "mean" and "sum" are over microbatches too.
        reduce_over: As for `value_and_grad`.
        has_aux: Whether f returns (loss, aux) instead.
        communicate: "each" reduces gradients in every microbatch and sums shards of them, which needs least memory;
            "once" sums full gradients and reduces them in the last one, which sends least. None leaves it to the
            strategy: once for ZeRO-1, else each. With `sums` each is.
        sums: "tree" adds up gradients, losses and counts in one binary tree over the microbatches of the whole job,
            so that they have the same bits on any number of ranks. Each rank passes what `fs.microbatches` chooses of
            the job's, of which there are a power of two, as there are ranks; forward and backward must have bits that
            depend on the microbatch alone. None adds up in turn.
        transform_state: As for `value_and_grad`; it goes from microbatch to microbatch where each is reduced.

    Returns:
        A function of (params, microbatches, *args, **kwargs), where microbatches is a sequence, as long on every rank.
        It returns (objective, grads), or ((objective, auxes), grads) with a list of every microbatch's aux; with
        `transform_state` the new state comes third. A leaf that was used in any microbatch has a gradient.

    Raises:
        ValueError: by the function returned, if `communicate` or `sums` is unknown, there are no microbatches, with
            sums="tree" no power of two of them or of ranks, a transform has other bits at another number of ranks, f
            computes on shards, and as for `value_and_grad`.

    >>> import torch, fshard as fs
    >>> params = fs.shard({"w": torch.tensor([1.0, 2.0])}, fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")))
    >>> loss, grads = fs.accumulate(lambda p, x: (x * fs.gather(p)["w"].square()).sum())(params, [10.0, 30.0])
    >>> loss, grads["w"].local
    (tensor(100.), tensor([40., 80.]))
    """
    start = partial(_Job, "accumulate", reduce, reduce_over, has_aux, sums, transform_state)

    def run(params: Tree, microbatches: Sequence[Any], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        check_batches("accumulate", microbatches)
        functions = [lambda tree, batch=batch: f(tree, batch, *args, **kwargs) for batch in microbatches]
        order = order_of("accumulate", params, communicate, sums)
        value, auxes, grads, *state = start(functions, params, communicate=order).run()
        objective = (value, auxes) if has_aux else value
        return objective, grads, *state

    return comm.call(run, "accumulate")
