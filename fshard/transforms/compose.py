"""Transforms made of others: compose and masked, and all that is read off their structure."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from fshard import _compat
from fshard.collectives.linear import Linear, Variance, linear_call
from fshard.errors import Problem, expect, refuse
from fshard.transforms.axis import _FullyShard, _SplitDim
from fshard.transforms.base import BuiltIn, Finish, ShardTransform, Specs, States, Storage, Tensors, Wrapped
from fshard.transforms.local import _Cast, _Offload
from fshard.tree import MASK, Axis, Mask, ModelDtypes, ReshardPolicy, Spec, Tree, is_mask, matches
from fshard.tree.checks import check_dense, describe

FinishWithStates = Callable[[], tuple[Tensors, States]]

_NOTHING = ShardTransform()


@dataclass(frozen=True)
class _Composed(ShardTransform):
    """Transforms one after another, storage first."""

    stages: tuple[ShardTransform, ...]
    reshard: ReshardPolicy | None = None
    model_dtypes: ModelDtypes | None = None

    @property
    def axes(self) -> tuple[Axis, ...]:
        return tuple(axis for stage in self.stages for axis in stage.axes)

    @property
    def storage(self) -> Storage | None:
        return next((stage.storage for stage in self.stages if stage.storage), None)

    def layout(self, spec: Spec) -> Spec:
        for stage in reversed(self.stages):
            spec = stage.layout(spec)
        if self.reshard is None:
            return spec
        return replace(spec, reshard=self.reshard, model_dtypes=self.model_dtypes)

    def init(self, grad: torch.Tensor) -> Tree:
        states: list[Tree] = []
        spec = Spec(tuple(grad.shape))
        for stage in reversed(self.stages):
            states.append(stage.init(grad))
            # What a stage scatters has the shape that the stages behind it have left.
            spec = stage.layout(spec) if _sums(stage) else spec
            grad = grad.new_zeros(()).expand(spec.local_shape)
        return None if all(state is None for state in states) else tuple(reversed(states))

    def start_gather(self, leaves: Tensors, specs: Specs) -> Finish:
        device = self.storage.compute_device if self.storage else torch.device("cpu")
        # A graph runs on one stream.
        stream = None if device.type == "cpu" or _compat.is_tracing() else torch.Stream(device)
        last = self._last
        with nullcontext() if stream is None else stream:
            for stage in self.stages[:last]:
                leaves = check_number(stage, "gather", stage.gather(leaves, specs), specs)
            finish = self.stages[last].start_gather(leaves, specs)

        def finish_all() -> Tensors:
            gathered = check_number(self.stages[last], "gather", finish(), specs)
            if stream is not None:
                current = torch.accelerator.current_stream(device)
                current.wait_stream(stream)
                for tensor in gathered:
                    # The memory is not to be used again before the stream that computes has read it.
                    tensor.record_stream(current)
            for stage in self.stages[last + 1 :]:
                gathered = check_number(stage, "gather", stage.gather(gathered, specs), specs)
            return gathered

        return finish_all

    def start_scatter(self, grads: Tensors, specs: Specs, *given: States) -> Callable[[], Any]:
        if not given:
            check_stateless(self)
        states, last = given[0] if given else [None] * len(grads), self._last
        # For each stage the states of all leaves.
        columns: list[States] = [[state and state[i] for state in states] for i in range(len(self.stages))]

        def run(grads: Tensors, numbers: range) -> Tensors:
            for i in numbers:
                grads, columns[i] = start_scatter(self.stages[i], grads, specs, columns[i])()
            return grads

        grads = run(grads, range(len(self.stages) - 1, last, -1))
        finish = start_scatter(self.stages[last], grads, specs, columns[last])

        def finish_all() -> Any:
            scattered, columns[last] = finish()
            scattered = run(scattered, range(last - 1, -1, -1))
            rows = zip(*columns, strict=True)
            after = [state and row for state, row in zip(states, rows, strict=True)]
            return (scattered, after) if given else scattered

        return finish_all

    @property
    def _last(self) -> int:
        """The number of the stage that communicates last in a gather, and first in a scatter."""
        senders = (i for i, s in enumerate(self.stages) if _sums(s) and any(axis.size > 1 for axis in s.axes))
        return max(senders, default=len(self.stages) - 1)


def _sums(stage: ShardTransform) -> bool:
    return bool(stage.axes) and not isinstance(stage, _SplitDim)


@dataclass(frozen=True)
class _Masked(ShardTransform):
    """One transform for the leaves that a mask matches and another for the rest; see `at`."""

    transform: ShardTransform
    mask: Mask
    otherwise: ShardTransform

    @property
    def axes(self) -> tuple[Axis, ...]:
        return self.transform.axes

    def layout(self, *_: Any, **__: Any) -> Any:
        raise ValueError("masked: fs.shard and model.init choose by names; call the transform of a leaf's spec")

    gather = scatter = layout


def compose(*transforms: ShardTransform) -> ShardTransform:
    """Chain transforms, storage first: gather runs left to right, scatter right to left.

    Args:
        *transforms: From the one next to storage to the one next to the computation.

    Returns:
        Their composition, equal to any other of equal parts; without any, a transform that changes nothing.

    Raises:
        ValueError: if two of them use the same mesh axis or have a reshard policy, a dim would be split anew before it
            has been gathered, or something is no transform.

    >>> import torch, fshard as fs
    >>> def program():
    ...     mesh = fs.init_mesh({"shard": 2, "tp": 2}, device="cpu")
    ...     strategy = fs.compose(fs.fully_shard(mesh["shard"]), fs.split_dim(mesh["tp"], dim=1))
    ...     params = fs.shard({"w": torch.ones(4, 6)}, strategy)
    ...     return params["w"], fs.gather(params)["w"].shape
    >>> fs.testing.spmd(program, world=4)[0]
    (Sharded(float32[4, 6], P('shard', 'tp'), local [2, 3]), torch.Size([4, 3]))
    """
    return composed(transforms)


def composed(
    transforms: Sequence[ShardTransform], reshard: ReshardPolicy | None = None, model_dtypes: ModelDtypes | None = None
) -> ShardTransform:
    """Compose transforms as `compose` does, with a reshard policy and the dtypes of models, which specs then carry.

    Args:
        transforms: The transforms.
        reshard: The reshard policy; None takes that of the one transform which has one.
        model_dtypes: Beside a reshard policy, the dtypes of models.

    Returns:
        Their composition.

    Raises:
        ValueError: as for `compose`.
    """
    for transform in transforms:
        needed = "transforms to be ShardTransforms such as fs.fully_shard(mesh)"
        expect(isinstance(transform, ShardTransform), "compose", needed, describe(transform))
    parts = [t.stages if isinstance(t, _Composed) else (t,) for t in transforms]
    stages = tuple(stage for part in parts for stage in part if stage != _NOTHING)
    # What depends on a leaf's name may be for other leaves; it is looked at again for each.
    names = [axis.name for stage in stages for axis in (stage.axes if masks(stage) else layout_axes(stage))]
    twice = sorted({name for name in names if names.count(name) > 1})
    expect(not twice, "compose", "one transform for each axis", f"two for the axes {twice}", "drop one of the two")
    for i, stage in enumerate(stages):
        gathered = list(dict.fromkeys(axis.name for behind in stages[i + 1 :] for axis in summed_axes(behind)))
        kept = [node.axis.name for node in nodes(stage) if gathered and isinstance(node, _SplitDim)]
        expect(not kept, "compose", f"split_dim and own_dim behind what gathers over {gathered}", f"{kept} before it")
    strategies = [t for t in transforms if any(isinstance(node, _Composed) and node.reshard for node in nodes(t))]
    needed, remedy = "one strategy, which has the reshard policy", "take the other's parts by themselves"
    expect(len(strategies) + bool(reshard) <= 1, "compose", needed, "two", remedy)
    if strategies and isinstance(strategies[0], _Composed):
        reshard, model_dtypes = strategies[0].reshard, strategies[0].model_dtypes
    return _Composed(stages, reshard, model_dtypes) if stages else _NOTHING


def masked_transform(transform: ShardTransform, mask: Mask, otherwise: ShardTransform | None = None) -> ShardTransform:
    """Use a transform for some leaves; `fs.masked` is its public name.

    Args:
        transform: The transform of the leaves that match.
        mask: Which leaves; see `fs.masked`.
        otherwise: The transform of the others; None changes nothing in them.

    Returns:
        The transform, which `shard` resolves leaf by leaf.

    Raises:
        ValueError: if `mask` is no mask.
    """
    expect(is_mask(mask), "masked", f"the mask to be {MASK}", describe(mask))
    # A list cannot be hashed.
    chosen = tuple(mask) if isinstance(mask, list) else mask
    return _Masked(transform, chosen, otherwise or _NOTHING)


def _held(transform: ShardTransform) -> Iterator[Any]:
    """List the values in a transform's fields, and in tuples there."""
    for field in fields(transform):
        value = getattr(transform, field.name)
        yield from value if type(value) is tuple else (value,)


