"""Transforms made of others: compose and masked, and all that is read off their structure."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from fshard import _compat
from fshard.collectives import Linear, Variance, linear_call
from fshard.errors import expect
from fshard.transforms.axis import _SplitDim
from fshard.transforms.base import (
    BuiltIn,
    Finish,
    FinishWithStates,
    ShardTransform,
    States,
    Storage,
    Tensors,
    Wrapped,
    takes,
)
from fshard.transforms.local import _Cast
from fshard.tree import MASK, Axis, Mask, ModelDtypes, ReshardPolicy, Spec, Tree, as_mask, is_mask, matches, rebuilt
from fshard.tree.checks import describe

_NOTHING = ShardTransform()


@dataclass(frozen=True)
class _Composed(ShardTransform):
    stages: tuple[ShardTransform, ...]
    reshard: ReshardPolicy | None = None
    model_dtypes: ModelDtypes | None = None

    @property
    def axes(self) -> tuple[Axis, ...]:
        return tuple(axis for stage in self.stages for axis in stage.axes)

    @property
    def storage(self) -> Storage | None:
        return self.stages[0].storage

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

    def gather(self, leaves: Tensors, specs: Sequence[Spec]) -> Tensors:
        for stage in self.stages:
            leaves = stage.gather(leaves, specs)
        return leaves

    def start_gather(self, leaves: Tensors, specs: Sequence[Spec]) -> Finish:
        last = max((i for i, stage in enumerate(self.stages) if _communicates(stage)), default=len(self.stages) - 1)
        device = self.storage.compute_device if self.storage else torch.device("cpu")
        # A graph runs on one stream.
        stream = None if device.type == "cpu" or _compat.is_tracing() else torch.Stream(device)
        with nullcontext() if stream is None else stream:
            for stage in self.stages[:last]:
                leaves = stage.gather(leaves, specs)
            finish = self.stages[last].start_gather(leaves, specs)

        def finish_all() -> Tensors:
            gathered = finish()
            if stream is not None:
                gathered = _handed_over(gathered, stream)
            for stage in self.stages[last + 1 :]:
                gathered = stage.gather(gathered, specs)
            return gathered

        return finish_all

    def scatter(self, grads: Tensors, specs: Sequence[Spec], *given: States) -> Any:
        return self.start_scatter(grads, specs, *given)()

    def start_scatter(self, grads: Tensors, specs: Sequence[Spec], *given: States) -> Callable[[], Any]:
        if not given:
            check_stateless(self)
        states = given[0] if given else [None] * len(grads)
        stages = self.stages[::-1]
        first = next((i for i, stage in enumerate(stages) if _communicates(stage)), 0)
        # One column for each stage, in the order of scatter.
        columns: list[States] = [
            [None if state is None else state[i] for state in states] for i in reversed(range(len(stages)))
        ]
        for i in range(first):
            grads, columns[i] = _start_scatter(stages[i], grads, specs, columns[i])()
            if not isinstance(stages[i], BuiltIn):
                shapes = [computed_shape(spec, grads[0].dtype, spec.gathered_shape, without=i + 1) for spec in specs]
                _check_shapes(stages[i], "scatter", grads, shapes)
        finish = _start_scatter(stages[first], grads, specs, columns[first])

        def finish_all() -> Any:
            scattered, columns[first] = finish()
            for i in range(first + 1, len(stages)):
                scattered, columns[i] = _start_scatter(stages[i], scattered, specs, columns[i])()
            rows = zip(*reversed(columns), strict=True)
            after = [None if state is None else row for state, row in zip(states, rows, strict=True)]
            return (scattered, after) if given else scattered

        return finish_all


def _handed_over(tensors: Tensors, stream: torch.Stream) -> Tensors:
    """Let the stream that computes wait for tensors of another one, whose memory is not to be used again before."""
    current = torch.accelerator.current_stream(stream.device)
    current.wait_stream(stream)
    for tensor in tensors:
        tensor.record_stream(current)
    return tensors


def _communicates(stage: ShardTransform) -> bool:
    return _sums(stage) and any(axis.size > 1 for axis in stage.axes)


def _sums(stage: ShardTransform) -> bool:
    return bool(stage.axes) and not isinstance(stage, _SplitDim)


@dataclass(frozen=True)
class _Masked(ShardTransform):
    transform: ShardTransform
    mask: Mask
    otherwise: ShardTransform

    @property
    def axes(self) -> tuple[Axis, ...]:
        return self.transform.axes

    def layout(self, *_: Any, **__: Any) -> Any:
        raise ValueError(
            "masked: leaves are meant by their names, which only fs.shard, fs.reshard and model.init know; each leaf's "
            "spec has its own transform"
        )

    gather = scatter = layout


def compose(*transforms: ShardTransform) -> ShardTransform:
    """Chain transforms, storage first: gather runs left to right, scatter right to left.

    Args:
        *transforms: From the one next to storage to the one next to the computation.

    Returns:
        Their composition, equal to any other of equal parts; without any, a transform that changes nothing.

    Raises:
        ValueError: if two of them use the same mesh axis or have a reshard policy, one that moves shards to another
            device is not the first, a dim would be split anew before it has been gathered, or something is no
            transform.

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
    policies = [(reshard, model_dtypes)] if reshard else []
    policies += [(t.reshard, t.model_dtypes) for t in transforms if isinstance(t, _Composed) and t.reshard]
    stages = tuple(s for t in transforms for s in (t.stages if isinstance(t, _Composed) else (t,)) if s != _NOTHING)
    if not stages:
        return _NOTHING
    # What depends on a leaf's name may be for other leaves; it is looked at again for each.
    names = [axis.name for stage in stages for axis in (stage.axes if masks(stage) else layout_axes(stage))]
    twice = sorted({name for name in names if names.count(name) > 1})
    expect(not twice, "compose", "one transform for each axis", f"two for the axes {twice}", "drop one of the two")
    for i, stage in enumerate(stages):
        gathered = list(dict.fromkeys(axis.name for behind in stages[i + 1 :] for axis in summed_axes(behind)))
        for node in nodes(stage):
            needed = "offload first, as it says where shards are stored"
            expect(not (i and node.storage), "compose", needed, "it behind others")
            if gathered and isinstance(node, _SplitDim):
                name = "own_dim" if node.brings_data else "split_dim"
                found = f"expected {name} over {node.axis.name!r} behind what gathers over {gathered}"
                raise ValueError(f"compose: {found}, got it before")
    strategies = [s for s in stages if any(isinstance(node, _Composed) and node.reshard for node in nodes(s))]
    needed, remedy = "one strategy, which has the reshard policy", "take the other's parts by themselves"
    expect(len(policies) + len(strategies) <= 1, "compose", needed, "two", remedy)
    return _Composed(stages, *(policies[0] if policies else ()))


