"""value_and_grad: the loss and its sharded, reduced gradients in one call."""

from collections.abc import Callable
from typing import Any

import torch

from fshard.checks import check_floating, check_local, check_loss, check_reduce, kind, refuse_writes
from fshard.collectives import denominator, divided, reduction_axes, total
from fshard.tree import Sharded, Tree, flatten, is_sharded, tree_leaves, tree_map, unflatten


def value_and_grad(f: Callable[..., Any], *, reduce: str = "mean", has_aux: bool = False) -> Callable[..., Any]:
    """Turn a local loss into a function of its objective and the gradients, sharded as the parameters are.

    `f` gets the sharded parameters and gathers where it needs them, by `model.apply` or `fs.gather`. It may compute on
    shards before; a leaf that ranks hold whole it must gather, or `fs.pvary`, because its gradient is summed there. In
    one line this is torch.func.grad_and_value(lambda p: fs.objective(f(fs.gather(p)), like=p))(params), except that
    gradients are summed before they are divided, as `scatter_grads` does. Follows jax.value_and_grad.

    Args:
        f: Called as f(params, *args, **kwargs); returns this rank's scalar loss, or (sum, count) for "weighted".
        reduce: "mean" over ranks, "sum", or "weighted": sum of sums divided by the sum of counts.
        has_aux: Whether f returns (loss, aux) instead; aux is any tree of tensors and stays this rank's own.

    Returns:
        A function of f's arguments. It returns (objective, grads), or ((objective, aux), grads): the objective is equal
        on every rank; grads have the parameters' structure, specs and dtypes, and None where a leaf is frozen.

    Raises:
        ValueError: if `reduce` is unknown; by the function returned, if the loss does not fit it, a leaf that takes a
            gradient is not floating, leaves are plain among Sharded ones, or `f` wrote to a parameter.
    """
    check_reduce(reduce, "value_and_grad")

    def run(params: Tree, *args: Any, **kwargs: Any) -> tuple[Any, Tree]:
        flat = flatten(params)
        check_local("value_and_grad", flat)
        axes = reduction_axes(params, "value_and_grad")
        trained = [i for i, leaf in enumerate(flat.leaves) if _takes_gradient(leaf)]
        check_floating("value_and_grad", flat)
        parts: list[Tree] = []

        def local(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
            leaves = list(flat.leaves)
            for i, tensor in zip(trained, tensors, strict=True):
                leaves[i] = Sharded(tensor, leaves[i].spec) if is_sharded(leaves[i]) else tensor
            out = f(unflatten(flat.treedef, leaves), *args, **kwargs)
            if has_aux and not (isinstance(out, tuple) and len(out) == 2):
                raise ValueError(
                    f"value_and_grad: f returned {kind(out)}, needed the pair (loss, aux) for has_aux=True"
                )
            loss, aux = out if has_aux else (out, None)
            check_loss(loss, reduce, "value_and_grad")
            value, count = loss if reduce == "weighted" else (loss, None)
            # torch.func carries tensors alone out of the transform; the rest of the tree waits here.
            parts.append((count, aux))
            return value, [leaf for leaf in tree_leaves((count, aux)) if isinstance(leaf, torch.Tensor)]

        tensors = [_tensor(flat.leaves[i]) for i in trained]
        with refuse_writes("value_and_grad", [flat.paths[i] for i in trained], tensors):
            grads, (value, outputs) = torch.func.grad_and_value(local, has_aux=True)(tensors)
        carried = iter(outputs)
        count, aux = tree_map(lambda leaf: next(carried) if isinstance(leaf, torch.Tensor) else leaf, parts.pop())
        divisor = denominator(count, axes, reduce)
        leaves: list[Any] = [None] * len(flat.leaves)
        for i, grad in zip(trained, grads, strict=True):
            leaves[i] = divided(grad, divisor)
            if is_sharded(flat.leaves[i]):
                leaves[i] = Sharded(leaves[i], flat.leaves[i].spec)
        value = divided(total(value, axes), divisor)
        return ((value, aux) if has_aux else value), unflatten(flat.treedef, leaves)

    return run


def _takes_gradient(leaf: Any) -> bool:
    return not leaf.spec.frozen if is_sharded(leaf) else leaf is not None


def _tensor(leaf: Any) -> Any:
    return leaf.local if is_sharded(leaf) else leaf
