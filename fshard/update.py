"""Verb 4: update, the pure optimizers and gradient transformations that it runs, and the state that it makes anew."""

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Integral
from typing import Any, NamedTuple

import torch

from fshard import _compat, comm
from fshard.errors import expect, refuse
from fshard.shard import find_copy_target, pin_leaf
from fshard.transforms import transform_state
from fshard.transforms.state import ABSENT
from fshard.tree import (
    Flat,
    Sharded,
    Tree,
    attributes_of,
    flatten,
    is_sharded,
    is_tensor,
    is_trained,
    leaves_like,
    leaves_of,
    map_leaves,
    map_nodes,
    tensor_of,
    tensors_of,
)
from fshard.tree.checks import (
    check_flags,
    check_local,
    describe,
    explain_donation,
    mark_donated,
    refuse_frozen_counters,
    same_structure,
)
from fshard.tree.specs import describe_difference

Updated = tuple[Tree, Any]
Update = Callable[[Tree, Tree, Tree], Updated]

# The gradients that `chain` makes at a time for an optimizer that updates leaf by leaf, but for one larger gradient.
BLOCK_BYTES = 32 * 2**20


class Optimizer(NamedTuple):
    """A pair of pure functions that turns gradients into new parameters.

    Attributes:
        init: init(params) returns the optimizer's state.
        update: update(grads, state, params) returns (params, state). A parameter whose gradient is None stays as it is.
        update_donated: As `update`, and may write to the state and the parameters that it is given; None where the
            optimizer has no use for that.
        is_leafwise: Whether an update of a leaf depends on that leaf alone, and sends nothing. `chain` may then update
            some leaves at a time: all others have no gradient, and must stay the same objects.

    >>> import torch, fshard as fs
    >>> def update(grads, state, params):
    ...     return fs.tree_map(lambda p, g: p if g is None else p - 0.1 * g.sign(), params, grads), state
    >>> tx = fs.Optimizer(init=lambda params: (), update=update)
    >>> params = {"w": torch.ones(2)}
    >>> tx.update({"w": torch.tensor([5.0, -7.0])}, tx.init(params), params)[0]
    {'w': tensor([0.9000, 1.1000])}
    """

    init: Callable[[Tree], Tree]
    update: Update
    update_donated: Update | None = None
    is_leafwise: bool = False


class GradientTransformation(NamedTuple):
    """A pair of pure functions that turns gradients into other gradients, as in Optax.

    Attributes:
        init: init(params) returns the transformation's state.
        update: update(grads, state, params) returns (grads, state). Leaves are Sharded: this rank's parts, to be mapped
            over by `fs.tree_map`, which passes over gradients that are None. A norm of a whole leaf needs all ranks:
            take it by `leaf_norms`, or of all leaves together by `global_norm`, and not by `tensor.norm()`, which is of
            this rank's part. `fs.testing.check_optimizer` finds such mistakes.
        bind: bind(grads, params) does once what needs all gradients, such as taking their norm, and returns the
            function that makes new ones, also of a tree where most are None. Just before a leafwise optimizer, `chain`
            calls it instead of `update`, and so never holds all new gradients. The state must stay as it is.

    >>> import torch, fshard as fs
    >>> def update(grads, state, params):
    ...     return fs.tree_map(lambda grad, norm: grad / norm, grads, fs.leaf_norms(grads)), state
    >>> tx = fs.chain(fs.GradientTransformation(lambda params: (), update), fs.sgd(1.0))
    >>> params = {"w": torch.ones(2)}
    >>> tx.update({"w": torch.tensor([3.0, -4.0])}, tx.init(params), params)[0]
    {'w': tensor([0.4000, 1.8000])}
    """

    init: Callable[[Tree], Tree]
    update: Update
    bind: Callable[[Tree, Tree], Callable[[Tree], Tree]] | None = None


