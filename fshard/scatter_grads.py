"""Verb 3: scatter_grads, from each rank's full gradients to reduced shards of them."""

from typing import Any

import torch

from fshard import comm
from fshard.collectives import Over, denominator, divided, linear_call, named, reduction_axes, shared_axes
from fshard.errors import Problem, refuse
from fshard.transforms.compose import pair, reduction, scatter
from fshard.transforms.state import ABSENT, Absent, joined, states_of
from fshard.tree import Sharded, Tree, flatten, grouped, is_sharded, is_trained, unflatten
from fshard.tree.checks import check_floating, check_local, check_no_gradient, describe, same_structure


def scatter_grads(
    grads: Tree,
    like: Tree,
    reduce: str = "mean",
    *,
    reduce_over: Over = None,
    count: torch.Tensor | None = None,
    transform_state: Tree | Absent = ABSENT,
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
    if reduce not in ("mean", "sum", "weighted") or (reduce == "weighted") != (count is not None):
        found = f"reduce={reduce!r} {'without' if count is None else 'with'} count"
        raise ValueError(f'scatter_grads: expected "mean", "sum", or "weighted" with count=, got {found}')
    if count is not None and (not isinstance(count, torch.Tensor) or count.dim() or count.is_complex()):
        raise ValueError(
            f"scatter_grads: expected count to be a real scalar tensor, got {describe(count)}; torch.tensor makes one"
        )
    if count is not None:
        check_no_gradient(count, "scatter_grads")
    flat, params = flatten(grads), flatten(like)
    same_structure("scatter_grads of gradients", flat, params)
    axes = reduction_axes(params, "scatter_grads", reduce_over)
    check_local("scatter_grads of `like`", params)
    check_floating("scatter_grads", params)
    problems = [
        Problem(path, *problem)
        for path, grad, param in zip(flat.paths, flat.leaves, params.leaves, strict=True)
        if (problem := _problem(grad, param))
    ]
    remedy = "pass the gradients of full leaves, as from torch.func.grad at fs.gather(like)"
    refuse("scatter_grads: gradients do not fit `like`", problems, remedy)
    states = states_of("scatter_grads", params, transform_state)
    shared = shared_axes(params, axes)
    comm.same_call("scatter_grads", shared, params, reduce=reduce, **named(axes, reduce_over))
    divisor = denominator(count, axes, reduce)
    leaves: list[Any] = list(flat.leaves)
    for i, param in enumerate(params.leaves):
        if not is_sharded(param):
            leaves[i] = None if leaves[i] is None else divided(leaves[i], divisor)
        elif param.spec.frozen:
            leaves[i] = None
    trained = [param if is_sharded(param) and is_trained(param) else None for param in params.leaves]
    for transform, group in grouped(trained, lambda param: param.spec.transform).items():
        specs = tuple(params.leaves[i].spec for i in group)
        full = [_or_zeros(leaves[i], params.leaves[i]) for i in group]
        paths = [flat.paths[i] for i in group]
        with comm.concerning((), paths):
            if reduction(transform).has_state:
                scattered, after = scatter(transform, full, specs, [states[i] for i in group])
                for i, state in zip(group, after, strict=True):
                    states[i] = state
            else:
                transpose, run = pair(transform, specs)
                scattered = linear_call(run, transpose, full)
        for i, spec, grad in zip(group, specs, scattered, strict=True):
            leaves[i] = Sharded(divided(grad.to(params.leaves[i].local.dtype), divisor), spec)
    reduced = unflatten(flat.treedef, leaves)
    return reduced if transform_state is ABSENT else (reduced, joined(params, states, transform_state))


def _problem(grad: Any, param: Any) -> tuple[str, str] | None:
    """Describe a gradient that does not fit its parameter, and the one expected."""
    if grad is None or (is_sharded(param) and param.spec.frozen):
        return None
    needed = param.spec.gathered_shape if is_sharded(param) else None if param is None else tuple(param.shape)
    if isinstance(grad, torch.Tensor) and tuple(grad.shape) == needed:
        return None
    return describe(grad), "None" if needed is None else f"a full tensor of shape {needed}"


def _or_zeros(grad: torch.Tensor | None, param: Sharded) -> torch.Tensor:
    return param.local.new_zeros(param.spec.gathered_shape) if grad is None else grad
