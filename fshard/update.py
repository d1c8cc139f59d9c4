"""Verb 4: update, and the pure optimizers and gradient transformations that it runs."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from fshard import _compat
from fshard.checks import check_flags, kind, refuse_given_up, same_structure
from fshard.errors import Problem, leaf_error
from fshard.train_state import TrainState
from fshard.transform_state import ABSENT, Absent
from fshard.tree import Flat, Spec, Tree, Treedef, flatten, is_sharded, tree_leaves, tree_map


class Optimizer(NamedTuple):
    """A pair of pure functions that turns gradients into new parameters.

    Attributes:
        init: init(params) returns the optimizer's state.
        update: update(grads, state, params) returns (params, state).
        update_donated: As `update`, and may write to the state and the parameters that it is given; None where the
            optimizer has no use for that.
        resume: As `update_donated`, where it can go on from what that returned last, and the gradients fit, which it
            sees for itself; None, with nothing changed, elsewhere.
    """

    init: Callable[[Tree], Tree]
    update: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]
    update_donated: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]] | None = None
    resume: Callable[[Tree, Tree, Tree], tuple[Tree, Tree] | None] | None = None


class GradientTransformation(NamedTuple):
    """A pair of pure functions that turns gradients into other gradients, as in Optax.

    Attributes:
        init: init(params) returns the transformation's state.
        update: update(grads, state, params) returns (grads, state).
    """

    init: Callable[[Tree], Tree]
    update: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]


def update(
    tx: Optimizer,
    state: TrainState,
    grads: Tree,
    *,
    donate: bool = False,
    transform_state: Tree | Absent = ABSENT,
) -> TrainState:
    """Make the next state from reduced gradients: new parameters, new optimizer state, one step more.

    Args:
        tx: The optimizer that `state` was created with.
        state: The state before; nothing in it changes unless it is donated.
        grads: Sharded gradients from `scatter_grads` or `value_and_grad`. A leaf whose gradient is None stays as it is,
            and so does all that the optimizer keeps for it, as under torch.optim.
        donate: Whether the caller gives up `state`, so that the next one may be written in its place: half the memory
            and no copies. Do not use the old state afterwards.
        transform_state: What `value_and_grad` or `scatter_grads` returned besides the gradients, for the next step.

    Returns:
        The state after.

    Raises:
        ValueError: before any collective, if the gradients are not those of state.params, or tx is no optimizer.
    """
    if not isinstance(tx, Optimizer):
        raise ValueError(
            f"update: expected tx to be an Optimizer, got {kind(tx)}; end the chain with one, such as fs.from_torch"
        )
    if not isinstance(state, TrainState):
        raise ValueError(
            f"update: expected state to be a TrainState, got {kind(state)}; make one by fs.TrainState.create"
        )
    check_flags("update", donate=donate)
    # In a trace it is for jit to say what is written in place.
    donate = donate and not _compat.is_tracing()
    done = tx.resume(grads, state.opt_state, state.params) if donate and tx.resume else None
    if done is None:
        _check_gradients(grads, state.params)
        run = tx.update
        if donate and tx.update_donated:
            run, state = tx.update_donated, state._replace(**_owned(state))
        done = run(grads, state.opt_state, state.params)
    params, opt_state = done
    after = state._replace(step=state.step + 1, params=params, opt_state=opt_state)
    return after if transform_state is ABSENT else after._replace(transform_state=transform_state)


def _owned(state: TrainState) -> dict[str, Tree]:
    """What an update writes to, copied where its memory is that of other tensors too, such as fs.gather returns."""
    written = {"params": state.params, "opt_state": state.opt_state}
    tensors = [leaf for leaf in tree_leaves(written) if isinstance(leaf, torch.Tensor)]
    copies = {
        id(tensor): tensor.detach().clone()
        for tensor, shared in zip(tensors, _compat.share_memory(tensors), strict=True)
        if shared
    }
    return tree_map(lambda leaf: copies.get(id(leaf), leaf), written) if copies else written


def chain(*transformations: GradientTransformation | Optimizer) -> Any:
    """Run gradient transformations one after another, as optax.chain does.

    Args:
        *transformations: Gradient transformations, left to right, and an optimizer as the last one.

    Returns:
        The Optimizer; without one at the end, a GradientTransformation.

    Raises:
        ValueError: if an optimizer stands anywhere but last, or something is neither.
    """
    for part in transformations:
        if not isinstance(part, GradientTransformation | Optimizer):
            raise ValueError(f"chain: expected gradient transformations and an Optimizer at the end, got {kind(part)}")
    if any(isinstance(part, Optimizer) for part in transformations[:-1]):
        raise ValueError(
            "chain: expected an optimizer at the end alone, got one before it; it returns parameters, not gradients"
        )

    def init(params: Tree) -> Tree:
        return tuple(part.init(params) for part in transformations)

    def run(grads: Tree, state: Tree, params: Tree, donate: bool = False) -> tuple[Tree, Tree]:
        if not isinstance(state, tuple) or len(state) != len(transformations):
            found = f"a tuple of {len(state)}" if isinstance(state, tuple) else kind(state)
            remedy = "update with the optimizer that made the state"
            raise ValueError(
                f"chain: expected the state to be a tuple of {len(transformations)}, got {found}; {remedy}"
            )
        states = []
        for part, part_state in zip(transformations, state, strict=True):
            donated = part.update_donated if donate and isinstance(part, Optimizer) else None
            grads, part_state = (donated or part.update)(grads, part_state, params)
            states.append(part_state)
        return grads, tuple(states)

    if transformations and isinstance(transformations[-1], Optimizer):
        return Optimizer(init, run, partial(run, donate=True))
    return GradientTransformation(init, run)


class Targets(NamedTuple):
    """Tensors of parameters that a torch optimizer steps, so that gradients can be checked as they are given to it.

    Attributes:
        treedef: Structure of the parameters.
        tensors: For each leaf the tensor whose grad is set, or None where the leaf takes no gradient.
        specs: For each leaf the spec that its gradient has, or None.
    """

    treedef: Treedef
    tensors: list[Any]
    specs: list[Spec | None]

    @classmethod
    def of(cls, params: Flat) -> "Targets":
        """The leaves' own tensors."""
        leaves: list[Any] = [None if is_sharded(leaf) and leaf.spec.frozen else leaf for leaf in params.leaves]
        specs = [leaf.spec if is_sharded(leaf) else None for leaf in leaves]
        return cls(params.treedef, [leaf.local if is_sharded(leaf) else leaf for leaf in leaves], specs)

    def take(self, grads: Tree) -> bool:
        """Set every grad; False, and none set, unless all gradients fit, with the very specs of the parameters."""
        try:
            if self._set(self.treedef.flatten_up_to(grads)):
                return True
        except (AttributeError, RuntimeError, TypeError, ValueError):
            # Another structure, or no leaf of the kind needed; and torch itself refuses another shape, dtype or device.
            pass
        for tensor in self.tensors:
            if tensor is not None:
                tensor.grad = None
        return False

    def _set(self, grads: list[Any]) -> bool:
        for tensor, spec, grad in zip(self.tensors, self.specs, grads, strict=True):
            if spec is not None:
                if grad.spec is not spec:
                    return False
                grad = grad.local
            elif tensor is grad is None:
                continue
            tensor.grad = grad
            if not grad.is_contiguous():
                tensor.grad = grad.contiguous()
        return True