# The remedy where there is no optimizer.
CHAINED = "end the chain with one, such as fs.from_torch(torch.optim.AdamW, lr=1e-3)"


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
            buffers: The model's buffers, such as model.buffers. A step that donates the state donates them too.
            key: Random key of the run: a whole number, which the state holds as an int64 tensor of shape (), or a
                tensor of integers.

        Returns:
            The state, at step 0.

        Raises:
            ValueError: if the optimizer refuses the parameters, `tx` is no optimizer, or `key` is something else.

        >>> import torch, fshard as fs
        >>> params = fs.shard({"w": torch.ones(2)}, fs.fully_shard(fs.init_mesh({"shard": -1}, device="cpu")))
        >>> state = fs.TrainState.create(params, fs.ema(fs.sgd(0.1), 0.9), key=7)
        >>> state.opt_state.average
        {'w': Sharded(float32[2], P('shard'), local [2])}
        """
        expect(isinstance(tx, Optimizer), "TrainState.create", "tx to be an Optimizer", describe(tx), CHAINED)
        is_key = isinstance(key, Integral | torch.Tensor | None)
        expect(is_key, "TrainState.create", "key to be a whole number or a tensor of them", describe(key))
        key = None if key is None else torch.as_tensor(key)
        step = torch.zeros((), dtype=torch.int64)
        return cls(step, params, tx.init(params), buffers, key, transform_state(params))

    def __create_write_items__(self, fqn: str, _: object) -> list[Any]:
        """Called by torch.distributed.checkpoint, which would pickle this and keep what one rank has.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "torch.distributed.checkpoint.save would keep the shards of one rank only. Save "
            f"{fqn!r} with fs.checkpoint.save or fs.checkpoint.save_dcp."
        )


def update(
    tx: Optimizer, state: TrainState, grads: Tree, *, donate: bool = False, transform_state: Tree = ABSENT
) -> TrainState:
    """Make the next state from reduced gradients: new parameters, new optimizer state, one step more.

    Nothing is sent. If ranks make other updates, or step sharded leaves by other numbers, their next collective names
    the difference.

    Args:
        tx: The optimizer that `state` was created with.
        state: The state before; nothing in it changes unless it is donated.
        grads: Sharded gradients from `scatter_grads` or `value_and_grad`. A leaf whose gradient is None stays as it is,
            and so does all that the optimizer keeps for it, as under torch.optim.
        donate: Whether `state` is donated, so that the next one may be written in its place: half the memory
            and no copies. The old parameters and optimizer state are refused from then on, also where the update fails.
        transform_state: The state that `value_and_grad` or `scatter_grads` returned besides the gradients.

    Returns:
        The state after.

    Raises:
        ValueError: before any collective, if the gradients are not those of state.params, leaves of the state do not
            fit their specs, or tx is no optimizer; while a CUDA graph is captured, if numbers of the state are on the
            CPU, which replays would not change; on a mesh that was made anew after a failure, if ranks hold states of
            different steps; if the optimizer's update returns other parameters.

    >>> import torch, fshard as fs
    >>> tx = fs.sgd(0.1)
    >>> params = fs.shard({"w": torch.ones(2)}, fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")))
    >>> state = fs.TrainState.create(params, tx)
    >>> _, grads = fs.value_and_grad(lambda p: fs.gather(p)["w"].sum())(state.params)
    >>> state = fs.update(tx, state, grads)
    >>> state.step, state.params["w"].local
    (tensor(1), tensor([0.9000, 0.9000]))
    """
    expect(isinstance(tx, Optimizer), "update", "tx to be an Optimizer", describe(tx), CHAINED)
    expect(isinstance(state, TrainState), "update", "state to be a TrainState", describe(state))
    check_flags("update", donate=donate)
    flat = flatten(state)
    check_local("update", flat)
    _check_gradients(grads, list(flat.children)[1])
    refuse_frozen_counters("update", state)
    check_same_step("update", state)
    # In a trace it is for jit to say which tensors are written in place.
    donate = donate and not _compat.is_tracing()
    copy_target = find_copy_target(flat.specs)
    if donate and tx.update_donated is not None:
        if copy_target:
            # Gathers since the last gradient, as those of an evaluation, may still read what this writes to.
            torch.accelerator.synchronize(copy_target)
        state = _take_over(state, flat)
    axes = flat.axes
    text = f"an update of {len(flat.leaves)} leaves{_read_number(' at step ', state.step)}"
    # It holds the tensors, which an update that makes new ones lets go of.
    del flat
    run = run_update
    if _compat.is_profiling():
        run = _compat.show_range("fshard::update", run_update)
    params, opt_state = run("update", "tx", tx, grads, state.opt_state, state.params, donate=donate)
    # Behind an error of this rank, it would not be what the others have recorded.
    comm.record_update(axes, text)
    after = state._replace(step=state.step + 1, params=params, opt_state=opt_state)
    after = pin_params(after) if copy_target else after
    return after if transform_state is ABSENT else after._replace(transform_state=transform_state)