def masked_transform(transform: ShardTransform, mask: Mask, otherwise: ShardTransform | None = None) -> ShardTransform:
    """Use a transform for some leaves; `fs.masked` is its public name.

    Args:
        transform: The transform of the leaves that are meant.
        mask: Which leaves; see `fs.masked`.
        otherwise: The transform of the others; None changes nothing in them.

    Returns:
        The transform, which `shard` resolves leaf by leaf.

    Raises:
        ValueError: if `mask` is no mask, or the two transforms sum gradients over different axes.
    """
    otherwise = _NOTHING if otherwise is None else otherwise
    expect(isinstance(otherwise, ShardTransform), "masked", "otherwise to be a ShardTransform", describe(otherwise))
    mask = as_mask(mask)
    expect(is_mask(mask), "masked", f"the mask to be {MASK}", describe(mask))
    other, axes = ([axis.name for axis in t.axes] for t in (otherwise, transform))
    needed = f"other leaves to be reduced over the axes {axes}"
    remedy = "give otherwise= a transform over these, such as fs.replicate"
    expect(set(transform.axes) == set(otherwise.axes), "masked", needed, f"{other}", remedy)
    return _Masked(transform, mask, otherwise)


def _held(transform: ShardTransform) -> Iterator[Any]:
    """List the values in a transform's fields, and in tuples there."""
    for field in fields(transform):
        value = getattr(transform, field.name)
        yield from value if type(value) is tuple else (value,)


def parts(transform: ShardTransform) -> list[ShardTransform]:
    """List the transforms that a transform is made of, storage first."""
    return [value for value in _held(transform) if isinstance(value, ShardTransform)]


def nodes(transform: ShardTransform) -> Iterator[ShardTransform]:
    """List all transforms in a transform, and at last itself."""
    for part in parts(transform):
        yield from nodes(part)
    yield transform


def masks(transform: ShardTransform) -> tuple[Mask, ...]:
    """List the masks by which a transform chooses leaves; each must match one."""
    return tuple(node.mask for node in nodes(transform) if isinstance(node, _Masked))


def layout_axes(transform: ShardTransform) -> tuple[Axis, ...]:
    """List the mesh axes that leaves are placed on: those of `axes`, and those that leaves stay split over."""
    held = ((*(value for value in _held(node) if isinstance(value, Axis)), *node.axes) for node in nodes(transform))
    return tuple(dict.fromkeys(axis for axes in held for axis in axes))


def summed_axes(transform: ShardTransform) -> tuple[Axis, ...]:
    """List the mesh axes that scatter sums over: those of `axes` that no part of the transform leaves alone."""

    def own(node: ShardTransform) -> list[Axis]:
        inner = {axis for part in parts(node) for axis in part.axes}
        return [axis for axis in node.axes if axis not in inner] if _sums(node) else []

    return tuple(dict.fromkeys(axis for node in nodes(transform) for axis in own(node)))