def nodes(transform: ShardTransform) -> Iterator[ShardTransform]:
    """List all transforms in a transform, and at last itself."""
    for part in _held(transform):
        if isinstance(part, ShardTransform):
            yield from nodes(part)
    yield transform


def masks(transform: ShardTransform) -> tuple[Mask, ...]:
    """List the masks by which a transform chooses leaves; each must match one."""
    return tuple(node.mask for node in nodes(transform) if isinstance(node, _Masked))


def layout_axes(transform: ShardTransform) -> tuple[Axis, ...]:
    """List the mesh axes that leaves are placed on: those of `axes`, and those that leaves stay split over."""
    held = (value for node in nodes(transform) for value in (*_held(node), *node.axes))
    return tuple(dict.fromkeys(value for value in held if isinstance(value, Axis)))


def summed_axes(transform: ShardTransform) -> tuple[Axis, ...]:
    """List the mesh axes that scatter sums over: those of `axes` that no part of the transform leaves alone."""
    own = [node.axis for node in nodes(transform) if isinstance(node, _SplitDim)]
    return tuple(axis for axis in transform.axes if axis not in own)


def at(transform: Any, name: str, leaf: Any) -> ShardTransform:
    """Choose the transform of one leaf.

    Args:
        transform: The transform, which may have masks.
        name: The leaf's keys joined by dots, such as "blocks.0.norm.weight".
        leaf: The leaf: a tensor of its full shape, or Sharded.

    Returns:
        The transform without masks.
    """
    if not masks(transform):
        return transform
    if isinstance(transform, _Masked):
        return at(transform.transform if matches(transform.mask, name, leaf) else transform.otherwise, name, leaf)
    if isinstance(transform, Wrapped):
        return replace(transform, inner=at(transform.inner, name, leaf))
    expect(isinstance(transform, _Composed), type(transform).__name__, "masks in what fs.Wrapped wraps", "others")
    # Composed anew, as stages may be compositions now.
    parts = [at(part, name, leaf) for part in transform.stages]
    return composed(parts, transform.reshard, transform.model_dtypes)