def _read_number(name: str, number: Any) -> str:
    """Write a number behind its name; nothing if it has no value, or one for which the host would wait."""
    if type(number) is torch.Tensor and number.is_cpu and not _compat.transforms_active():
        number = number.tolist()
    if isinstance(number, float):
        # CPUs of other models may round the last digits of a schedule in another way.
        return f"{name}{number:.6g}"
    return f"{name}{number}" if isinstance(number, int) else ""


def record_numbers(name: str, flat: Flat, numbers: Mapping[str, Any]) -> None:
    """Record the hyperparameters by which sharded leaves are stepped, for ranks to compare.

    Args:
        name: The optimizer.
        flat: The leaves, and what else a caller has with them.
        numbers: The hyperparameters by name. Others than numbers are passed over.
    """
    texts = filter(None, map(_read_number, [f" {each}=" for each in numbers], numbers.values()))
    comm.record_update(flat.axes, f"{name} with{','.join(texts) or ' no known numbers'}")


def pin_params(state: TrainState) -> TrainState:
    """Move offloaded parameters that an update made anew to pinned memory, as `shard` does.

    A graph holds no such move. `jit` makes it for the states that its function returns.
    """
    if _compat.is_tracing() or _compat.transforms_active():
        return state
    flat = flatten(state.params)
    return state._replace(params=flat.unflatten(map(pin_leaf, flat.leaves)))


def check_same_step(api_name: str, given: Tree) -> None:
    """Check that all ranks hold states of the same step, once for each state on a mesh that was made anew.

    A rank that fails where nothing is sent, as in an update, has no next state, while the others end that step and hear
    of the failure in the next one.

    Args:
        api_name: The verb that asks.
        given: A tree with TrainStates in it.

    Raises:
        ValueError: on every rank, with two steps, or counters that only one has, and ranks that hold them.
    """
    rank_state = comm.rank_state()
    if rank_state.generation == 0 or _compat.is_tracing() or _compat.transforms_active():
        return
    states: list[TrainState] = []
    map_nodes(states.append, given, TrainState)
    flat = flatten(states)
    axes = [axis for axis in flat.axes if axis.size > 1 and comm.supports_cpu_messages(axis)]
    if not axes or flat.treedef in rank_state.compared:
        return
    # Ranks that own different pieces count the updates of each by itself, so only their steps must agree.
    is_owned = any("owned" in spec.roles.values() for spec in flat.specs)
    # Others may begin another call meanwhile.
    counts = {comm.VERB_FACT: api_name}
    for number, state in enumerate(states):
        name = "state" if len(states) == 1 else f"states[{number}]"
        counters = flatten(state._replace(params=(), buffers=(), key=None, transform_state=()))
        for path, leaf in counters.named_leaves:
            is_count = isinstance(leaf, torch.Tensor) and leaf.dtype is torch.int64 and not leaf.dim()
            if is_count and (path == ".step" or not is_owned):
                counts[f"{name}{path}"] = str(int(leaf))
    label = comm.Label(comm.Verb.AGREE, ("step of states",))
    differences = comm.find_disagreement(counts, axes, label)
    remedy = (
        "use the same optimizer on every rank, and take the state of the smaller step, which the others had before "
        "their last one, or restore the last checkpoint on every rank"
    )
    headline = "ranks hold states of different steps or optimizers"
    if differences and differences[0].path == comm.VERB_FACT:
        headline = "ranks make different calls"
        remedy = comm.SAME_CALLS
    refuse(f"{api_name}: {headline}", differences, remedy)
    rank_state.compared.add(flat.treedef)


