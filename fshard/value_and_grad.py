"""value_and_grad and accumulate: the loss and its sharded, reduced gradients in one call."""

import functools
import json
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fshard import _compat, comm
from fshard.collectives import (
    Over,
    check_agrees,
    check_not_reduced,
    closed,
    denominator,
    divided,
    named,
    reduction_axes,
    reductions,
    shared_axes,
    total,
)
from fshard.engine import Call
from fshard.errors import Problem, expect, refuse
from fshard.microbatches import Share, check_batches, own_share, place_of, reduces_early, tree_total
from fshard.transforms.base import LayoutError
from fshard.transforms.compose import sum_dtype
from fshard.transforms.state import ABSENT, Absent, joined, states_of
from fshard.transforms.tree_sums import in_tree
from fshard.tree import (
    Flat,
    Sharded,
    Tree,
    flatten,
    is_sharded,
    is_trained,
    like,
    map_leaves,
    tensor_of,
    tree_leaves,
    tree_map,
    unflatten,
)
from fshard.tree.checks import (
    check_differentiable,
    check_flags,
    check_floating,
    check_function,
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
    argnums: int | Sequence[int] = 0,
    reduce: str = "mean",
    reduce_over: Over = None,
    has_aux: bool = False,
    sums: str | None = None,
    transform_state: Tree | Absent = ABSENT,
) -> Callable[..., Any]:
    """Turn a local loss into a function of its objective and the gradients, sharded as the parameters are.

    `f` gets the sharded parameters and gathers where it needs them, by `model.apply` or `fs.gather`. It may compute on
    shards before; it must gather a leaf that ranks hold whole, or pass it to `fs.pvary`: both sum its gradient. The
    result is that of torch.func.grad_and_value(lambda p: fs.objective(f(fs.gather(p)), like=p))(params), except that
    gradients are summed before they are divided, as `scatter_grads` does; and units are gathered just in time, dropped
    and gathered again in the backward as their strategy says, and gradients are reduced as they appear. Under a
    torch.func transform, or where parameters are part of an outer graph, it is that very expression; of plain tensors
    alone, which say nothing of ranks, it is torch.func.grad_and_value on each rank by itself. Follows
    jax.value_and_grad.

    Every rank makes the same gathers and collectives in the same order; a rank that has no use for a unit of a model
    passes it over. Ranks that differ end with an error on all of them. `f` runs once.

    Args:
        f: Called with all arguments; returns this rank's scalar loss, or (sum, count) for "weighted".
        argnums: Which arguments are parameters, or inputs; with several, gradients come as a tuple. Inputs are
            arguments of plain tensors beside others of Sharded leaves: their gradients are those of the objective by
            what this rank itself passed.
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
        ValueError: if `reduce` is unknown; by the function returned, if the loss does not fit it, a leaf that takes a
            gradient is not floating, leaves are plain among Sharded ones, a leaf's gradient is not complete over an
            axis of `reduce_over`, the loss differs between ranks of an axis that nothing is reduced over, ranks gather
            different units, `f` wrote to a parameter, or it runs in inference mode.
        RuntimeError: by the function returned, if another rank failed.

    >>> import torch, fshard as fs
    >>> params = fs.shard({"w": torch.tensor([1.0, 2.0])}, fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")))
    >>> loss, grads = fs.value_and_grad(lambda p, x: (x * fs.gather(p)["w"].square()).sum())(params, 10.0)
    >>> loss, grads["w"].local
    (tensor(50.), tensor([20., 40.]))
    """
    _check("value_and_grad", f, reduce, reduce_over, sums, has_aux=has_aux)
    options = _Options(reduce, reduce_over, has_aux, transform_state)
    single = isinstance(argnums, int)
    places = _places(argnums)

    def run(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        found = f"{argnums!r} of {len(args)} arguments by position"
        fits = all(-len(args) <= place < len(args) for place in places)
        distinct = fits and len({place % len(args) for place in places}) == len(places)
        expect(distinct, "value_and_grad", f"argnums to be {EACH_ONCE}", found)
        inputs = _inputs(places, args)
        trained = [place for place in places if place not in inputs]
        params = args[trained[0]] if single else tuple(args[place] for place in trained)

        def with_params(tree: Tree, given: Tree) -> Any:
            arguments = list(args)
            for place, part in (*zip(trained, (tree,) if single else tree, strict=True), *given.items()):
                arguments[place] = part
            return f(*arguments, **kwargs)

        share = own_share("value_and_grad", params, None, 1) if sums else None
        job = _Job("value_and_grad", [with_params], params, inputs, options, share=share)
        value, (aux,), grads, given, *rest = job.differentiate()
        if inputs:
            by_place = {**dict(zip(trained, grads, strict=True)), **given}
            grads = tuple(by_place[place] for place in places)
        return (value, aux) if has_aux else value, grads, *rest

    return comm.call(run, "value_and_grad")


def _inputs(places: Sequence[int], args: Sequence[Any]) -> dict[int, Tree]:
    """Find the arguments without Sharded leaves, by place; none if no argument has Sharded leaves."""
    plain = {place: args[place] for place in places if not any(map(is_sharded, flatten(args[place]).leaves))}
    return plain if len(plain) < len(places) else {}


EACH_ONCE = "a number or several, each once"


def _places(argnums: Any) -> tuple[int, ...]:
    """Make a tuple of the argument numbers."""
    places = tuple(argnums) if isinstance(argnums, list | tuple) else (argnums,)
    if not places or not all(isinstance(place, int) for place in places) or len(set(places)) < len(places):
        raise ValueError(f"value_and_grad: expected argnums to be {EACH_ONCE}, got {argnums!r}")
    return places


class _Options(NamedTuple):
    """What both verbs take, as `value_and_grad` does."""

    reduce: str
    over: Over
    has_aux: bool
    transform_state: Tree | Absent


def _check(what: str, f: Any, reduce: str, over: Over, sums: str | None, **flags: Any) -> None:
    """Refuse arguments that neither verb takes."""
    check_function(what, f)
    check_reduce(reduce, what)
    check_sums(what, sums)
    check_flags(what, **flags)
    remedy = "shard the parameters on these axes alone"
    expect(sums is None or over is None, what, 'reduce_over or sums="tree"', "both", remedy)


Parts = tuple[torch.Tensor, Any, Any]
Found = tuple[torch.Tensor, list[Any], list[Any], list[Any]]


class _Job:
    """One differentiation of the objective of several local losses, by the engine or by the reference."""

    def __init__(
        self, what: str, functions: Sequence[Callable[[Tree, Tree], Any]], params: Tree, inputs: Tree,
        options: _Options, once: bool = False, share: Share | None = None,
    ) -> None:  # fmt: skip
        """Check the parameters.

        Args:
            what: The verb that runs, for errors.
            functions: Each maps parameters and inputs to this rank's loss of one microbatch.
            params: The parameters.
            inputs: Plain tensors, to differentiate by too; none with several functions.
            options: The verb's arguments.
            once: Whether full gradients are summed over microbatches before they are reduced.
            share: The microbatches of this rank, if sums are one tree over the microbatches of all ranks.
        """
        self.what, self.functions, self.options, self.once, self.share = what, functions, options, once, share
        self.whole, self.inputs = flatten(params), flatten(inputs)
        check_local(what, self.whole)
        self.axes = reduction_axes(self.whole, what, options.over)
        self.shared = shared_axes(self.whole, self.axes)
        for each in (self.whole, self.inputs):
            check_floating(what, each)
            check_differentiable(what, each)
        self.states = states_of(what, self.whole, options.transform_state)
        self.flat = self.whole if share is None else _in_tree(what, self.whole)
        number = len(functions) if share is None else share.total
        told = {"microbatches": number, "communicate": "once" if once else "each"} if what == "accumulate" else {}
        tree = {} if share is None else {"sums": "tree"}
        self.told = {"reduce": options.reduce, **named(self.axes, options.over), **told, **tree}

    def differentiate(self) -> tuple[Any, ...]:
        """Run the functions.

        Returns:
            The objective, each function's aux, the gradients of parameters and of inputs, and the new state where one
            was passed.
        """
        if self.share is not None and _compat.is_tracing():
            comm.ops.told(json.dumps({"sums": "tree"}))
        value, auxes, grads, by_inputs = self._reference() if self._is_outer() else self._engine()
        check_agrees(value, self.flat, self.axes, self.what)
        wrapped = [
            Sharded(grad, leaf.spec) if is_sharded(leaf) and grad is not None else grad
            for grad, leaf in zip(grads, self.whole.leaves, strict=True)
        ]
        given = iter(by_inputs)
        inputs = [None if leaf is None else next(given) for leaf in self.inputs.leaves]
        found = value, auxes, unflatten(self.flat.treedef, wrapped), unflatten(self.inputs.treedef, inputs)
        state = self.options.transform_state
        return found if state is ABSENT else (*found, joined(self.whole, self.states, state))

    def _is_outer(self) -> bool:
        """Whether the result must be differentiable itself, or there is nothing to gather."""
        sharded = [leaf.local for leaf in self.flat.leaves if is_sharded(leaf)]
        tensors = [*sharded, *self._inputs()]
        outer = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        return not sharded or outer or _compat.transforms_active() or _compat.any_dual(tensors)

    def _inputs(self) -> list[torch.Tensor]:
        return [leaf for leaf in self.inputs.leaves if leaf is not None]

    def _local(self, function: Callable[[Tree, Tree], Any], leaves: list[Any], inputs: Sequence[Any]) -> Parts:
        """Compute this rank's loss of one microbatch, with its count and aux."""
        before, given, reduce = reductions(), iter(inputs), self.options.reduce
        inputs = [None if leaf is None else next(given) for leaf in self.inputs.leaves]
        out = function(unflatten(self.flat.treedef, leaves), unflatten(self.inputs.treedef, inputs))
        paired = not self.options.has_aux or (isinstance(out, tuple) and len(out) == 2)
        expect(paired, self.what, "f to return the pair (loss, aux) for has_aux=True", describe(out))
        loss, aux = out if self.options.has_aux else (out, None)
        check_loss(loss, reduce, self.what)
        value, count = loss if reduce == "weighted" else (loss, None)
        if reductions() > before:
            check_not_reduced(value, self.axes, self.what)
        return value, count, aux

    def _divisor(self, counts: list[Any]) -> Any:
        """Compute the divisor of sums over ranks and microbatches."""
        reduce = self.options.reduce
        if reduce == "weighted":
            numbers = self._summed([count.detach().to(torch.float64) for count in counts])
            return self._total(denominator(numbers, self.axes, reduce))
        number = len(self.functions) if self.share is None else self.share.total // self.share.ranks
        return denominator(None, self.axes, reduce) * (number if reduce == "mean" else 1)

    def _summed(self, values: list[torch.Tensor]) -> torch.Tensor:
        """Add up numbers of this rank's microbatches, or put them into slots of one tree over all ranks."""
        return functools.reduce(operator.add, values) if self.share is None else self.share.slots(values)

    def _total(self, summed: torch.Tensor) -> torch.Tensor:
        """Finish the sum over ranks."""
        return summed if self.share is None else tree_total(summed)

    def _engine(self) -> Found:
        inputs = [leaf.detach().requires_grad_() for leaf in self._inputs()]
        call = Call(self.what, self.flat, self.shared, inputs=inputs, share=self.share, **self.told)
        for leaf, state in zip(call.leaves, self.states, strict=True):
            if leaf is not None:
                leaf.state, leaf.accumulated = state, len(self.functions) > 1 or self.share is not None
        with call.running():
            try:
                return self._run(call, inputs)
            finally:
                call.end()

    def _run(self, call: Call, inputs: list[torch.Tensor]) -> Found:
        values, counts, auxes = [], [], []
        by_inputs: list[torch.Tensor] = []
        single = len(self.functions) == 1 and self.share is None
        divisor: Any = 1
        for i, function in enumerate(self.functions):

            def run(function: Callable[[Tree, Tree], Any] = function) -> Parts:
                return self._local(function, call.bound, inputs)

            value, count, aux = call.forward(run)
            count, aux = map_leaves(_unbound, (count, aux))
            # With one microbatch each gradient can be divided as soon as it is reduced.
            divisor = self._divisor([count]) if single else 1
            last = i == len(self.functions) - 1
            by_inputs = call.backward(value, divisor, reduce=last or not self.once, last=last)
            values.append(value.detach())
            counts.append(count)
            auxes.append(aux)
            del value
        paths, mine = [leaf.path for leaf in call.trained], [leaf.used for leaf in call.trained]
        others = [axis for axis in self.shared if axis not in self.axes]
        rest = 1 if single else self._divisor(counts)
        value, used = closed(self._summed(values), paths, mine, self.axes, others)
        wanted = {leaf for leaf, yes in zip(call.trained, used, strict=True) if yes}
        grads = [leaf.take_grad(rest) if leaf in wanted else None for leaf in call.leaves]
        self.states = [
            leaf.state if leaf in wanted else old for leaf, old in zip(call.leaves, self.states, strict=True)
        ]
        divisor = divisor if single else rest
        return divided(self._total(value), divisor), auxes, grads, [divided(grad, divisor) for grad in by_inputs]

    def _reference(self) -> Found:
        """Differentiate by torch.func; every unit is gathered when a function asks for it, and kept."""
        remedy = "differentiate at gathered parameters, and call fs.scatter_grads outside of it"
        stateless = all(state is None for state in self.states)
        expect(stateless, self.what, "no state of transforms inside torch.func", "one", remedy)
        needed = 'no sums="tree" inside torch.func, nor of plain tensors'
        expect(self.share is None, self.what, needed, "it", "leave it out")
        comm.same_call(self.what, self.shared, self.flat, **self.told)
        trained = [i for i, leaf in enumerate(self.flat.leaves) if is_trained(leaf)]
        own = [tensor_of(self.flat.leaves[i]) for i in trained]
        values, counts, auxes = [], [], []
        sums: list[torch.Tensor] = []
        for function in self.functions:
            parts: list[Tree] = []
            loss_of = functools.partial(self._loss_of, function, trained, parts)
            unwritten = refuse_writes(self.what, [self.flat.paths[i] for i in trained], own)
            with unwritten, _compat.without_saved_tensor_hooks():
                found, (value, outputs) = torch.func.grad_and_value(loss_of, has_aux=True)([*own, *self._inputs()])
            carried = iter(outputs)
            count, aux = tree_map(lambda x: next(carried) if isinstance(x, torch.Tensor) else x, parts.pop())  # noqa: B023
            wide = [self._wide(i, grad) for i, grad in zip(trained, sums, strict=False)]
            sums = [a + b for a, b in zip(wide, found, strict=False)] if sums else list(found[: len(trained)])
            values.append(value)
            counts.append(count)
            auxes.append(aux)
        divisor = self._divisor(counts)
        grads: list[Any] = [None] * len(self.flat.leaves)
        for i, grad, tensor in zip(trained, sums, own, strict=True):
            grads[i] = divided(grad, divisor).to(tensor.dtype)
        by_inputs = [divided(grad, divisor) for grad in found[len(trained) :]]
        return divided(total(self._summed(values), self.axes), divisor), auxes, grads, by_inputs

    def _wide(self, i: int, grad: torch.Tensor) -> torch.Tensor:
        leaf = self.flat.leaves[i]
        return grad.to(sum_dtype(leaf.spec, grad.dtype)) if is_sharded(leaf) else grad

    def _loss_of(
        self, function: Callable[[Tree, Tree], Any], trained: list[int], parts: list[Tree], tensors: list[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        leaves = list(self.flat.leaves)
        for i, tensor in zip(trained, tensors, strict=False):
            leaves[i] = like(leaves[i], tensor)
        value, count, aux = self._local(function, leaves, tensors[len(trained) :])
        # torch.func carries only tensors out of the transform; the rest of the tree goes by this list.
        parts.append((count, aux))
        return value, [leaf for leaf in tree_leaves((count, aux)) if isinstance(leaf, torch.Tensor)]


def _in_tree(what: str, flat: Flat) -> Flat:
    """Let leaves sum their gradients in one tree."""
    leaves, problems = [], []
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        try:
            leaves.append(Sharded(leaf.local, in_tree(leaf.spec)) if is_sharded(leaf) else leaf)
        except LayoutError as error:
            problems.append(Problem(path, error.got, error.expected))
    remedy = 'take a strategy without it, or leave out sums="tree"'
    refuse(f"{what}: a transform has other bits at another number of ranks", problems, remedy)
    return flat._replace(leaves=leaves)


def _unbound(leaf: Any) -> Any:
    """Detach a leaf, so that it may outlive a call."""
    detached = leaf if not isinstance(tensor_of(leaf), torch.Tensor) else tensor_of(leaf).detach()
    return Sharded(detached, leaf.spec) if is_sharded(leaf) else detached


def accumulate(
    f: Callable[..., Any],
    *,
    reduce: str = "mean",
    reduce_over: Over = None,
    has_aux: bool = False,
    communicate: str | None = None,
    sums: str | None = None,
    with_index: bool = False,
    transform_state: Tree | Absent = ABSENT,
) -> Callable[..., Any]:
    """Turn a local loss of one microbatch into a function of many: `value_and_grad` of their common objective.

    Activations of one microbatch are held at a time. The objective is the mean over microbatches and ranks, or with
    "weighted" the true mean over all items, however unequally they are spread. Gradients are added up in the dtype
    that they are reduced in, if it is wider than the dtype that they are computed in, or stored in.

    Args:
        f: Called as f(params, microbatch, *args, **kwargs); returns this rank's scalar loss, or (sum, count) for
            "weighted".
        reduce: As for `value_and_grad`; "mean" and "sum" are over microbatches too.
        reduce_over: As for `value_and_grad`.
        has_aux: Whether f returns (loss, aux) instead.
        communicate: "each" reduces gradients in every microbatch and sums shards of them, which needs least memory;
            "once" sums full gradients and reduces them in the last one, which sends least. None leaves it to the
            strategy: once for ZeRO-1, else each.
        sums: "tree" adds up gradients, losses and counts in one binary tree over the microbatches of the whole job,
            so that they have the same bits on any number of ranks. Each rank passes what `fs.microbatches` chooses of
            the job's, of which there are a power of two, as there are ranks; forward and backward must have bits that
            depend on the microbatch alone. None adds up in turn.
        with_index: Whether f is called as f(params, microbatch, index, *args, **kwargs), with the microbatch's number
            in the job, as `fs.microbatches` numbers them: `fold_in` makes a key of it.
        transform_state: As for `value_and_grad`; it goes from microbatch to microbatch where each is reduced.

    Returns:
        A function of (params, microbatches, *args, **kwargs), where microbatches is a sequence, as long on every rank.
        It returns (objective, grads), or ((objective, auxes), grads) with a list of every microbatch's aux; with
        `transform_state` the new state comes third. A leaf that was used in any microbatch has a gradient.

    Raises:
        ValueError: if `reduce`, `communicate` or `sums` is unknown; by the function returned, if there are no
            microbatches, with sums="tree" no power of two of them or of ranks, a transform has other bits at another
            number of ranks, f computes on shards, and as for `value_and_grad`.

    >>> import torch, fshard as fs
    >>> params = fs.shard({"w": torch.tensor([1.0, 2.0])}, fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")))
    >>> loss, grads = fs.accumulate(lambda p, x: (x * fs.gather(p)["w"].square()).sum())(params, [10.0, 30.0])
    >>> loss, grads["w"].local
    (tensor(100.), tensor([40., 80.]))
    """
    _check("accumulate", f, reduce, reduce_over, sums, has_aux=has_aux, with_index=with_index)
    check_batches("accumulate", [None], communicate)
    options = _Options(reduce, reduce_over, has_aux, transform_state)

    def run(params: Tree, microbatches: Sequence[Any], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        check_batches("accumulate", microbatches, communicate)
        own = len(microbatches)
        share = own_share("accumulate", params, communicate, own) if sums else None
        once = share.communicate == "once" if share else _once(communicate, params)
        given: list[tuple[Any, ...]] = [(batch,) for batch in microbatches]
        if with_index:
            axes = reduction_axes(flatten(params), "accumulate", reduce_over)
            ranks, rank = place_of([axis for axis in reversed(axes) if axis.size > 1])
            numbered = share or Share(own * ranks, ranks, rank, "once" if once else "each")
            given = list(zip(microbatches, numbered.indices, strict=True))
        functions = [functools.partial(_on, f, (*first, *args), kwargs) for first in given]
        value, auxes, grads, _, *rest = _Job("accumulate", functions, params, (), options, once, share).differentiate()
        return (value, auxes) if has_aux else value, grads, *rest

    return comm.call(run, "accumulate")


def _on(f: Callable[..., Any], args: Any, kwargs: Any, params: Tree, _: Tree) -> Any:
    return f(params, *args, **kwargs)


def _once(communicate: str | None, params: Tree) -> bool:
    return communicate == "once" or (communicate is None and not reduces_early(params))
