"""Runs of a transform: with states, as one node of autograd's graph, and with checks of what users' classes return."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fshard.collectives.linear import Linear, Variance
from fshard.errors import Problem, expect, refuse
from fshard.transforms.base import BuiltIn, ShardTransform, Specs, States, Tensors, foreign_names
from fshard.transforms.structure import reduction
from fshard.tree import Spec
from fshard.tree.checks import check_dense, describe

# Finishes a scatter, and returns its results and the new states.
PendingScatter = Callable[[], tuple[Tensors, States]]


def as_linear(transform: ShardTransform, specs: Specs, paths: Sequence[str]) -> Linear:
    """Make a gather as a linear map, one node of autograd's graph; its transpose scatters.

    Args:
        transform: The transform.
        specs: The leaves' specs. Shards vary or agree as their leaves are stored.
        paths: The leaves' paths.

    Returns:
        The map, whose transpose refuses a transform with a state.
    """

    def gather(leaves: Tensors) -> Tensors:
        full = transform.gather(leaves, specs)
        return check_results(transform, "gather", full, paths, specs, may_take_gradients(leaves))

    def scatter(grads: Tensors) -> Tensors:
        check_stateless(transform)
        check_dense("gather", paths, grads)
        shards, _ = start_scatter(transform, grads, specs, [])()
        return check_results(transform, "scatter", shards, paths, specs)

    variance = Variance("fs.gather", specs[0].scattered_axes, specs, result=True)
    return Linear(gather, scatter, variance)


def start_scatter(
    transform: ShardTransform,
    grads: Tensors,
    specs: Specs,
    states: States,
) -> PendingScatter:
    """Start to scatter by a transform with or without a state.

    Args:
        transform: The transform.
        grads: One tensor per leaf.
        specs: The leaves' specs.
        states: One state per leaf, None where the transform has none.

    Returns:
        A function that finishes, and returns what scatter returns, and the new states. Without a state these are
        `states`.
    """
    has_state = reduction(transform).has_state
    finish = transform.start_scatter(grads, specs, states) if has_state else transform.start_scatter(grads, specs)

    def finish_both() -> tuple[Tensors, States]:
        shards = finish()
        new_states = states
        if has_state:
            shards, new_states = check_number(transform, "scatter", shards, ("gradients", "states"))
            check_number(transform, "scatter", new_states, specs)
        return check_number(transform, "scatter", shards, specs), new_states

    return finish_both


def check_stateless(transform: ShardTransform) -> None:
    """Refuse a transform with a state where nobody can carry one."""
    if reduction(transform).has_state:
        remedy = (
            "Use fs.value_and_grad outside of vmap and of other derivatives, or differentiate by gathered parameters "
            "and call fs.scatter_grads(..., transform_state=...)."
        )
        raise ValueError(
            f"fs.gather: this strategy keeps a state between steps, which autograd cannot pass on. {remedy}"
        )


def may_take_gradients(shards: Tensors) -> bool:
    """Whether shards may take gradients: none of them was made in inference mode, as for an evaluation."""
    return not any(map(torch.is_inference, shards))


def check_number(transform: ShardTransform, half: str, results: Any, inputs: Sequence[Any]) -> Any:
    """Refuse results of a user's transform that are not as many as what it was given.

    Args:
        transform: The transform.
        half: "gather" or "scatter".
        results: What that returned.
        inputs: What it returns one value for each of.

    Returns:
        The results.

    Raises:
        ValueError: if there are more or fewer.
    """
    if isinstance(transform, BuiltIn):
        return results
    is_sequence = isinstance(results, list | tuple)
    fits = is_sequence and len(results) == len(inputs)
    got = f"{len(results)}" if is_sequence else describe(results)
    remedy = "return one for each leaf, in their order; with states the pair of gradients and states"
    expect(fits, f"{type(transform).__name__}.{half}", f"{len(inputs)} results", got, remedy)
    return results


def check_results(
    transform: ShardTransform,
    half: str,
    results: Tensors,
    paths: Iterable[str],
    specs: Iterable[Spec],
    has_gradients: bool = False,
) -> Tensors:
    """Refuse results of a user's transform that are no tensors of the right number and shapes.

    The results of fshard's own transforms pass through, and nothing is listed for them.

    Args:
        transform: The transform of some leaves.
        half: "gather" or "scatter".
        results: What that returned.
        paths: The leaves' paths.
        specs: The leaves' specs, which tell the shapes that results must have. Dims behind these are vmap's.
        has_gradients: Whether the results must be such as take gradients.

    Returns:
        The results.

    Raises:
        ValueError: with the path of every leaf whose result is wrong.
    """
    if not foreign_names(transform):
        return results
    paths = list(paths)
    check_number(transform, half, results, paths)
    problems = []
    for path, result, spec in zip(paths, results, specs, strict=True):
        shape = spec.gathered_shape if half == "gather" else spec.local_shape
        # Leaves that take no gradient may become anything.
        takes_any = half == "gather" and spec.frozen
        if not isinstance(result, torch.Tensor):
            problems.append(Problem(path, describe(result), "a tensor"))
        elif not takes_any and result.shape[: len(shape)] != shape:
            problems.append(Problem(path, describe(result), f"a tensor of shape {shape}"))
        elif has_gradients and result.is_inference():
            # Autograd would lose its gradient.
            problems.append(Problem(path, "one made in torch.inference_mode()", "a tensor that takes a gradient"))
    stored_as = "full leaf" if half == "gather" else "shard"
    remedy = f"let {half} return a tensor for each leaf, shaped as the {stored_as}"
    refuse(f"{' or '.join(foreign_names(transform))}.{half}: results do not fit", problems, remedy)
    return results
