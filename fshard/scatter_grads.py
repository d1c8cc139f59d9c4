"""Verb 3: scatter_grads, from each rank's full gradients to reduced shards of them."""

from typing import Any

import torch

from fshard import comm
from fshard.collectives import Over, denominator, describe_reduce_over, divide, reduction_axes, shared_axes
from fshard.collectives.linear import linear_call
from fshard.errors import expect, refuse
from fshard.transforms.run import as_linear, check_results, start_scatter
from fshard.transforms.state import ABSENT, join_states, states_of
from fshard.transforms.structure import reduction
from fshard.tree import Flat, Sharded, Tree, flatten, grouped, is_sharded, is_trained, tree_map
from fshard.tree.checks import (
    check_count,
    check_dense,
    check_floating,
    check_local,
    check_reduce,
    describe,
    same_structure,
)


def scatter_grads(
    grads: Tree,
    like: Tree,
    reduce: str = "mean",
    *,
    reduce_over: Over = None,
    count: torch.Tensor | None = None,
    transform_state: Tree = ABSENT,
) -> Tree:
    """Reduce this rank's full gradients over ranks and keep its shards: the transpose of `gather`.

    Args:
        grads: Gradients of this rank's loss with respect to gathered parameters: full tensors in the structure of
            `like`. None counts as zeros, so that a rank which did not use a leaf still takes part; zeros come out where
            no rank did.
        like: The sharded parameters.
        reduce: "mean" over ranks, "sum", or "weighted": the sum divided by the sum of counts.
        reduce_over: As for `value_and_grad`: "mean" divides by the number of ranks of these axes, and counts are summed
            over them.
        count: For "weighted", how many items (tokens, samples) this rank's loss summed over: a scalar tensor.
        transform_state: The state of transforms that have one, as `fs.transform_state` makes it.

    Returns:
        Gradients in the structure of `like`: Sharded leaves of the same specs and dtypes, None where frozen. With
        `transform_state`, the pair of them and the new state.

    Raises:
        ValueError: before any collective, if structures or shapes differ, a gradient is sharded already, or
            `transform_state` is missing or not that of `like`.

    >>> import torch, fshard as fs
    >>> def program():
    ...     mesh = fs.init_mesh({"shard": -1}, device="cpu")
    ...     params = fs.shard({"w": torch.zeros(4)}, fs.fully_shard(mesh))
    ...     mine = {"w": torch.arange(4.0) + 10 * fs.axis_index(fs.axis_of(mesh))}
    ...     return fs.scatter_grads(mine, params)["w"].local.tolist()
    >>> fs.testing.spmd(program, world=2)
    [[5.0, 6.0], [7.0, 8.0]]
    """
    check_reduce(reduce, "scatter_grads")
    if reduce == "weighted":
        check_count(count, "scatter_grads")
    else:
        expect(count is None, "scatter_grads", 'reduce="weighted" for a count', repr(reduce))
    flat, params = flatten(grads), flatten(like)
    same_structure("scatter_grads of gradients", flat, params)
    axes = reduction_axes(params, "scatter_grads", reduce_over)
    check_local("scatter_grads of `like`", params)
    check_floating("scatter_grads", params)
    _check_shapes(flat, params)
    sharded = [grad if is_sharded(param) else None for grad, param in zip(flat.leaves, params.leaves, strict=True)]
    check_dense("scatter_grads", flat.paths, sharded)
    states = states_of("scatter_grads", params, transform_state)
    comm.check_same_call(
        "scatter_grads", shared_axes(params, axes), params, reduce=reduce, **describe_reduce_over(axes, reduce_over)
    )
    divisor = denominator(count, axes, reduce)
    sums = _scatter(flat, params, states) if params.specs else flat.leaves
    reduced = tree_map(lambda grad: divide(grad, divisor), flat.unflatten(sums))
    return reduced if transform_state is ABSENT else (reduced, join_states(params, states))


def _check_shapes(flat: Flat, params: Flat) -> None:
    def misfit(grad: Any, param: Any) -> tuple[str, str] | None:
        if grad is None or not is_trained(param):
            return None
        shape = param.spec.gathered_shape if is_sharded(param) else tuple(param.shape)
        if isinstance(grad, torch.Tensor) and grad.shape == shape:
            return None
        return describe(grad), f"a full tensor of shape {shape}"

    remedy = "pass the gradients of full leaves, as from torch.func.grad at fs.gather(like)"
    refuse("scatter_grads: gradients do not fit `like`", flat.problems(misfit, params.leaves), remedy)


def _scatter(flat: Flat, params: Flat, states: list[Tree]) -> list[Any]:
    """Reduce the gradients of Sharded leaves, and put new states of their transforms in the places of the old ones."""
    sums: list[Any] = [None] * len(flat.leaves)
    trained = [param if is_trained(param) else None for param in params.leaves]
    for transform, group in grouped(trained, lambda param: param.spec.transform).items():
        paths = [flat.paths[i] for i in group]
        leaves = [params.leaves[i] for i in group]
        specs = [leaf.spec for leaf in leaves]
        full = []
        for i, leaf in zip(group, leaves, strict=True):
            grad = flat.leaves[i]
            if grad is None:
                grad = leaf.local.new_zeros(leaf.spec.gathered_shape)
            full.append(grad)
        with comm.annotate_collectives((), paths):
            if reduction(transform).has_state:
                shards, after = start_scatter(transform, full, specs, [states[i] for i in group])()
                check_results(transform, "scatter", shards, paths, specs)
                for i, state in zip(group, after, strict=True):
                    states[i] = state
            else:
                shards = linear_call(as_linear(transform, specs, paths).to_transpose(), full)
        for i, leaf, shard in zip(group, leaves, shards, strict=True):
            sums[i] = Sharded(shard.to(leaf.local.dtype), leaf.spec)
    return sums
