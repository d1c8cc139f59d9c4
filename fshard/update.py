"""Verb 4: update, and the pure optimizers and gradient transformations that it runs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fshard.checks import same_structure
from fshard.errors import Problem, leaf_error
from fshard.train_state import TrainState
from fshard.tree import Tree, flatten, is_sharded


class Optimizer(NamedTuple):
    """A pair of pure functions that turns gradients into new parameters.

    Attributes:
        init: init(params) returns the optimizer's state.
        update: update(grads, state, params) returns (params, state).
    """

    init: Callable[[Tree], Tree]
    update: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]


class GradientTransformation(NamedTuple):
    """A pair of pure functions that turns gradients into other gradients, as in Optax.

    Attributes:
        init: init(params) returns the transformation's state.
        update: update(grads, state, params) returns (grads, state).
    """

    init: Callable[[Tree], Tree]
    update: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]


def update(tx: Optimizer, state: TrainState, grads: Tree) -> TrainState:
    """Make the next state from reduced gradients: new parameters, new optimizer state, one step more.

    Args:
        tx: The optimizer that `state` was created with.
        state: The state before; nothing in it changes.
        grads: Sharded gradients from `scatter_grads` or `value_and_grad`.

    Returns:
        The state after.

    Raises:
        ValueError: before any collective, if the gradients are not those of state.params, or tx is no optimizer.
    """
    if not isinstance(tx, Optimizer):
        found = type(tx).__name__
        raise ValueError(f"update: tx is a {found}, needed an Optimizer; end the chain with one, such as fs.from_torch")
    _check_gradients(grads, state.params)
    params, opt_state = tx.update(grads, state.opt_state, state.params)
    return state._replace(step=state.step + 1, params=params, opt_state=opt_state)


def chain(*transformations: GradientTransformation | Optimizer) -> Any:
    """Run gradient transformations one after another, as optax.chain does.

    Args:
        *transformations: Gradient transformations, left to right, and an optimizer as the last one.

    Returns:
        The Optimizer; without one at the end, a GradientTransformation.

    Raises:
        ValueError: if an optimizer stands anywhere but last.
    """
    if any(isinstance(part, Optimizer) for part in transformations[:-1]):
        raise ValueError("chain: an optimizer stands before the end, needed last; it returns parameters, not gradients")

    def init(params: Tree) -> Tree:
        return tuple(part.init(params) for part in transformations)

    def run(grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        states = []
        for part, part_state in zip(transformations, state, strict=True):
            grads, part_state = part.update(grads, part_state, params)
            states.append(part_state)
        return grads, tuple(states)

    ends = bool(transformations) and isinstance(transformations[-1], Optimizer)
    return (Optimizer if ends else GradientTransformation)(init, run)


def _check_gradients(grads: Tree, params: Tree) -> None:
    found, needed = flatten(grads), flatten(params)
    same_structure("update with gradients", found, needed)
    triples = zip(found.paths, found.leaves, needed.leaves, strict=True)
    problems = [Problem(path, *problem) for path, grad, param in triples if (problem := _problem(grad, param))]
    if problems:
        raise leaf_error(
            "update: gradients do not fit the parameters",
            problems,
            "pass what fs.scatter_grads(grads, like=state.params) or fs.value_and_grad returned",
        )


def _problem(grad: Any, param: Any) -> tuple[str, str] | None:
    """What was found and what was needed, where a gradient does not fit its parameter."""
    if is_sharded(param) and param.spec.frozen:
        return None if grad is None else ("a gradient", "None for a frozen leaf")
    if is_sharded(param) != is_sharded(grad):
        return _kind(grad), _kind(param)
    if not is_sharded(param):
        same = isinstance(grad, torch.Tensor) and grad.shape == param.shape
        return None if same else (_kind(grad), _kind(param))
    if grad.spec != param.spec:
        return f"a gradient of {_layout(grad.spec)}", _layout(param.spec)
    if grad.local.shape != param.local.shape or grad.local.dtype != param.local.dtype:
        return f"{grad.local.dtype} of {tuple(grad.local.shape)}", f"{param.local.dtype} of {tuple(param.local.shape)}"
    return None


def _kind(leaf: Any) -> str:
    if is_sharded(leaf):
        return "a Sharded leaf"
    return f"a full tensor of {tuple(leaf.shape)}" if isinstance(leaf, torch.Tensor) else f"a {type(leaf).__name__}"


def _layout(spec: Any) -> str:
    axes = ", ".join(f"{axis.name}={axis.size} in group {axis.group_name!r}" for axis in spec.axes)
    return f"shape {spec.shape}, {spec.partition!r} over {axes} by {spec.transform}"
