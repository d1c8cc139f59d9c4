"""remat: compute again in the backward rather than keep what a function saves."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import filterfalse
from operator import attrgetter
from typing import Any

import torch
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from fshard import _compat, random
from fshard.collectives import refuse_wrong_sums
from fshard.tree import Spec, Tree, flatten, is_sharded, take_tensors
from fshard.tree.checks import describe, is_differentiable

# A function of tensors that returns tensors.
OnTensors = Callable[..., tuple[torch.Tensor, ...]]
Contexts = Callable[[], tuple[Any, Any]]
# For the number of each tensor that is a leaf's shard, the leaf's path and spec.
Leaves = Mapping[int, tuple[str, Spec]]


def remat(f: Callable[..., Any], *, save: Sequence[str] = ()) -> Callable[..., Any]:
    """Keep a function's arguments instead of what it computes on the way, and run it again in the backward.

    With `fs.gather` inside, full tensors are dropped after the forward and gathered again in the backward, under
    torch.func too. Follows jax.checkpoint; outside torch.func it is torch.utils.checkpoint.

    Args:
        f: A function of pytrees of tensors; under torch.func it must take everything that is differentiated as an
            argument. What it draws from torch's generators, of the CPU and of this process's accelerator, is drawn
            again; in a graph of `fs.jit` only what it draws on the CPU.
        save: Operators whose results are kept and not computed again, as `fs.make_graph` names them: ("aten.topk",)
            keeps the choice of a mixture's experts, which rounding may change. Then torch takes first derivatives in
            reverse mode alone, and under torch.func of no remat inside another.

    Returns:
        A function of the same arguments and result.

    Raises:
        ValueError: if `save` is no list of names of operators; by the function returned, under torch.func, if `f`
            reaches a tensor that is differentiated otherwise than by its arguments.

    >>> torch.func.grad(remat(lambda x: x.sin().sum()))(torch.zeros(2))
    tensor([1., 1.])
    """
    operators = _find_operators(save)

    def saves(_: Any, operator: Any, *__: Any, **___: Any) -> bool:
        return operator in operators or getattr(operator, "overloadpacket", None) in operators

    contexts: Contexts = partial(create_selective_checkpoint_contexts, saves) if save else noop_context_fn
    honor_hooks = _compat.honor_saved_tensor_hooks() if save else {}

    def run(*args: Any, **kwargs: Any) -> Any:
        if _compat.transforms_active():
            return _run_under_transforms(f, contexts, args, kwargs)
        whole = _recompute_whole_where_needed(f)
        return checkpoint(whole, *args, use_reentrant=False, context_fn=contexts, **honor_hooks, **kwargs)

    return run


def _find_operators(names: Sequence[str]) -> list[Any]:
    """Find operators by their names, and refuse what is no list of such names."""
    is_list = isinstance(names, list | tuple)
    if is_list and all(isinstance(name, str) and "." in name for name in names):
        operators = [attrgetter(name)(torch.ops) for name in names]
        if all(map(callable, operators)):
            return operators
    raise ValueError(f'remat: save={names!r:.40} is not a list of operator names such as ["aten.topk"].')


def _run_under_transforms(f: Callable[..., Any], contexts: Contexts, args: Any, kwargs: Any) -> Any:
    """Run a function now, and again in the backward, under torch.func, which torch's own checkpoint does not support.

    Args:
        f: The function.
        contexts: Makes the contexts of the forward and of the recomputation.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Returns:
        What it returns.
    """
    tensors, put_arguments = take_tensors((args, kwargs))
    # An autograd Function returns tensors alone; the rest of the result goes by this list.
    structure: list[Callable[..., Tree]] = []

    def run_on_tensors(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given_args, given_kwargs = put_arguments(given)
        outputs, put_result = take_tensors(f(*given_args, **given_kwargs))
        structure[:] = [put_result]
        return tuple(outputs)

    random_state = _compat.plain(random.random_state())
    forward_context, recomputation_context = contexts()

    def run_first(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with forward_context:
            return run_on_tensors(*given)

    def run_again(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with random.keeping_generators():
            # Draw what the forward drew.
            random.set_random_state(random_state)
            with recomputation_context:
                return run_on_tensors(*given)

    leaf_of = {}
    for path, leaf in flatten((args, kwargs)).named_leaves:
        if is_sharded(leaf):
            leaf_of[id(leaf.local)] = path, leaf.spec
    leaves = {}
    for i, tensor in enumerate(tensors):
        if id(tensor) in leaf_of:
            leaves[i] = leaf_of[id(tensor)]
    outputs = _Remat.apply(run_first, run_again, leaves, *tensors)
    return structure[0](outputs)


def _recompute_whole_where_needed(f: Callable[..., Any]) -> Callable[..., Any]:
    """Let a checkpoint compute all of `f` again if an operator of it fills a tensor that autograd has saved already.

    A checkpoint stops its recomputation as soon as autograd has saved as many tensors as in the forward. If the last
    one is the noise of an RReLU, that is before the operator has filled it, and the backward would read memory without
    values. One more tensor is then saved behind `f`. Elsewhere the early stop spares the last operator, in a block of
    a transformer a product of matrices.
    """
    fills_late: bool | None = None

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal fills_late
        begin = _compat.next_sequence_number()
        result = f(*args, **kwargs)
        # The recomputation does what the forward did.
        if fills_late is None:
            fills_late = _compat.fills_what_it_saved(take_tensors(result)[0], begin)
        if fills_late:
            torch.ones((), requires_grad=True).square()
        return result

    return run


class _ArgumentsOnly(TorchFunctionMode):
    """Refuses operations on tensors that are differentiated and were not passed: their gradients would be lost."""

    def __init__(self, passed: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.passed = {id(tensor) for tensor in passed}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _compat.transforms_active():
            # Below a transform of f's own everything is wrapped.
            return func(*args, **kwargs)
        for tensor in take_tensors((args, kwargs))[0]:
            # A tensor on the meta device has no gradient to lose, such as one of a module's copy without values.
            if id(tensor) in self.passed or tensor.is_meta:
                continue
            if _compat.is_transformed(tensor) or (tensor.requires_grad and not torch.is_grad_enabled()):
                raise ValueError(
                    f"remat: f uses {describe(tensor)}, which is differentiated but is not an argument of f, so its "
                    "gradient would be lost. Pass it as an argument."
                )
        return func(*args, **kwargs)


def _restrict(ctx: Any) -> tuple[OnTensors, dict[int, torch.Tensor]]:
    """Make of the function that runs again one of its differentiable tensors, to its differentiable results.

    Returns:
        The function, and these tensors by their numbers among all.
    """
    tensors = list(ctx.saved_tensors)
    trained = {i: tensor for i, tensor in enumerate(tensors) if is_differentiable(tensor)}

    def run(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        all_tensors = list(tensors)
        for i, tensor in zip(trained, given, strict=True):
            all_tensors[i] = tensor
        outputs = tuple(filter(is_differentiable, ctx.run_again(*all_tensors)))
        leaves = [(path, spec, all_tensors[i]) for i, (path, spec) in ctx.leaves.items()]
        for output in outputs:
            refuse_wrong_sums("remat", output, leaves)
        return outputs

    return run, trained


class _Remat(Function):
    """Runs a function of tensors, and another one like it in the backward, with the same arguments."""

    @staticmethod
    def forward(
        run_first: OnTensors,
        run_again: OnTensors,
        leaves: Leaves,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        with _ArgumentsOnly(tensors):
            outputs = run_first(*tensors)
        # A Function may not return an argument itself.
        return tuple(output.detach() if any(output is tensor for tensor in tensors) else output for output in outputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.run_again, ctx.leaves, *tensors = inputs
        # Sums of their gradients are in the graph that the backward makes, and are checked there.
        ctx.inputs_checked_later = ctx.leaves.keys()
        ctx.trained_outputs = list(map(is_differentiable, output))
        ctx.mark_non_differentiable(*filterfalse(is_differentiable, output))
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        run, trained = _restrict(ctx)
        outputs, pull_back, *_ = torch.func.vjp(run, *trained.values())
        output_grads = [grad for grad in grads if grad is not None and is_differentiable(grad)]
        input_grads = dict(zip(trained, pull_back(tuple(output_grads[: len(outputs)])), strict=True))
        return None, None, None, *map(input_grads.get, range(len(ctx.saved_tensors)))

    @staticmethod
    def jvp(ctx: Any, _first: None, _again: None, _leaves: None, *tangents: torch.Tensor | None) -> Any:
        run, trained = _restrict(ctx)
        full_tangents = []
        for i, tensor in trained.items():
            tangent = tangents[i]
            full_tangents.append(torch.zeros_like(tensor) if tangent is None else tangent)
        output_tangents = torch.func.jvp(run, tuple(trained.values()), tuple(full_tangents))[1]
        remaining = iter(output_tangents)
        return tuple(next(remaining) if is_trained else None for is_trained in ctx.trained_outputs)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        run_first: OnTensors,
        run_again: OnTensors,
        leaves: Leaves,
        *tensors: torch.Tensor,
    ) -> Any:
        batched = [
            torch.func.vmap(run, in_dims=in_dims[3:], randomness=info.randomness) for run in (run_first, run_again)
        ]
        outputs = _Remat.apply(*batched, leaves, *tensors)
        return outputs, (0,) * len(outputs)
