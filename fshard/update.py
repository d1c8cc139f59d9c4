"""Verb 4: update, the pure optimizers and gradient transformations that it runs, and the state that it makes anew."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from fshard import _compat
from fshard.errors import Problem, expect, refuse
from fshard.transforms import transform_state
from fshard.transforms.state import ABSENT, Absent
from fshard.tree import (
    Flat,
    Sharded,
    Spec,
    Tree,
    dcp_error,
    flatten,
    is_sharded,
    is_trained,
    leaves_of,
    like,
    map_leaves,
    tensor_of,
    tensors_of,
)
from fshard.tree.checks import check_flags, describe, refuse_donated, same_structure


class Optimizer(NamedTuple):
    """A pair of pure functions that turns gradients into new parameters.

    Attributes:
        init: init(params) returns the optimizer's state.
        update: update(grads, state, params) returns (params, state). A parameter whose gradient is None stays as it is.
        update_donated: As `update`, and may write to the state and the parameters that it is given; None where the
            optimizer has no use for that.

    >>> import torch, fshard as fs
    >>> def update(grads, state, params):
    ...     return fs.tree_map(lambda p, g: p if g is None else p - 0.1 * g.sign(), params, grads), state
    >>> tx = fs.Optimizer(init=lambda params: (), update=update)
    >>> params = {"w": torch.ones(2)}
    >>> tx.update({"w": torch.tensor([5.0, -7.0])}, tx.init(params), params)[0]
    {'w': tensor([0.9000, 1.1000])}
    """

    init: Callable[[Tree], Tree]
    update: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]
    update_donated: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]] | None = None


class GradientTransformation(NamedTuple):
    """A pair of pure functions that turns gradients into other gradients, as in Optax.

    Attributes:
        init: init(params) returns the transformation's state.
        update: update(grads, state, params) returns (grads, state). Leaves are Sharded: this rank's parts, to be mapped
            over by `fs.tree_map`, which passes over gradients that are None. A norm of a whole leaf needs all ranks:
            take it by `leaf_norms`, or of all leaves together by `global_norm`, and not by `tensor.norm()`, which is of
            this rank's part. `fs.testing.check_optimizer` finds such mistakes.

    >>> import torch, fshard as fs
    >>> def update(grads, state, params):
    ...     return fs.tree_map(lambda grad, norm: grad / norm, grads, fs.leaf_norms(grads)), state
    >>> tx = fs.chain(fs.GradientTransformation(lambda params: (), update), fs.sgd(1.0))
    >>> params = {"w": torch.ones(2)}
    >>> tx.update({"w": torch.tensor([3.0, -4.0])}, tx.init(params), params)[0]
    {'w': tensor([0.4000, 1.8000])}
    """

    init: Callable[[Tree], Tree]
    update: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]


class TrainState(NamedTuple):
    """All that a train step reads and makes anew; a pytree, so that saving it saves everything.

    Attributes:
        step: Updates made so far: an int64 tensor of shape ().
        params: Parameters, with Sharded leaves.
        opt_state: The optimizer's state, sharded as the parameters are.
        buffers: The model's buffers by name.
        key: Random key of the run, or None.
        transform_state: State of the parameters' transforms, such as what a lossy scatter left out; mostly None.

    >>> import torch, fshard as fs
    >>> params = fs.shard({"w": torch.ones(2)}, fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")))
    >>> state = fs.TrainState.create(params, fs.sgd(0.1, momentum=0.9), key=7)
    >>> state.step, state.params, state.key
    (tensor(0), {'w': Sharded(float32[2], P(), local [2])}, tensor(7))
    """

    step: torch.Tensor
    params: Tree
    opt_state: Tree
    buffers: Tree
    key: torch.Tensor | None
    transform_state: Tree = None

    @classmethod
    def create(
        cls, params: Tree, tx: Optimizer, *, buffers: Tree = None, key: torch.Tensor | int | None = None
    ) -> "TrainState":
        """Make the state before the first step.

        Args:
            params: Parameters from `model.init` or `shard`.
            tx: The optimizer, whose `init` is called on them.
            buffers: The model's buffers, such as model.buffers.
            key: Random key of the run: a whole number, which the state holds as an int64 tensor of shape (), or a
                tensor of integers.

        Returns:
            The state, at step 0.

        Raises:
            ValueError: if the optimizer refuses the parameters.

        >>> import torch, fshard as fs
        >>> params = fs.shard({"w": torch.ones(2)}, fs.fully_shard(fs.init_mesh({"shard": -1}, device="cpu")))
        >>> state = fs.TrainState.create(params, fs.ema(fs.sgd(0.1), 0.9), key=7)
        >>> state.opt_state.average
        {'w': Sharded(float32[2], P('shard'), local [2])}
        """
        is_optimizer, remedy = callable(getattr(tx, "init", None)), "make one by fs.from_torch"
        expect(is_optimizer, "TrainState.create", "tx to be an Optimizer", describe(tx), remedy)
        key = None if key is None else torch.as_tensor(key)
        step = torch.zeros((), dtype=torch.int64)
        return cls(step, params, tx.init(params), buffers, key, transform_state(params))

    @property
    def __create_write_items__(self) -> Callable[[str, object], list[Any]]:
        """Asked for by torch.distributed.checkpoint, which would pickle this and keep what one rank has.

        Raises:
            AttributeError: where no leaf is Sharded, and nothing would be lost.
        """
        flat = flatten(self)
        sharded = [(path, leaf) for path, leaf in zip(flat.paths, flat.leaves, strict=True) if is_sharded(leaf)]
        if not sharded:
            raise AttributeError("__create_write_items__")
        path, leaf = sharded[0]

        def refuse(fqn: str, _: object) -> list[Any]:
            raise dcp_error(fqn + path, repr(leaf))

        return refuse


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
        donate: Whether `state` is donated, so that the next one may be written in its place: half the memory
            and no copies. Do not use the old state afterwards.
        transform_state: The state that `value_and_grad` or `scatter_grads` returned besides the gradients.

    Returns:
        The state after.

    Raises:
        ValueError: before any collective, if the gradients are not those of state.params, or tx is no optimizer;
            if its update does not return the pair (params, state).

    >>> import torch, fshard as fs
    >>> tx = fs.sgd(0.1)
    >>> params = fs.shard({"w": torch.ones(2)}, fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")))
    >>> state = fs.TrainState.create(params, tx)
    >>> _, grads = fs.value_and_grad(lambda p: fs.gather(p)["w"].sum())(state.params)
    >>> state = fs.update(tx, state, grads)
    >>> state.step, state.params["w"].local
    (tensor(1), tensor([0.9000, 0.9000]))
    """
    remedy = "end the chain with one, such as fs.from_torch"
    expect(isinstance(tx, Optimizer), "update", "tx to be an Optimizer", describe(tx), remedy)
    remedy = "make one by fs.TrainState.create"
    expect(isinstance(state, TrainState), "update", "state to be a TrainState", describe(state), remedy)
    check_flags("update", donate=donate)
    needed = flatten(state.params)
    _check_gradients(grads, needed)
    # In a trace it is for jit to say which tensors are written in place.
    step = step_of(tx, donate and not _compat.is_tracing())
    if step is tx.update_donated:
        state = state._replace(**_owned(state))
    params, opt_state = pair_of("params", step(grads, state.opt_state, state.params))
    same_structure("update: tx.update returns (params, state), and its params", flatten(params), needed)
    after = state._replace(step=state.step + 1, params=params, opt_state=opt_state)
    return after if transform_state is ABSENT else after._replace(transform_state=transform_state)


def step_of(tx: Optimizer | GradientTransformation, donate: bool) -> Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]:
    """Return the update of a transformation: an optimizer's donated one, where `donate` is set and there is one."""
    donated = tx.update_donated if donate and isinstance(tx, Optimizer) else None
    return donated or tx.update