def _check_gradients(grads: Tree, params: Tree) -> None:
    found, needed = flatten(grads), flatten(params)
    same_structure("update with gradients", found, needed)
    triples = zip(found.paths, found.leaves, needed.leaves, strict=True)
    problems = [Problem(path, *problem) for path, grad, param in triples if (problem := _problem(grad, param))]
    if problems:
        refuse_given_up("update", needed)
        raise leaf_error(
            "update: gradients do not fit the parameters",
            problems,
            "pass what fs.scatter_grads(grads, like=state.params) or fs.value_and_grad returned",
        )


def _problem(grad: Any, param: Any) -> tuple[str, str] | None:
    """What is there and what was expected, where a gradient does not fit its parameter."""
    if grad is None:
        # Nobody used it.
        return None
    if param is None or (is_sharded(param) and param.spec.frozen):
        return "a gradient", f"None for {'a frozen leaf' if is_sharded(param) else 'None'}"
    if is_sharded(param) != is_sharded(grad):
        return kind(grad), kind(param)
    if not is_sharded(param):
        same = isinstance(grad, torch.Tensor) and grad.shape == param.shape
        return None if same else (kind(grad), kind(param))
    if grad.spec is not param.spec and grad.spec != param.spec:
        return _differences(grad.spec, param.spec)
    if grad.local.shape != param.local.shape or grad.local.dtype != param.local.dtype:
        return f"{kind(grad.local)} as shard", kind(param.local)
    return None


def _differences(found: Spec, needed: Spec) -> tuple[str, str]:
    """What two specs say differently; the transforms alone, which are long, where they agree otherwise."""

    def parts(spec: Spec) -> list[str]:
        axes = ", ".join(f"{axis.name}={axis.size} in group {axis.group_name!r}" for axis in spec.axes)
        return [f"shape {spec.shape}", f"{spec.partition!r}", f"axes {axes}", f"frozen={spec.frozen}"]

    pairs = [(a, b) for a, b in zip(parts(found), parts(needed), strict=True) if a != b]
    pairs = pairs or [(f"transform {found.transform}", f"transform {needed.transform}")]
    return tuple("; ".join(side) for side in zip(*pairs, strict=True))  # type: ignore[return-value]
