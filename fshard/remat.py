"""remat: compute again in the backward rather than keep what a function saves."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from fshard import _compat
from fshard.checks import kind
from fshard.tree import Tree, tree_leaves, tree_map


def remat(f: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a function's arguments instead of what it computes on the way, and run it again in the backward.

    With `fs.gather` inside, full tensors are dropped after the forward and gathered again in the backward, under
    torch.func too. Follows jax.checkpoint; outside torch.func it is torch.utils.checkpoint.

    Args:
        f: A function of pytrees of tensors; under torch.func it must take everything that is differentiated as an
            argument. torch's random numbers are drawn again as they were.

    Returns:
        A function of the same arguments and result.

    Raises:
        ValueError: by the function returned, under torch.func, if `f` reaches a tensor that is differentiated otherwise
            than by its arguments.

    >>> torch.func.grad(remat(lambda x: x.sin().sum()))(torch.zeros(2))
    tensor([1., 1.])
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        if not _compat.transforms_active():
            return checkpoint(f, *args, use_reentrant=False, **kwargs)
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        structure: list[Tree] = []

        def flat(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            given = iter(tensors)
            again_args, again_kwargs = tree_map(
                lambda leaf: next(given) if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs)
            )
            out = f(*again_args, **again_kwargs)
            structure.append(out)
            return tuple(leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))

        outputs = iter(_Remat.apply(flat, *leaves))
        return tree_map(lambda leaf: next(outputs) if isinstance(leaf, torch.Tensor) else leaf, structure[0])

    return run


class _ArgumentsOnly(TorchFunctionMode):
    """Refuses operations on tensors that are differentiated and were not passed: their gradients would be lost."""

    def __init__(self, passed: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.passed = {id(tensor) for tensor in passed}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs or {})):
            if not isinstance(tensor, torch.Tensor) or id(tensor) in self.passed:
                continue
            if _compat.is_transformed(tensor) or (tensor.requires_grad and not torch.is_grad_enabled()):
                found = f"f reaches {kind(tensor)} that is differentiated and is not among its arguments"
                raise ValueError(
                    f"remat: {found}, needed all of them there; pass it too, or its gradient would be lost"
                )
        return func(*args, **(kwargs or {}))


class _Remat(Function):
    @staticmethod
    def forward(flat: Callable[..., Any], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with _ArgumentsOnly(tensors):
            out = flat(*tensors)
        return tuple(tensor.detach() if any(tensor is given for given in tensors) else tensor for tensor in out)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.flat, tensors = inputs[0], inputs[1:]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors
        floating = [i for i, tensor in enumerate(tensors) if tensor.is_floating_point() or tensor.is_complex()]

        def of_floating(*some: torch.Tensor) -> tuple[torch.Tensor, ...]:
            given = list(tensors)
            for i, tensor in zip(floating, some, strict=True):
                given[i] = tensor
            return ctx.flat(*given)

        _, pull_back, *_ = torch.func.vjp(of_floating, *(tensors[i] for i in floating))
        found: list[torch.Tensor | None] = [None] * len(tensors)
        for i, grad in zip(floating, pull_back(grads), strict=True):
            found[i] = grad
        return None, *found

    @staticmethod
    def jvp(ctx: Any, _flat: None, *tangents: torch.Tensor | None) -> Any:
        tensors = ctx.saved_tensors
        filled = [torch.zeros_like(x) if t is None else t for x, t in zip(tensors, tangents, strict=True)]
        return torch.func.jvp(ctx.flat, tuple(tensors), tuple(filled))[1]