def pair_of(name: str, out: Any) -> tuple[Tree, Tree]:
    """Refuse a result of an update that is no pair of a tree, which has a name, and the state."""
    fits, remedy = isinstance(out, tuple) and len(out) == 2, "return both, the state also where it is empty"
    expect(fits, "update", f"tx.update to return the pair ({name}, state)", describe(out), remedy)
    return out


def _owned(state: TrainState) -> dict[str, Tree]:
    """Copy the tensors that an update writes to where other tensors share their memory, as those of fs.gather do."""
    written = {"params": state.params, "opt_state": state.opt_state}
    # The average of a frozen parameter is that parameter itself, and nothing is written to it.
    params = leaves_of(state.params)
    frozen = {id(leaf.local) for leaf in params if isinstance(leaf, Sharded) and leaf.spec.frozen}
    tensors = tensors_of(leaves_of(written))
    tensors = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor) and id(tensor) not in frozen]
    pairs = zip(tensors, _compat.share_memory(tensors), strict=True)
    copies = {id(tensor): tensor.detach().clone() for tensor, shared in pairs if shared}

    def owned(leaf: Any) -> Any:
        copy = copies.get(id(tensor_of(leaf)))
        return leaf if copy is None else like(leaf, copy)

    return map_leaves(owned, written) if copies else written