def run_update(
    api_name: str,
    argument: str,
    tx: Any,
    grads: Tree,
    state: Tree,
    params: Tree,
    *,
    donate: bool = False,
) -> Updated:
    """Run a transformation's update, and check that it returns a pair whose first part is a tree like what it changes.

    Args:
        api_name: The function that runs it, for an error.
        argument: The argument of that function that the transformation is, for an error.
        tx: The Optimizer or GradientTransformation.
        grads: The gradients.
        state: The state that it keeps.
        params: The parameters.
        donate: Whether an optimizer may write to `state` and `params`.

    Returns:
        The new parameters, or of a GradientTransformation the new gradients; and the new state.

    Raises:
        ValueError: if it returns something else, such as the state first, or plain tensors for Sharded leaves.
    """
    name, before = ("params", params) if isinstance(tx, Optimizer) else ("grads", grads)
    remedy = f"return ({name}, state), the new {name} first"
    step = (donate and getattr(tx, "update_donated", None)) or tx.update
    try:
        pair = step(grads, state, params)
    except AttributeError as error:
        if error.obj is state:
            error.add_note(f"To fix: pass the state that {argument}.init made, not {describe(state)}.")
        raise
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ValueError(f"{api_name}: {argument}.update must return two values, got {describe(pair)}; {remedy}.")
    new, state = pair
    flat, old = flatten(new), flatten(before)
    same_structure(f"{api_name}: {name} that {argument}.update returned", flat, old, remedy)
    # Without its spec, a whole leaf would be one of this rank alone. No line of Python runs for each of thousands.
    if list(map(is_sharded, flat.leaves)) != list(map(is_sharded, old.leaves)):
        check_same_shards(old, flat.leaves)
    return new, state


def _take_over(state: TrainState, flat: Flat) -> TrainState:
    """Take parameters and optimizer state away from a donated state, for the update to write to.

    The old leaves are invalidated before anything is written, because an update that fails halfway has changed some of
    them. Frozen ones stay: they are not written to, and their averages are they themselves.
    """
    leaves = flat.leaves
    begin = len(leaves_of(state.step))
    end = len(leaves) - len(leaves_of([state.buffers, state.key, state.transform_state]))
    # A value that a transform of torch.func has wrapped ends with it.
    may_be_kept = _compat.transforms_active()
    tensors = {}
    for n, (leaf, tensor) in enumerate(zip(leaves[begin:end], flat.tensors[begin:end], strict=True), begin):
        is_trained_tensor = isinstance(tensor, torch.Tensor) and (leaf is tensor or not leaf.spec.frozen)
        if is_trained_tensor and not (may_be_kept and _compat.is_transformed(tensor)):
            tensors[n] = tensor
    # Tensors of fs.gather, for example, share the memory of a leaf, and keep their values.
    for n in itertools.compress(tensors, _compat.share_memory(list(tensors.values()))):
        tensors[n] = tensors[n].detach().clone()
    moved = mark_donated([leaves[n] for n in tensors])
    new_leaves = list(leaves)
    for n, tensor in tensors.items():
        leaf = leaves[n]
        new_leaves[n] = Sharded(tensor, leaf.spec) if is_sharded(leaf) else moved.get(id(tensor), tensor)
    taken = flat.unflatten(new_leaves)
    return state._replace(params=taken.params, opt_state=taken.opt_state)


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
    ends = transformations and isinstance(transformations[-1], Optimizer)
    before = transformations[:-1] if ends else transformations
    if not all(isinstance(part, GradientTransformation) for part in before):
        raise ValueError(
            "chain: only the last argument may be an Optimizer, and all others must be GradientTransformations. Got "
            f"{', '.join(map(describe, transformations))}."
        )

    can_wait = before and getattr(transformations[-1], "is_leafwise", False)
    bind = getattr(transformations[-2], "bind", None) if can_wait else None

    def init(params: Tree) -> Tree:
        return tuple(part.init(params) for part in transformations)

    def run(grads: Tree, state: Tree, params: Tree, donate: bool = False) -> Updated:
        is_own = isinstance(state, tuple) and len(state) == len(transformations)
        got = f"one of {len(state)}" if isinstance(state, tuple) else describe(state)
        remedy = "pass the state that init of this chain made"
        expect(is_own, "chain", f"a state of {len(transformations)} transformations", got, remedy)
        make: Any = None
        states = []
        # A context would hold the first gradients until the end.
        try:
            flat = flatten(params)
            check_same_shards(flat, leaves_like(flat, grads))
            for i, (part, kept) in enumerate(zip(transformations, state, strict=True)):
                step = partial(run_update, "chain", f"transformations[{i}]", part, donate=donate)
                # The graph of a traced step drops each gradient after its use.
                if bind is not None and i == len(before) - 1 and not _compat.is_tracing():
                    make = bind(grads, params)
                elif make is not None:
                    grads, kept = _update_in_turn(step, make, grads, kept, params)
                else:
                    grads, kept = step(grads, kept, params)
                states.append(kept)
        except Exception as error:
            explain_donation(error, "chain", grads=grads, state=state, params=params)
            raise
        return grads, tuple(states)

    return Optimizer(init, run, partial(run, donate=True)) if ends else GradientTransformation(init, run)