class Reduction(NamedTuple):
    """The facts about a transform's scatter that the engine asks for each gradient.

    Attributes:
        dtype: The dtype that gradients are reduced in; None leaves them in theirs.
        has_state: Whether scatter takes and returns states.
        is_new: Whether scatter returns tensors that nobody else holds, which may be written to.
        is_foreign: Whether a part of it is not of this package, and may return anything.
    """

    dtype: torch.dtype | None = None
    has_state: bool = False
    is_new: bool = False
    is_foreign: bool = False


def reduction(transform: Any) -> Reduction:
    """Read the facts about a transform's scatter off its structure, once: they stay with it.

    Args:
        transform: The transform of a spec; None has the default.

    Returns:
        The facts.
    """
    if transform is None:
        return Reduction()
    found: Reduction | None = transform.__dict__.get("_reduction")
    if found is None:
        foreign = any(not isinstance(node, BuiltIn | _Composed) for node in nodes(transform))
        # Of this package none keeps a tensor that it returns; others may, which nobody can see from here.
        new = not foreign and any(axis.size > 1 for axis in summed_axes(transform))
        passed_on = ShardTransform.init, Wrapped.init, _Composed.init
        state = any(type(node).init not in passed_on for node in nodes(transform))
        found = Reduction(_dtype(transform), state, new, foreign)
        transform.__dict__["_reduction"] = found
    return found


