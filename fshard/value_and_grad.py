"""value_and_grad and accumulate: the loss and its sharded, reduced gradients in one call."""

import functools
import json
import operator
from collections.abc import Callable, Hashable, Sequence
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
from fshard.engine import Call, FunctionTransform, attempted, call_of
from fshard.errors import Problem, expect, refuse
from fshard.microbatches import (
    Share,
    TreeSum,
    check_order,
    numbered_in_turn,
    own_share,
    reduces_early,
    tree_total,
)
from fshard.transforms.base import LayoutError
from fshard.transforms.compose import sum_dtype
from fshard.transforms.state import ABSENT, Absent, joined, states_of
from fshard.transforms.tree_sums import in_tree
from fshard.tree import (
    Axis,
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

Schedule = Callable[[Tree], Sequence[Tree]]


def value_and_grad(
    f: Callable[..., Any],
    *,
    argnums: int | Sequence[int] = 0,
    reduce: str = "mean",
    reduce_over: Over = None,
    has_aux: bool = False,
    schedule: Schedule | None = None,
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

    Ranks vote on the order of gathers in the first call of the same code on equal specs; later calls start with one
    message. A call that departs from the order runs `f` again, with votes and from the same random numbers.

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
        schedule: For functions that gather parts of a tree: maps the parameters to those parts, in the order in which f
            will gather them, so that they are gathered ahead. It should name all of them: at the first gather that it
            does not name, ranks go through the rest of it, and nothing more comes ahead. Models know theirs.
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
    check_function("value_and_grad", f)
    check_reduce(reduce, "value_and_grad")
    check_sums("value_and_grad", sums)
    _check_over("value_and_grad", reduce_over, sums)
    check_flags("value_and_grad", has_aux=has_aux)
    single = isinstance(argnums, int)
    places = _places(argnums)

    def run(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        if not all(-len(args) <= place < len(args) for place in places):
            raise ValueError(
                f"value_and_grad: argnums is {argnums!r}, but {len(args)} arguments were given by position"
            )
        if len({place % len(args) for place in places}) < len(places):
            raise ValueError(f"value_and_grad: expected argnums to be {EACH_ONCE}, got {argnums!r}")
        inputs = _inputs(places, args)
        trained = [place for place in places if place not in inputs]
        params = args[trained[0]] if single else tuple(args[place] for place in trained)

        def with_params(tree: Tree, given: Tree) -> Any:
            arguments = list(args)
            for place, part in (*zip(trained, (tree,) if single else tree, strict=True), *given.items()):
                arguments[place] = part
            return f(*arguments, **kwargs)

        value, (aux,), grads, given, *rest = differentiate(
            "value_and_grad",
            [with_params],
            params,
            inputs,
            reduce,
            has_aux,
            over=reduce_over,
            code=code_of(f),
            schedule=schedule,
            share=own_share("value_and_grad", params, None, 1) if sums else None,
            transform_state=transform_state,
        )
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


Parts = tuple[torch.Tensor, Any, Any]


def differentiate(
    what: str,
    functions: Sequence[Callable[[Tree, Tree], Any]],
    params: Tree,
    inputs: Tree,
    reduce: str,
    has_aux: bool,
    *,
    over: Over = None,
    code: Hashable,
    schedule: Schedule | None = None,
    once: bool = False,
    share: Share | None = None,
    transform_state: Tree | Absent = ABSENT,
) -> tuple[Any, ...]:
    """Differentiate the objective of several local losses, one after another.

    Args:
        what: The verb that runs, for errors.
        functions: Each maps parameters and inputs to this rank's loss of one microbatch, as `value_and_grad` takes it.
        params: The parameters.
        inputs: Plain tensors, to differentiate by too; none with several functions.
        reduce: As for `value_and_grad`; "mean" is over microbatches too.
        has_aux: As for `value_and_grad`.
        over: The axes of the reduction, as for `value_and_grad`.
        code: The key of the functions, by which their order of collectives may be known.
        schedule: As for `value_and_grad`.
        once: Whether full gradients are summed over microbatches before they are reduced.
        share: The microbatches of this rank, if sums are one tree over the microbatches of all ranks.
        transform_state: As for `value_and_grad`.

    Returns:
        The objective, each function's aux, the gradients of parameters and of inputs, and the new state where one was
        passed.
    """
    flat, given = flatten(params), flatten(inputs)
    check_local(what, flat)
    call_of(what, flat)
    axes = reduction_axes(flat, what, over)
    shared = shared_axes(flat, axes)
    for each in (flat, given):
        check_floating(what, each)
        check_differentiable(what, each)
    states = states_of(what, flat, transform_state)
    whole = flat
    if share is not None:
        if _compat.is_tracing():
            comm.ops.told(json.dumps({"sums": "tree"}))
        flat = flat._replace(leaves=_in_tree(what, flat))
    over_axes = named(axes, over)
    run = _Run(
        what, functions, flat, given, axes, shared, over_axes, reduce, has_aux, code, schedule, once, share, states
    )
    if _is_outer(flat, given):
        comm.same_call(what, shared, flat, **run.told())
        value, auxes, grads, by_inputs = run.reference()
    else:
        value, auxes, grads, by_inputs = run.engine()
    check_agrees(value, flat, axes, what)
    wrapped = [
        Sharded(grad, leaf.spec) if is_sharded(leaf) and grad is not None else grad
        for grad, leaf in zip(grads, whole.leaves, strict=True)
    ]
    found = value, auxes, unflatten(flat.treedef, wrapped), unflatten(given.treedef, by_inputs)
    return found if transform_state is ABSENT else (*found, joined(whole, states, transform_state))


def _in_tree(what: str, flat: Flat) -> list[Any]:
    """Let leaves sum their gradients in one tree."""
    leaves, problems = [], []
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        try:
            leaves.append(Sharded(leaf.local, in_tree(leaf.spec), leaf.call) if is_sharded(leaf) else leaf)
        except LayoutError as error:
            problems.append(Problem(path, error.got, error.expected))
    remedy = 'take a strategy without it, or leave out sums="tree"'
    refuse(f"{what}: a transform has other bits at another number of ranks", problems, remedy)
    return leaves


Found = tuple[torch.Tensor, list[Any], list[Any], list[Any]]


class _Run(NamedTuple):
    """One differentiation, in either form."""

    what: str
    functions: Sequence[Callable[[Tree, Tree], Any]]
    flat: Flat
    inputs: Flat
    axes: Sequence[Axis]  # those of the reduction
    shared: Sequence[Axis]  # those whose ranks make the same call
    over: dict[str, list[str]]  # names of the reduction's axes, if the caller chose them
    reduce: str
    has_aux: bool
    code: Hashable
    schedule: Schedule | None
    once: bool
    share: Share | None
    states: list[Tree]

    def local(self, function: Callable[[Tree, Tree], Any], leaves: list[Any], inputs: list[Any]) -> Parts:
        """Compute this rank's loss of one microbatch, with its count and aux."""
        before = reductions()
        out = function(unflatten(self.flat.treedef, leaves), unflatten(self.inputs.treedef, inputs))
        if self.has_aux and not (isinstance(out, tuple) and len(out) == 2):
            raise ValueError(
                f"{self.what}: expected f to return the pair (loss, aux) for has_aux=True, got {describe(out)}"
            )
        loss, aux = out if self.has_aux else (out, None)
        check_loss(loss, self.reduce, self.what)
        value, count = loss if self.reduce == "weighted" else (loss, None)
        if reductions() > before:
            check_not_reduced(value, self.axes, self.what)
        return value, count, aux

    def divisor(self, counts: list[Any]) -> Any:
        """Compute the divisor of sums over ranks and microbatches."""
        if self.reduce == "weighted":
            numbers = [count.detach().to(torch.float64) for count in counts]
            if self.share is not None:
                return tree_total(denominator(self.share.slots(numbers), self.axes, self.reduce))
            return denominator(torch.stack(numbers).sum(), self.axes, self.reduce)
        if self.share is not None:
            return self.share.total if self.reduce == "mean" else 1
        return denominator(None, self.axes, self.reduce) * (len(self.functions) if self.reduce == "mean" else 1)

    def told(self) -> dict[str, Any]:
        """List the arguments that must be the same on every rank."""
        number = len(self.functions) if self.share is None else self.share.total
        once = {"microbatches": number, "communicate": "once" if self.once else "each"}
        tree = {} if self.share is None else {"sums": "tree"}
        return {"reduce": self.reduce, **self.over, **(once if self.what == "accumulate" else {}), **tree}

    def summed(self, values: list[torch.Tensor]) -> torch.Tensor:
        """Add up the losses of this rank, or put them into slots of one tree over all ranks."""
        return functools.reduce(operator.add, values) if self.share is None else self.share.slots(values)

    def objective(self, summed: torch.Tensor) -> torch.Tensor:
        """Finish the sum over ranks."""
        return summed if self.share is None else tree_total(summed)

    def engine(self) -> Found:
        """Run the engine; the reference, if a function calls torch.func."""
        try:
            return attempted(self._attempt)
        except FunctionTransform:
            return self.reference()

    def _attempt(self) -> Found:
        code = self.code, self.schedule and code_of(self.schedule), self.has_aux
        call = Call(self.what, self.flat, self.shared, code=code, share=self.share, **self.told())
        for leaf, state in zip(call.leaves, self.states, strict=True):
            if leaf is not None:
                leaf.state, leaf.accumulated = state, len(self.functions) > 1 or self.share is not None
        try:
            return self._engine(call)
        finally:
            call.end()

    def _engine(self, call: Call) -> Found:
        values, counts, auxes = [], [], []
        inputs = [None if leaf is None else leaf.detach().requires_grad_() for leaf in self.inputs.leaves]
        by_inputs: list[Any] = []
        single = len(self.functions) == 1 and self.share is None
        divisor: Any = 1
        for i, function in enumerate(self.functions):

            def run(function: Callable[[Tree, Tree], Any] = function) -> Parts:
                if self.schedule:
                    call.schedule(self.schedule(unflatten(self.flat.treedef, call.bound)))
                return self.local(function, call.bound, inputs)

            value, count, aux = call.forward(run)
            count, aux = map_leaves(_unbound, (count, aux))
            # With one microbatch each gradient can be divided as soon as it is reduced.
            divisor = self.divisor([count]) if single else 1
            last = i == len(self.functions) - 1
            reduce = last or not self.once
            by_inputs = call.backward(value, divisor, inputs, reduce=reduce, last=last)
            values.append(value.detach())
            counts.append(count)
            auxes.append(aux)
            del value
        rest = 1 if single else self.divisor(counts)
        value = self.summed(values)
        trained = [(i, leaf) for i, leaf in enumerate(call.leaves) if leaf is not None and leaf.trained]
        paths, mine = [leaf.path for _, leaf in trained], [leaf.used for _, leaf in trained]
        others = [axis for axis in self.shared if axis not in self.axes]
        value, used, news = closed(value, paths, mine, call.news, self.axes, others)
        call.settle(news)
        grads: list[Any] = [None] * len(call.leaves)
        for (i, leaf), yes in zip(trained, used, strict=True):
            if yes:
                grads[i], self.states[i] = leaf.take_grad(rest), leaf.state
        by_inputs = [None if grad is None else divided(grad, divisor if single else rest) for grad in by_inputs]
        return divided(self.objective(value), divisor if single else rest), auxes, grads, by_inputs

    def reference(self) -> Found:
        """Differentiate by torch.func; every unit is gathered when a function asks for it, and kept."""
        if any(state is not None for state in self.states):
            remedy = "differentiate at gathered parameters, and call fs.scatter_grads outside of it"
            raise ValueError(f"{self.what}: expected no state of transforms inside torch.func, got one; {remedy}")
        if self.share is not None and self.once and len(self.functions) > 1:
            remedy = 'pass communicate="each", or leave out sums="tree"'
            raise ValueError(
                f'{self.what}: expected one sum over ranks for each microbatch inside torch.func, got "once"; {remedy}'
            )
        trained = [i for i, leaf in enumerate(self.flat.leaves) if is_trained(leaf)]
        inputs = [leaf for leaf in self.inputs.leaves if leaf is not None]
        tensors = [*(tensor_of(self.flat.leaves[i]) for i in trained), *inputs]
        values: list[torch.Tensor] = []
        counts, auxes = [], []
        trees = [TreeSum() for _ in trained]
        sums: list[torch.Tensor] | None = None

        def wide(i: int, grad: torch.Tensor) -> torch.Tensor:
            leaf = self.flat.leaves[i]
            return grad.to(sum_dtype(leaf.spec, grad.dtype)) if is_sharded(leaf) else grad

        for function in self.functions:
            parts: list[Tree] = []
            loss_of = functools.partial(self._loss_of, function, trained, parts)
            with refuse_writes(self.what, [self.flat.paths[i] for i in trained], tensors[: len(trained)]):
                found, (value, outputs) = torch.func.grad_and_value(loss_of, has_aux=True)(tensors)
            found, by_inputs = found[: len(trained)], iter(found[len(trained) :])
            carried = iter(outputs)
            count, aux = tree_map(
                lambda leaf: next(carried) if isinstance(leaf, torch.Tensor) else leaf,  # noqa: B023
                parts.pop(),
            )
            if self.share is not None:
                for i, tree, grad in zip(trained, trees, found, strict=True):
                    tree.add(wide(i, grad))
            elif sums is None:
                sums = list(found)
            else:
                sums = [wide(i, a) + b for i, a, b in zip(trained, sums, found, strict=True)]
            values.append(value)
            counts.append(count)
            auxes.append(aux)
        divisor = self.divisor(counts)
        grads: list[Any] = [None] * len(self.flat.leaves)
        added = sums or [] if self.share is None else [tree.total() for tree in trees]
        for i, grad in zip(trained, added, strict=True):
            assert grad is not None
            grads[i] = divided(grad, divisor).to(tensor_of(self.flat.leaves[i]).dtype)
        given = [None if leaf is None else divided(next(by_inputs), divisor) for leaf in self.inputs.leaves]
        return divided(self.objective(total(self.summed(values), self.axes)), divisor), auxes, grads, given

    def _loss_of(
        self, function: Callable[[Tree, Tree], Any], trained: list[int], parts: list[Tree], tensors: list[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        leaves = list(self.flat.leaves)
        rest = iter(tensors)
        for i in trained:
            leaves[i] = like(leaves[i], next(rest))
        inputs = [None if leaf is None else next(rest) for leaf in self.inputs.leaves]
        value, count, aux = self.local(function, leaves, inputs)
        # torch.func carries only tensors out of the transform; the rest of the tree goes by this list.
        parts.append((count, aux))
        return value, [leaf for leaf in tree_leaves((count, aux)) if isinstance(leaf, torch.Tensor)]


def _is_outer(flat: Flat, inputs: Flat) -> bool:
    """Whether the result must be differentiable itself, or there is nothing to gather."""
    sharded = [leaf.local for leaf in flat.leaves if is_sharded(leaf)]
    tensors = [*sharded, *(leaf for leaf in inputs.leaves if leaf is not None)]
    outer = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return not sharded or outer or _compat.transforms_active() or _compat.any_dual(tensors)


def _unbound(leaf: Any) -> Any:
    """Detach a leaf, so that it may outlive a call."""
    detached = leaf if not isinstance(tensor_of(leaf), torch.Tensor) else tensor_of(leaf).detach()
    return Sharded(detached, leaf.spec) if is_sharded(leaf) else detached


def code_of(function: Callable[..., Any]) -> Hashable:
    """Find the key of a function whose order may be known: its code, equal for all functions of one definition."""
    while isinstance(function, functools.partial):
        function = function.func
    code: Hashable = getattr(function, "__code__", None)
    return code if code is not None else type(function)  # type: ignore[return-value]


def _check_over(what: str, over: Over, sums: str | None) -> None:
    remedy = "shard the parameters on these axes alone"
    expect(sums is None or over is None, what, 'reduce_over or sums="tree"', "both", remedy)


def accumulate(
    f: Callable[..., Any],
    *,
    reduce: str = "mean",
    reduce_over: Over = None,
    has_aux: bool = False,
    communicate: str | None = None,
    sums: str | None = None,
    with_index: bool = False,
    schedule: Schedule | None = None,
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
        schedule: As for `value_and_grad`.
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
    check_function("accumulate", f)
    check_reduce(reduce, "accumulate")
    check_order("accumulate", communicate)
    check_sums("accumulate", sums)
    _check_over("accumulate", reduce_over, sums)
    check_flags("accumulate", has_aux=has_aux, with_index=with_index)

    def run(params: Tree, microbatches: Sequence[Any], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        if not isinstance(microbatches, Sequence) or not microbatches:
            found = "none" if isinstance(microbatches, Sequence) else describe(microbatches)
            raise ValueError(f"accumulate: expected the microbatches to be a sequence of one or more, got {found}")
        share = own_share("accumulate", params, communicate, len(microbatches)) if sums else None
        once = share.communicate == "once" if share else _once(communicate, params)
        given: list[tuple[Any, ...]] = [(batch,) for batch in microbatches]
        if with_index:
            numbered = share or numbered_in_turn("accumulate", params, len(microbatches), once, reduce_over)
            given = list(zip(microbatches, numbered.indices, strict=True))
        functions = [functools.partial(_on, f, (*first, *args), kwargs) for first in given]
        value, auxes, grads, _, *rest = differentiate(
            "accumulate",
            functions,
            params,
            (),
            reduce,
            has_aux,
            over=reduce_over,
            code=code_of(f),
            schedule=schedule,
            once=once,
            share=share,
            transform_state=transform_state,
        )
        return (value, auxes) if has_aux else value, grads, *rest

    return comm.call(run, "accumulate")


def _on(f: Callable[..., Any], args: Any, kwargs: Any, params: Tree, _: Tree) -> Any:
    return f(params, *args, **kwargs)


def _once(communicate: str | None, params: Tree) -> bool:
    return communicate == "once" or (communicate is None and not reduces_early(params))