def _update_in_turn(update: Update, make: Any, grads: Tree, state: Tree, params: Tree) -> Updated:
    """Make and use some gradients at a time, so that a second set of them is never held."""
    flat = flatten(grads)
    sizes = [getattr(tensor, "nbytes", 0) for tensor in tensors_of(flat.leaves)]
    blocks = [end // BLOCK_BYTES for end in itertools.accumulate(sizes)]
    if not any(blocks):
        return update(make(grads), state, params)
    old = merged = params, state
    for block in dict.fromkeys(blocks):
        chosen = [leaf if number == block else None for leaf, number in zip(flat.leaves, blocks, strict=True)]
        updated = update(make(flat.unflatten(chosen)), state, params)
        merged = map_leaves(lambda new, was, kept: kept if new is was else new, updated, old, merged)
    return merged


def _check_gradients(grads: Tree, params: Flat) -> None:
    """Refuse gradients that are not those of the parameters."""
    flat = flatten(grads)
    same_structure("update with gradients", flat, params)
    problems = flat.problems(_describe_misfit, params.leaves)
    remedy = "pass what fs.scatter_grads(grads, like=state.params) or fs.value_and_grad returned"
    refuse("update: gradients do not fit the parameters", problems, remedy)


def _describe_misfit(grad: Any, param: Any) -> tuple[str, str] | None:
    """Describe a gradient that does not fit its parameter, and the one expected."""
    if grad is None:
        return None
    if not is_trained(param) or not is_tensor(tensor_of(param)):
        return "a gradient", f"None for {'a frozen leaf' if is_sharded(param) else describe(param)}"
    if isinstance(grad, Sharded) and isinstance(param, Sharded):
        if grad.spec is not param.spec and (difference := describe_difference(grad.spec, param.spec)):
            return difference
        grad = grad.local
        param = param.local
    are_tensors = isinstance(grad, torch.Tensor) and isinstance(param, torch.Tensor)
    if are_tensors and grad.shape == param.shape and grad.dtype == param.dtype:
        return None
    return describe(grad), describe(param)


def check_same_shards(flat: Flat, *columns: Sequence[Any]) -> None:
    """Refuse gradients and states that are split otherwise than parameters, or have local tensors of other shapes.

    Args:
        flat: The parameters.
        *columns: As many leaves each. None is passed over.

    Raises:
        ValueError: with the paths of the leaves.
    """
    # No line of Python runs for each of thousands, which mostly share spec objects.
    specs = attributes_of(flat.leaves, "spec")
    for column in columns:
        # A leaf without a gradient or a state fits, as if it were the parameter itself.
        rows = zip(column, flat.leaves, strict=True)
        leaves = [param if leaf is None or param is None else leaf for leaf, param in rows]
        # As numbers of a torch class, and gradients that are mapped alone.
        if all(map(operator.is_, leaves, flat.leaves)):
            continue
        are_same = all(map(operator.is_, attributes_of(leaves, "spec"), specs))
        if not are_same or not all(map(operator.eq, _list_shapes(tensors_of(leaves)), _list_shapes(flat.tensors))):
            problems = flat.problems(_describe_other_shard, leaves)
            remedy = "pass gradients and a state of these leaves, reshard them together, and map them by fs.tree_map"
            refuse("update: leaves do not fit the parameters", problems, remedy)


def _list_shapes(tensors: Sequence[Any]) -> Iterator[Any]:
    """List shapes, one at a time: the garbage collector counts them."""
    return map(getattr, tensors, itertools.repeat("shape"), itertools.repeat(None))


def _describe_other_shard(param: Any, leaf: Any) -> tuple[str, str] | None:
    """Describe the shard of a leaf that has another one than its parameter."""
    texts = []
    for each in (leaf, param):
        tensor = tensor_of(each)
        kind = "shard" if is_sharded(each) else "tensor"
        shard = f"a {kind} of shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else describe(tensor)
        texts.append(f"{shard}, split by {each.spec.effective_partition}" if is_sharded(each) else shard)
    got, expected = texts
    return None if got == expected else (got, expected)