def chain(*transformations: GradientTransformation | Optimizer) -> Any:
    """Run gradient transformations one after another, as optax.chain does.

    Args:
        *transformations: Gradient transformations, left to right, and an optimizer as the last one.

    Returns:
        The Optimizer; without one at the end, a GradientTransformation.

    Raises:
        ValueError: if an optimizer stands anywhere but last, or something is neither.

    >>> import torch, fshard as fs
    >>> tx = fs.chain(fs.clip_by_value(1.0), fs.sgd(0.1))
    >>> params = {"w": torch.ones(2)}
    >>> tx.update({"w": torch.tensor([5.0, -0.5])}, tx.init(params), params)[0]
    {'w': tensor([0.9000, 1.0500])}
    """
    for part in transformations:
        known = isinstance(part, GradientTransformation | Optimizer)
        expect(known, "chain", "gradient transformations and an Optimizer at the end", describe(part))
    last = not any(isinstance(part, Optimizer) for part in transformations[:-1])
    remedy = "it returns parameters, not gradients"
    expect(last, "chain", "an optimizer at the end alone", "one before it", remedy)

    def init(params: Tree) -> Tree:
        return tuple(part.init(params) for part in transformations)

    def run(grads: Tree, state: Tree, params: Tree, donate: bool = False) -> tuple[Tree, Tree]:
        check_states("chain", state, len(transformations))
        states = []
        for part, part_state in zip(transformations, state, strict=True):
            name = "params" if isinstance(part, Optimizer) else "grads"
            grads, part_state = pair_of(name, step_of(part, donate)(grads, part_state, params))
            states.append(part_state)
        return grads, tuple(states)

    if transformations and isinstance(transformations[-1], Optimizer):
        return Optimizer(init, run, partial(run, donate=True))
    return GradientTransformation(init, run)


def check_states(what: str, state: Any, number: int) -> None:
    """Refuse a state that is no tuple of as many states as there are parts."""
    found = f"a tuple of {len(state)}" if isinstance(state, tuple) else describe(state)
    fits, remedy = isinstance(state, tuple) and len(state) == number, "update with the optimizer that made the state"
    expect(fits, what, f"the state to be a tuple of {number}", found, remedy)


def _check_gradients(grads: Tree, needed: Flat) -> None:
    found = flatten(grads)
    same_structure("update with gradients", found, needed)
    rows = zip(found.paths, found.leaves, needed.leaves, strict=True)
    problems = [
        Problem(path, *misfit) for path, grad, param in rows if grad is not None and (misfit := _misfit(grad, param))
    ]
    if problems:
        refuse_donated("update", needed)
    remedy = "pass what fs.scatter_grads(grads, like=state.params) or fs.value_and_grad returned"
    refuse("update: gradients do not fit the parameters", problems, remedy)


def _misfit(grad: Any, param: Any) -> tuple[str, str] | None:
    """Describe a gradient that does not fit its parameter, and the one expected."""
    if isinstance(param, Sharded) and isinstance(grad, Sharded) and not param.spec.frozen:
        if grad.spec is not param.spec and grad.spec != param.spec:
            return _differences(grad.spec, param.spec)
        found, needed = grad.local, param.local
        same = found.shape == needed.shape and found.dtype == needed.dtype
        return None if same else (f"{describe(found)} as shard", describe(needed))
    if not is_trained(param):
        return "a gradient", f"None for {'None' if param is None else 'a frozen leaf'}"
    same = not is_sharded(param) and isinstance(grad, torch.Tensor) and grad.shape == param.shape
    return None if same else (describe(grad), describe(param))


def _differences(found: Spec, needed: Spec) -> tuple[str, str]:
    """Describe where two specs differ; their transforms, which are long, only where nothing else does."""

    def parts(spec: Spec) -> list[str]:
        axes = ", ".join(f"{axis.name}={axis.size} in group {axis.group_name!r}" for axis in spec.axes)
        return [f"shape {spec.shape}", f"{spec.partition!r}", f"axes {axes}", f"frozen={spec.frozen}"]

    pairs = [(a, b) for a, b in zip(parts(found), parts(needed), strict=True) if a != b]
    texts = f"transform {found.transform}", f"transform {needed.transform}"
    if texts[0] == texts[1]:
        remedy = "define its class once, outside of functions, as a frozen dataclass"
        texts = f"an unequal one of the same text ({remedy})", texts[1]
    pairs = pairs or [texts]
    return tuple("; ".join(side) for side in zip(*pairs, strict=True))  # type: ignore[return-value]