def at(transform: ShardTransform, name: str, leaf: Any) -> ShardTransform:
    """Choose the transform of one leaf.

    Args:
        transform: The transform, which may have masks.
        name: The leaf's keys joined by dots, such as "blocks.0.norm.weight".
        leaf: The leaf: a tensor of its full shape, or Sharded.

    Returns:
        The transform without masks; leaves of equal ones share one object.
    """
    if isinstance(transform, _Masked):
        chosen_part = transform.transform if matches(transform.mask, name, leaf) else transform.otherwise
        return at(chosen_part, name, leaf)

    def chosen(value: Any) -> Any:
        return at(value, name, leaf) if isinstance(value, ShardTransform) else rebuilt(value, chosen)

    found = rebuilt(transform, chosen)
    return _shared(found) if isinstance(found, _Composed) and found is not transform else found


@lru_cache(maxsize=64)
def _shared(chosen: _Composed) -> ShardTransform:
    """Compose anew, as parts may be compositions now; one object, as leaves are grouped by transform."""
    return composed(chosen.stages, chosen.reshard, chosen.model_dtypes)


@lru_cache(maxsize=1024)
def computed_shape(spec: Spec, dtype: torch.dtype, shape: tuple[int, ...], *, without: int = 0) -> tuple[int, ...]:
    """Find the shape that a model computes with, where parts of a transform that use no axis gather another one.

    Args:
        spec: The leaf's spec.
        dtype: What it is stored as.
        shape: What the parts that use axes gather.
        without: How many of the last parts are left out.

    Returns:
        The shape; the one given where no such part changes it.
    """
    transform: Any = spec.transform
    stages = transform.stages if isinstance(transform, _Composed) else (transform,)
    tensor = torch.empty(shape, dtype=dtype, device="meta")
    for stage in stages[: len(stages) - without]:
        if isinstance(stage, ShardTransform) and not (isinstance(stage, BuiltIn) or stage.axes):
            (tensor,) = stage.gather([tensor], [spec])
    return tuple(tensor.shape)


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

    Raises:
        ValueError: if a transform is wrapped whose state the outer scatter does not take.
    """
    if transform is None:
        return Reduction()
    found: Reduction | None = transform.__dict__.get("_reduction")
    if found is None:
        foreign = any(not isinstance(node, BuiltIn | _Composed) for node in nodes(transform))
        found = Reduction(_dtype(transform), _has_state(transform), _is_new(transform), foreign)
        transform.__dict__["_reduction"] = found
    return found


def _dtype(transform: ShardTransform) -> torch.dtype | None:
    if isinstance(transform, _Cast):
        return transform.scatter_dtype
    found = None
    # Scatter runs from the last part to the first; a cast behind the reduction does not change its dtype.
    for part in reversed(parts(transform)):
        found = _dtype(part) or found
        if _sums(part):
            break
    return found


def _has_state(transform: ShardTransform) -> bool:
    cls = type(transform)
    if cls.init is ShardTransform.init:
        return False
    if cls.init is not Wrapped.init:
        return cls is not _Composed or any(map(_has_state, parts(transform)))
    inner = any(map(_has_state, parts(transform)))
    found, remedy = "one without states around a transform that has one", "take them and hand them on"
    expect(not inner or takes(cls.scatter, 3), cls.__name__, "scatter(self, grads, specs, states)", found, remedy)
    return inner


def _is_new(transform: ShardTransform) -> bool:
    # Storage first: scatter's results come from the first stages. Stages of this package keep no tensor, so that from
    # one that communicates on all are new; others may return a tensor that they keep, which nobody can see from here.
    for stage in transform.stages if isinstance(transform, _Composed) else (transform,):
        if not isinstance(stage, BuiltIn):
            return False
        if _communicates(stage):
            return True
    return False


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


def check_stateless(transform: ShardTransform) -> None:
    """Refuse a transform with a state where nobody can carry one."""
    if reduction(transform).has_state:
        name = next(type(node).__name__.strip("_") for node in nodes(transform) if _has_state(node))
        raise ValueError(
            f"scatter: {name} has a state, which autograd cannot carry through fs.gather; differentiate at "
            "gathered parameters and call fs.scatter_grads with transform_state=, or use fs.value_and_grad"
        )


def gather_by(transform: ShardTransform, leaves: Tensors, specs: Sequence[Spec]) -> Tensors:
    """Gather differentiably, as one node of autograd's, whose backward scatters; that refuses a transform with a state.

    Args:
        transform: The transform.
        leaves: One shard per leaf.
        specs: The leaves' specs.

    Returns:
        The full tensors.
    """
    return linear_call(_linear(transform, specs), leaves)


def scatter_by(
    transform: ShardTransform, leaves: Sequence[Any], grads: Sequence[torch.Tensor | None], states: States
) -> tuple[Tensors, States]:
    """Scatter the gradients of Sharded leaves, differentiably if the transform has no state.

    Args:
        transform: The transform.
        leaves: The leaves.
        grads: Their full gradients; None counts as zeros.
        states: As for `scatter`.

    Returns:
        The shards, in the leaves' dtypes, and the new states.
    """
    specs, pairs = [leaf.spec for leaf in leaves], zip(leaves, grads, strict=True)
    full = [leaf.local.new_zeros(leaf.spec.gathered_shape) if grad is None else grad for leaf, grad in pairs]
    if reduction(transform).has_state:
        found, states = scatter(transform, full, specs, states)
    else:
        found = linear_call(_linear(transform, specs).transposed(), full)
    return [grad.to(leaf.local.dtype) for leaf, grad in zip(leaves, found, strict=True)], states


def _linear(transform: ShardTransform, specs: Sequence[Spec]) -> Linear:
    """Make a gather as a linear map; shards vary or agree as their leaves are stored."""
    run, transpose = (partial(f, transform=transform, specs=specs) for f in (_gathered, _scattered))
    return Linear(run, transpose, Variance("fs.gather", specs[0].scattered_axes, None, True))


def _gathered(leaves: Tensors, transform: ShardTransform, specs: Sequence[Spec]) -> Tensors:
    return _full(transform, transform.gather(leaves, specs), leaves, specs)


def _scattered(grads: Tensors, transform: ShardTransform, specs: Sequence[Spec]) -> Tensors:
    check_stateless(transform)
    return scatter(transform, grads, specs, [])[0]


def start_gather(transform: ShardTransform, leaves: Tensors, specs: Sequence[Spec]) -> Finish:
    """Start to gather by a transform.

    Args:
        transform: The transform.
        leaves: One shard per leaf.
        specs: The leaves' specs.

    Returns:
        A function that finishes and returns the full tensors.
    """
    finish = transform.start_gather(leaves, specs)
    return lambda: _full(transform, finish(), leaves, specs)


def scatter(transform: ShardTransform, grads: Tensors, specs: Sequence[Spec], states: States) -> tuple[Tensors, States]:
    """Scatter by a transform with or without a state.

    Args:
        transform: The transform.
        grads: One tensor per leaf.
        specs: The leaves' specs.
        states: One state per leaf, None where the transform has none.

    Returns:
        What scatter returns, and the new states.
    """
    return start_scatter(transform, grads, specs, states)()


def start_scatter(transform: ShardTransform, grads: Tensors, specs: Sequence[Spec], states: States) -> FinishWithStates:
    """Start what `scatter` does.

    Args:
        transform: As for `scatter`.
        grads: As for `scatter`.
        specs: As for `scatter`.
        states: As for `scatter`.

    Returns:
        A function that finishes and returns scatter's result.
    """
    finish = _start_scatter(transform, grads, specs, states)

    def finish_checked() -> tuple[Tensors, States]:
        found, after = finish()
        if reduction(transform).is_foreign:
            _check_shapes(transform, "scatter", found, [spec.local_shape for spec in specs])
        return found, after

    return finish_checked


def _start_scatter(
    transform: ShardTransform, grads: Tensors, specs: Sequence[Spec], states: States
) -> FinishWithStates:
    if reduction(transform).has_state:
        return transform.start_scatter(grads, specs, states)
    finish = transform.start_scatter(grads, specs)
    return lambda: (finish(), states)


def _full(transform: ShardTransform, found: Tensors, leaves: Tensors, specs: Sequence[Spec]) -> Tensors:
    if reduction(transform).is_foreign:
        pairs = zip(specs, leaves, strict=True)
        needed = [computed_shape(spec, leaf.dtype, spec.gathered_shape) for spec, leaf in pairs]
        _check_shapes(transform, "gather", found, needed)
    return found


def _check_shapes(
    transform: ShardTransform, verb: str, found: Sequence[torch.Tensor], needed: Sequence[tuple[int, ...]]
) -> None:
    """Refuse tensors of a transform that do not fit, before anybody uses them: of one rank alone, others would wait."""
    got = [tuple(tensor.shape) for tensor in found]
    # A batch of vmap's comes last.
    fits = len(got) == len(needed) and all(g[: len(n)] == n for g, n in zip(got, needed, strict=True))
    names = [type(n).__name__ for n in nodes(transform) if not isinstance(n, BuiltIn | _Composed)]
    remedy = "return one tensor for each leaf, in their order"
    expect(fits, f"{verb} of {', '.join(names)}", f"tensors of shapes {list(needed)}", f"{got}", remedy)
