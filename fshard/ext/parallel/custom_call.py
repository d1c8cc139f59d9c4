"""custom_call: a function of tensors with a backward of its own, both of which communicate."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Function

import fshard as fs
from fshard.extend import Variance, annotate_collectives, any_dual, record_on_tape, run_on_tape, transforms_active

Tensors = Sequence[torch.Tensor]
# Maps tensors to outputs, and to what the backward needs: of these it gets the cotangents of the tensors.
Forward = Callable[[Tensors], tuple[Tensors, Sequence[torch.Tensor | None]]]
Backward = Callable[[Any, Tensors], Sequence[torch.Tensor | None]]


class _CustomCall(Function):
    @staticmethod
    def forward(
        ctx: Any, forward: Forward, backward: Backward, variance: Variance, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        # fs.check knows by this name a node that may hide collectives.
        ctx.run_backward = backward
        ctx.variance = variance
        # Graphs made inside get their own tape. The name is part of each message's tag, so ranks with different
        # arguments are told which differ.
        with record_on_tape(), annotate_collectives((variance.name,)):
            outputs, saved = forward(tensors)
        ctx.save_for_backward(*saved)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return None, None, None, *ctx.run_backward(ctx.saved_tensors, grads)


def custom_call(
    forward: Forward,
    backward: Backward,
    tensors: Tensors,
    api_name: str,
    axis: fs.Axis,
    *,
    plain: Callable[[Tensors], Tensors] | None = None,
    remedy: str,
) -> list[torch.Tensor]:
    """Call a function of tensors whose forward and backward both communicate, on the tape of the call that runs.

    Both may call collectives, and neither is recorded by autograd. One autograd node.
    Operands and outputs vary between the ranks of the axis, as `fs.check` knows.

    Args:
        forward: Maps the tensors to outputs, which are new, and to what is saved for the backward: inputs, outputs,
            others, or None.
        backward: Maps what was saved, and cotangents of the outputs, to cotangents of the tensors; None for zeros.
        tensors: The operands, floating.
        api_name: The function's name, with all arguments that must be equal on every rank.
        axis: The axis that it communicates over.
        plain: The same function, made of operations that are differentiable to any order. It is called instead under
            torch.func and with tangents.
        remedy: What the caller can do about the error.

    Returns:
        The outputs.

    Raises:
        ValueError: if more than a first derivative in reverse mode is asked for, but by torch.func with `plain`.
    """

    def refuse_if(unsupported: bool) -> None:
        if unsupported:
            raise ValueError(
                f"{api_name} supports first derivatives by value_and_grad or backward() only, and was used under "
                f"torch.func, in a jvp or in a second derivative; {remedy}"
            )

    def run_backward(saved: Any, grads: Tensors) -> Sequence[torch.Tensor | None]:
        refuse_if(torch.is_grad_enabled() or transforms_active())
        return backward(saved, grads)

    if transforms_active() or any_dual(tensors):
        refuse_if(plain is None)
        return list(plain(tensors))  # type: ignore[misc]
    variance = Variance(api_name, (axis,), operand=True, result=True)
    return run_on_tape(
        lambda tensors: list(_CustomCall.apply(forward, run_backward, variance, *tensors)),
        tensors,
        axis,
    )


def differentiate(
    out: torch.Tensor,
    cotangent: torch.Tensor,
    inputs: Tensors,
    tokens: Tensors,
) -> list[torch.Tensor | None]:
    """Differentiate a result that was computed on a tape, so that every rank runs the transposes in the same order.

    Args:
        out: The result.
        cotangent: Its cotangent.
        inputs: Tensors that it may have been computed from.
        tokens: The tokens of the tape. The first one is an input of the graph, and the others are results.

    Returns:
        A gradient for each input; None for one that requires none, or that nothing was computed from.
    """
    results = [token for token in (out, *tokens[1:]) if token.requires_grad]
    sources = [tensor for tensor in (*inputs, *tokens[:1]) if tensor.requires_grad]
    if not (results and sources):
        return [None] * len(inputs)
    cotangents = [cotangent if result is out else torch.zeros_like(result) for result in results]
    grads = iter(torch.autograd.grad(results, sources, cotangents, allow_unused=True))
    return [next(grads) if tensor.requires_grad else None for tensor in inputs]