def _dtype(transform: ShardTransform) -> torch.dtype | None:
    found = None
    # Scatter runs from the last part to the first; a cast behind the reduction does not change its dtype.
    for node in reversed([*nodes(transform)]):
        if isinstance(node, _Cast):
            found = node.scatter_dtype or found
        elif _sums(node) and next(nodes(node)) is node:
            break
    return found


def sum_dtype(spec: Spec, dtype: torch.dtype) -> torch.dtype:
    """Choose the dtype that gradients are added up in over microbatches: at least that of the reduction.

    Args:
        spec: The leaf's spec.
        dtype: The gradients' dtype.

    Returns:
        The dtype.
    """
    reduced = reduction(spec.transform).dtype
    return torch.promote_types(dtype, reduced) if reduced and dtype.is_floating_point else dtype


@lru_cache(maxsize=4096)
def in_tree(spec: Spec, axes: tuple[Axis, ...]) -> Spec:
    """Let a leaf's transform sum gradients in the tree of a job's microbatches.

    Args:
        spec: The leaf's spec.
        axes: The axes that it sums over, in the order of all leaves.

    Returns:
        The spec, with sums in the tree.

    Raises:
        ValueError: if the transform does something whose bits depend on how many ranks there are.
    """
    remedy = 'take a strategy without it, or leave out sums="tree"'
    needed, found = ([axis.name for axis in order if axis.size > 1] for order in (axes, spec.transform.axes))
    expect(found == needed, 'sums="tree"', f"transforms that sum over {needed} in this order", f"{found}", remedy)
    known = _Composed, _FullyShard, _Cast, _Offload, _SplitDim, ShardTransform
    odd = [type(node).__name__.strip("_") for node in nodes(spec.transform) if type(node) not in known]
    odd += ["own_dim" for node in nodes(spec.transform) if isinstance(node, _SplitDim) and node.brings_data]
    expect(not odd, 'sums="tree"', "fully_shard, replicate, split_dim, casts and offload", ", ".join(odd), remedy)
    return replace(spec, reshard=replace(spec.reshard or ReshardPolicy(), tree=True))


def check_stateless(transform: ShardTransform) -> None:
    """Refuse a transform with a state where nobody can carry one."""
    if reduction(transform).has_state:
        remedy = "call fs.scatter_grads with transform_state= at gathered parameters, or fs.value_and_grad"
        raise ValueError(f"scatter: autograd cannot carry the transform's state through fs.gather; {remedy}")


def gather_by(transform: ShardTransform, paths: Sequence[str], leaves: Tensors, specs: Specs) -> Tensors:
    """Gather differentiably, as one node of autograd's, whose backward scatters; that refuses a transform with a state.

    Args:
        transform: The transform.
        paths: The leaves' paths.
        leaves: One shard per leaf.
        specs: The leaves' specs.

    Returns:
        The full tensors.
    """
    return linear_call(_linear(transform, specs, paths), leaves)


def scatter_by(
    transform: ShardTransform,
    paths: Sequence[str],
    leaves: Sequence[Any],
    grads: Sequence[torch.Tensor | None],
    states: States,
) -> tuple[Tensors, States]:
    """Scatter the gradients of Sharded leaves, differentiably if the transform has no state.

    Args:
        transform: The transform.
        paths: The leaves' paths.
        leaves: The leaves.
        grads: Their full gradients; None counts as zeros.
        states: As for `start_scatter`.

    Returns:
        The shards, in the leaves' dtypes, and the new states.
    """
    specs, pairs = [leaf.spec for leaf in leaves], zip(leaves, grads, strict=True)
    full = [leaf.local.new_zeros(leaf.spec.gathered_shape) if grad is None else grad for leaf, grad in pairs]
    if reduction(transform).has_state:
        found, states = start_scatter(transform, full, specs, states)()
        check_results(transform, "scatter", found, paths, specs)
    else:
        found = linear_call(_linear(transform, specs, paths).transposed(), full)
    return [grad.to(leaf.local.dtype) for leaf, grad in zip(leaves, found, strict=True)], states


