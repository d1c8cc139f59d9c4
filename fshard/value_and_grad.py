"""value_and_grad and accumulate: the loss and its sharded, reduced gradients in one call."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import torch

from fshard import _compat, comm
from fshard.collectives import (
    OBSERVED,
    REDUCTIONS,
    TAPE,
    Over,
    annotate_dtype,
    check_agrees,
    check_not_reduced,
    collectives_of,
    denominator,
    describe_reduce_over,
    divide,
    reduce_loss_and_usage,
    reduction_axes,
    refuse_wrong_sums,
    shared_axes,
    sum_over,
    widen,
)
from fshard.engine import EngineCall
from fshard.microbatches import check_batches
from fshard.reduction_order import find_order
from fshard.transforms.state import ABSENT, join_states, states_of
from fshard.tree import (
    Sharded,
    Tree,
    flatten,
    is_trained,
    like,
    take_tensors,
    tensor_of,
    tree_map,
)
from fshard.tree.checks import (
    check_differentiable,
    check_floating,
    check_local,
    check_loss,
    check_reduce,
    describe,
    is_differentiated,
    refuse_writes,
)


def value_and_grad(
    f: Callable[..., Any],
    *,
    reduce: str = "mean",
    reduce_over: Over = None,
    has_aux: bool = False,
    reduction_order: str | None = None,
    transform_state: Tree = ABSENT,
) -> Callable[..., Any]:
    """Turn a local loss into a function of its objective and the gradients, sharded as the parameters are.

    `f` gets the sharded parameters and gathers where it needs them, by `model.apply` or `fs.gather`. It may compute
    leaves from shards and gathered tensors before, and gather those. A leaf that ranks hold whole must be gathered
    before the loss uses it, or passed to `fs.pcast`: both sum its gradient. The result is that of
    torch.func.grad_and_value(lambda p: fs.objective(f(fs.gather(p)), like=p))(params), except that gradients are
    summed before they are divided, as `scatter_grads` does; and units are gathered just in time, dropped
    and gathered again in the backward as their strategy says, and gradients are reduced as they appear. Under a
    torch.func transform, or where parameters are part of an outer graph, it is that very expression; of plain tensors
    alone, which say nothing of ranks, it is torch.func.grad_and_value on each rank by itself. Otherwise gradients have
    no graph, even if `f` uses other tensors that require one. Follows jax.value_and_grad.

    Every rank makes the same gathers and collectives in the same order; a rank that has no use for a unit of a model
    passes it over, except inside a checkpoint that other ranks compute again. Ranks that differ end with an error on
    all of them. `f` runs once.

    Args:
        f: Called as f(params, *args, **kwargs); returns this rank's scalar loss, or (sum, count) for "weighted". To
            differentiate several trees, pass a tuple of them as `params`.
        reduce: "mean" over ranks, "sum", or "weighted": sum of sums divided by the sum of counts,
            which is NaN if all counts are zero; `skip_nonfinite` leaves such a step out.
        reduce_over: The mesh axes that batches are split over, as axes or names: losses are reduced over them. Losses
            must agree between ranks of every other axis, where each rank's graph has its part of the gradient, summed
            by `psum_invariant` or `broadcast` in the loss. None means the axes that the transforms of all leaves
            declare.
        has_aux: Whether f returns (loss, aux) instead; aux is any tree of tensors and stays this rank's own.
        reduction_order: "tree" as for `accumulate`, with one microbatch on each rank; None adds up in the order of
            ranks.
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
            axis that nothing is reduced over, or it depends on leaves of a call around this one that are not in
            `params`, ranks gather different units, `f` wrote to a parameter, or it runs in inference mode.
        RuntimeError: by the function returned, if another rank failed.

    >>> import torch, fshard as fs
    >>> params = fs.shard({"w": torch.tensor([1.0, 2.0])}, fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")))
    >>> loss, grads = fs.value_and_grad(lambda p, x: (x * fs.gather(p)["w"].square()).sum())(params, 10.0)
    >>> loss, grads["w"].local
    (tensor(50.), tensor([20., 40.]))
    """
    # These are all arguments, and no other name is bound yet.
    options = _Options("value_and_grad", **locals())

    def run(params: Tree, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        functions = [lambda tree: f(tree, *args, **kwargs)]
        value, (aux,), grads, *state = _Differentiation(options, functions, params).run()
        objective = (value, aux) if has_aux else value
        return objective, grads, *state

    return comm.call(run, "value_and_grad")


LossFunction = Callable[[Tree], Any]

# The objective, what each function returned besides, and for each leaf its gradient, or None.
Gradients = tuple[torch.Tensor, Sequence[Any], Sequence[Any]]


class _Loss(NamedTuple):
    """This rank's loss of one microbatch.

    Attributes:
        value: The loss; with reduce="weighted" the sum over items.
        items: How many items it is the sum over; None unless it is weighted.
        aux: What the function returned besides.
    """

    value: torch.Tensor
    items: torch.Tensor | None
    aux: Any


class _Options(NamedTuple):
    """The options of `value_and_grad` and `accumulate`.

    Attributes:
        api_name: The function that the user called, for errors.
        communicate: As for `accumulate`; None for `value_and_grad`.
    """

    api_name: str
    f: Callable[..., Any]
    reduce: str
    reduce_over: Over
    has_aux: bool
    reduction_order: str | None
    transform_state: Tree
    communicate: str | None = None


class _Differentiation:
    """One differentiation of the objective of several local losses, by the engine or by torch.func.

    Attributes:
        options: The options of the call.
        functions: Each maps parameters to this rank's loss of one microbatch.
        flat: The leaves of the parameters.
        axes: The axes that the objective is reduced over.
        shared_axes: Those, and the axes over which leaves are gathered or their gradients summed.
        is_common_over: For each axis that leaves are placed on, or a function communicates over, whether this rank's
            loss is computed together with those of its other ranks.
        states: For each leaf the state of its transform; at first from the previous step, later from this one.
        order: The order in which gradients, losses and counts are added up.
        sums: Their sums over microbatches and ranks.
    """

    def __init__(self, options: _Options, functions: Sequence[LossFunction], params: Tree) -> None:
        """Check the options and the parameters.

        Args:
            options: The options.
            functions: A function for each microbatch.
            params: The parameters, sharded.

        Raises:
            ValueError: if an option is unknown, or the parameters cannot be differentiated by.
        """
        api_name = options.api_name
        check_reduce(options.reduce, api_name)
        self.order = find_order(api_name, options.reduction_order)
        self.order.check_reduce_over(api_name, options.reduce_over)
        self.options = options
        self.functions = functions
        self.flat = flatten(params)
        check_local(api_name, self.flat)
        check_floating(api_name, self.flat)
        self.axes = reduction_axes(self.flat, api_name, options.reduce_over)
        self.shared_axes = shared_axes(self.flat, self.axes)
        # Ranks that compute a loss together over an axis train one model, also where no leaf is placed on the axis. If
        # the function communicates over others, as for a metric, the loss may still be each rank's own.
        self.is_common_over = dict.fromkeys(self.flat.axes, True)
        check_differentiable(api_name)
        self.states = states_of(api_name, self.flat, options.transform_state)
        self.sums = self.order.begin_sums(api_name, self.axes, len(functions))

    def run(self) -> tuple[Any, ...]:
        """Run the functions, and differentiate their objective.

        Returns:
            The objective, each function's aux, the gradients, and the new state where one was passed.
        """
        flat = self.flat
        options = self.options
        observe = OBSERVED.get()
        if observe is not None:
            observe(self.functions, flat, self.axes, options)
        tensors = [tensor for tensor in flat.tensors if tensor is not None]
        # The result has to be differentiable itself, or there is nothing to gather.
        if is_differentiated(tensors) or not flat.specs:
            objective, auxes, by_leaf = self._differentiate_by_torch_func()
        else:
            objective, auxes, by_leaf = self._differentiate_by_engine()
        if not any(gradient is not None for gradient in by_leaf) and any(map(is_trained, flat.leaves)):
            # Torch's own backward refuses such a loss. Here it may be that no rank has any items.
            warnings.warn(
                f"{options.api_name}: the loss of no rank depends on the parameters, so there are no gradients. "
                "Compute it with model.apply(params, ...) or fs.gather(params), and without no_grad or detach.",
                stacklevel=2,
            )
        for axis, is_common in self.is_common_over.items():
            if axis.size > 1 and axis not in self.axes:
                check_agrees(objective, axis, options.api_name, is_common=is_common)
        grads = flat.unflatten(by_leaf)
        if options.transform_state is ABSENT:
            return objective, auxes, grads
        return objective, auxes, grads, join_states(flat, self.states)

    def _facts(self) -> dict[str, Any]:
        """List what ranks must agree on before they communicate, by name."""
        options = self.options
        facts: dict[str, Any] = {"reduce": options.reduce, **describe_reduce_over(self.axes, options.reduce_over)}
        if options.communicate:
            facts["microbatches"] = len(self.functions)
            facts["communicate"] = options.communicate
        facts.update(self.order.list_facts())
        return facts

    def _run_function(self, function: LossFunction, leaves: list[Any]) -> _Loss:
        """Compute this rank's loss of one microbatch, and check what the function returned."""
        options = self.options
        reductions_before = REDUCTIONS.get()
        result = function(self.flat.unflatten(leaves))
        loss, aux = result, None
        if options.has_aux:
            if not isinstance(result, tuple) or len(result) != 2:
                raise ValueError(
                    f"{options.api_name}: f must return the pair (loss, aux) with has_aux=True, but returned "
                    f"{describe(result)}."
                )
            loss, aux = result
        check_loss(loss, options.reduce, options.api_name)
        value, count = loss if options.reduce == "weighted" else (loss, None)
        if REDUCTIONS.get() > reductions_before:
            check_not_reduced(value, self.axes, options.api_name)
        tape = TAPE.get()
        for axis in tape.axes if tape else ():
            if not self.is_common_over.get(axis):
                self.is_common_over[axis] = bool(collectives_of(value, axis))
        return _Loss(value, count, aux)

    def _divisor(self, counts: Sequence[Any]) -> Any:
        """Compute what sums over ranks and microbatches are divided by."""
        reduce = self.options.reduce
        if reduce == "weighted":
            numbers = [count.detach().to(torch.float64) for count in counts]
            return self.sums.finish_numbers(denominator(self.sums.add_numbers(numbers), self.axes, reduce))
        microbatches = len(counts) if reduce == "mean" else 1
        return denominator(None, self.axes, reduce) * microbatches

    def _differentiate_by_engine(self) -> Gradients:
        flat = self.order.mark_leaves(self.flat, self.axes)
        call = EngineCall(self.options.api_name, flat, self.shared_axes, **self._facts())
        for leaf, state in zip(call.leaves, self.states, strict=True):
            if leaf is not None:
                leaf.transform_state = state
                leaf.accumulated = self.sums.has_several
        with call.make_current():
            try:
                return self._run_microbatches(call)
            finally:
                call.end()

    def _run_microbatches(self, call: EngineCall) -> Gradients:
        """Run forward and backward of each microbatch, then reduce the objective, and take the gradients."""
        losses = []
        # With one microbatch each gradient can be divided as soon as it is reduced.
        is_single = not self.sums.has_several
        divisor: Any = 1
        for number, function in enumerate(self.functions, 1):
            value, count, aux = call.forward(partial(self._run_function, function, call.bound))
            if self.options.has_aux:
                aux = tree_map(_detach, aux)
            losses.append(_Loss(value.detach(), _detach(count), aux))
            if is_single:
                divisor = self._divisor([count])
            is_last = number == len(self.functions)
            is_reduced = is_last or self.options.communicate != "once"
            is_deferred = self.options.communicate == "outer_once" and not is_last
            call.backward(value, divisor, reduce=is_reduced, defers_outer=is_deferred, last=is_last)
            self.sums.add_gradients(call.trained, last=is_last)
            # The graph of a microbatch goes before the forward of the next one.
            del value
        values, counts, auxes = zip(*losses, strict=True)
        remaining_divisor = 1 if is_single else self._divisor(counts)
        paths = [leaf.path for leaf in call.trained]
        used_here = [leaf.used for leaf in call.trained]
        total = self.sums.add_numbers(list(map(widen, values)))
        dtype = _widest_dtype(values)
        with annotate_dtype(dtype):
            value, used = reduce_loss_and_usage(total, paths, used_here, self.axes, self.shared_axes)
        for owner, is_used in zip(call.trained, used, strict=True):
            owner.used = is_used
        by_leaf: list[Any] = [None] * len(call.leaves)
        for i, leaf in enumerate(call.leaves):
            if leaf is not None and leaf.used:
                by_leaf[i] = Sharded(leaf.take_grad(remaining_divisor), self.flat.leaves[i].spec)
                self.states[i] = leaf.transform_state
        objective = divide(self.sums.finish_numbers(value), divisor if is_single else remaining_divisor)
        return objective.to(dtype), auxes, by_leaf

    def _differentiate_by_torch_func(self) -> Gradients:
        """Compute objective(f(gather(params))) by torch.func.

        Each gather is a separate node, and its tensor is kept.
        """
        api_name = self.options.api_name
        self.order.refuse_torch_func(api_name)
        comm.check_same_call(api_name, self.shared_axes, self.flat, **self._facts())
        leaves = self.flat.leaves
        trained = [i for i, leaf in enumerate(leaves) if is_trained(leaf)]
        paths = [self.flat.paths[i] for i in trained]
        tensors = [tensor_of(leaves[i]) for i in trained]
        # torch.func carries only tensors out of the transform; the rest of the trees goes by this list.
        structure: list[Callable[[Sequence[Any]], Sequence[_Loss]]] = []

        def sum_losses(traced: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
            leaves_traced = list(leaves)
            for i, tensor in zip(trained, traced, strict=True):
                leaves_traced[i] = like(leaves[i], tensor)
            losses = [self._run_function(function, leaves_traced) for function in self.functions]
            value = self.sums.add_numbers([widen(loss.value) for loss in losses])
            if self.flat.specs:
                specs = [leaves[i].spec for i in trained]
                refuse_wrong_sums(api_name, value, list(zip(paths, specs, traced, strict=True)))
            carried, put = take_tensors(losses)
            structure.append(put)
            return value, carried

        with refuse_writes(api_name, paths, tensors), _compat.without_saved_tensor_hooks():
            differentiate = torch.func.grad_and_value(sum_losses, has_aux=True)
            gradients, (value, carried) = differentiate(tensors)
        values, counts, auxes = zip(*structure.pop()(carried), strict=True)
        divisor = self._divisor(counts)
        by_leaf: list[Any] = [None] * len(leaves)
        for i, gradient in zip(trained, gradients, strict=True):
            by_leaf[i] = like(leaves[i], divide(gradient, divisor))
        dtype = _widest_dtype(values)
        with annotate_dtype(dtype):
            objective = divide(sum_over(value, self.axes), divisor)
        return objective.to(dtype), auxes, by_leaf


def _widest_dtype(values: Sequence[torch.Tensor]) -> torch.dtype:
    return reduce(torch.promote_types, [value.dtype for value in values])


def _detach(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def accumulate(
    f: Callable[..., Any],
    *,
    reduce: str = "mean",
    reduce_over: Over = None,
    has_aux: bool = False,
    communicate: str | None = None,
    reduction_order: str | None = None,
    transform_state: Tree = ABSENT,
) -> Callable[..., Any]:
    """Turn a local loss of one microbatch into a function of many: `value_and_grad` of their common objective.

    Activations are held for one microbatch at a time. Inside torch.func, or if nothing is sharded, those of all
    microbatches are held.
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
            "once" sums full gradients and reduces them in the last one, which sends least. "outer_once", for leaves
            that are reduced over several axes, as under `hsdp`: as "each", but the sums of shards are reduced over the
            outermost axis in the last microbatch alone. None means "once" for ZeRO-1 and "each" for all others, and
            always "each" with reduction_order="tree".
        reduction_order: "tree" adds up gradients, losses and counts in one binary tree over the microbatches of the
            whole job, so that they have the same bits on any number of ranks. Each rank passes what `fs.microbatches`
            chooses of the job's, of which there are a power of two, as there are ranks; forward and backward must have
            bits that depend on the microbatch alone. None adds up in turn.
        transform_state: As for `value_and_grad`; it goes from microbatch to microbatch where each is reduced.

    Returns:
        A function of (params, microbatches, *args, **kwargs), where microbatches is a sequence, as long on every rank.
        It returns (objective, grads), or ((objective, auxes), grads) with a list of every microbatch's aux; with
        `transform_state` the new state comes third. A leaf that was used in any microbatch has a gradient.

    Raises:
        ValueError: by the function returned, if `communicate` or `reduction_order` is unknown, no leaf is
            reduced over several axes for "outer_once", there are no microbatches, with reduction_order="tree" no power
            of two of them or of ranks, a transform has other bits at another number of ranks, f computes on shards, and
            as for `value_and_grad`.

    >>> import torch, fshard as fs
    >>> params = fs.shard({"w": torch.tensor([1.0, 2.0])}, fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")))
    >>> loss, grads = fs.accumulate(lambda p, x: (x * fs.gather(p)["w"].square()).sum())(params, [10.0, 30.0])
    >>> loss, grads["w"].local
    (tensor(100.), tensor([40., 80.]))
    """
    # These are all arguments, and no other name is bound yet.
    options = _Options("accumulate", **locals())

    def run(params: Tree, microbatches: Sequence[Any], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        check_batches("accumulate", microbatches)
        functions = [lambda tree, batch=batch: f(tree, batch, *args, **kwargs) for batch in microbatches]
        order = find_order("accumulate", reduction_order)
        chosen = order.choose_communication("accumulate", params, communicate)
        differentiation = _Differentiation(options._replace(communicate=chosen), functions, params)
        value, auxes, grads, *state = differentiation.run()
        objective = (value, list(auxes)) if has_aux else value
        return objective, grads, *state

    return comm.call(run, "accumulate")