def _linear(transform: ShardTransform, specs: Specs, paths: Sequence[str]) -> Linear:
    """Make a gather as a linear map; shards vary or agree as their leaves are stored."""

    def gathered(leaves: Tensors) -> Tensors:
        return check_results(transform, "gather", transform.gather(leaves, specs), paths, specs)

    def scattered(grads: Tensors) -> Tensors:
        check_stateless(transform)
        check_dense("gather", paths, grads)
        shards, _ = start_scatter(transform, grads, specs, [])()
        return check_results(transform, "scatter", shards, paths, specs)

    variance = Variance("fs.gather", specs[0].scattered_axes, specs, True)
    return Linear(gathered, scattered, variance)


def start_scatter(transform: ShardTransform, grads: Tensors, specs: Specs, states: States) -> FinishWithStates:
    """Start to scatter by a transform with or without a state.

    Args:
        transform: The transform.
        grads: One tensor per leaf.
        specs: The leaves' specs.
        states: One state per leaf, None where the transform has none.

    Returns:
        A function that finishes and returns what scatter returns, and the new states: the two forms of it in one.
    """
    has_state = reduction(transform).has_state
    finish = transform.start_scatter(grads, specs, states) if has_state else transform.start_scatter(grads, specs)

    def finish_all() -> tuple[Tensors, States]:
        after = states
        scattered = finish()
        if has_state:
            scattered, after = check_number(transform, "scatter", scattered, ("gradients", "states"))
            check_number(transform, "scatter", after, specs)
        return check_number(transform, "scatter", scattered, specs), after

    return finish_all


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
    if isinstance(transform, BuiltIn | _Composed):
        return results
    fits = isinstance(results, list | tuple) and len(results) == len(inputs)
    found = f"{len(results)}" if isinstance(results, list | tuple) else describe(results)
    remedy = "return one for each leaf, in their order; with states the pair of gradients and states"
    expect(fits, f"{type(transform).__name__}.{half}", f"{len(inputs)} results", found, remedy)
    return results


def check_results(
    transform: ShardTransform, half: str, results: Tensors, paths: Sequence[str], specs: Specs
) -> Tensors:
    """Refuse results of a user's transform that are no tensors of the right number and shapes.

    Args:
        transform: The transform of some leaves.
        half: "gather" or "scatter".
        results: What that returned.
        paths: The leaves' paths.
        specs: The leaves' specs, which tell the shapes that results must have. Dims behind these are vmap's.

    Returns:
        The results.

    Raises:
        ValueError: with the path of every leaf whose result is wrong.
    """
    if not reduction(transform).is_foreign:
        return results
    check_number(transform, half, results, paths)
    problems = []
    for path, result, spec in zip(paths, results, specs, strict=True):
        shape: Sequence[int] | None = spec.local_shape
        if half == "gather":
            # Leaves that take no gradient may become anything.
            shape = None if spec.frozen else spec.gathered_shape
        if not isinstance(result, torch.Tensor):
            problems.append(Problem(path, describe(result), "a tensor"))
        elif shape is not None and tuple(result.shape[: len(shape)]) != tuple(shape):
            problems.append(Problem(path, describe(result), f"a tensor of shape {tuple(shape)}"))
    names = [type(node).__name__ for node in nodes(transform) if not isinstance(node, BuiltIn | _Composed)]
    remedy = f"let {half} return a tensor for each leaf, shaped as the {'full leaf' if half == 'gather' else 'shard'}"
    refuse(f"{' or '.join(dict.fromkeys(names))}.{half}: results do not fit", problems, remedy)
    return results
