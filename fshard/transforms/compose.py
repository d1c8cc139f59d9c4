"""Transforms made of others: compose and masked."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from fshard import comm
from fshard.errors import expect
from fshard.transforms.axis import _SplitDim
from fshard.transforms.base import (
    Container,
    Finish,
    ShardTransform,
    Specs,
    States,
    Storage,
    Tensors,
    Wrapped,
    expect_transform,
    lay_out,
    walk_parts,
)
from fshard.transforms.run import PendingScatter, check_number, check_stateless, start_scatter
from fshard.transforms.structure import layout_axes, sends, split_stages, summed_axes
from fshard.tree import MASK, Axis, Mask, ModelDtypes, ReshardPolicy, Spec, Tree, is_mask, matches
from fshard.tree.checks import describe

_NOTHING = ShardTransform()


@dataclass(frozen=True)
class _Composed(Container):
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
            spec = lay_out(stage, spec)
        if self.reshard is None:
            return spec
        return replace(spec, reshard=self.reshard, model_dtypes=self.model_dtypes)

    def init(self, grad: torch.Tensor) -> Tree:
        states: list[Tree] = []
        spec = Spec(tuple(grad.shape))
        for stage in reversed(self.stages):
            states.append(stage.init(grad))
            # The stages before this one get gradients of the shape that its scatter returns.
            if summed_axes(stage):
                spec = stage.layout(spec)
            grad = grad.new_zeros(()).expand(spec.local_shape)
        if all(state is None for state in states):
            return None
        return tuple(reversed(states))

    def start_gather(self, leaves: Tensors, specs: Specs) -> Finish:
        storage = self.storage
        stream = comm.copy_stream(storage.compute_device) if storage else None
        sender = self._sender
        with stream or nullcontext():
            for stage in self.stages[:sender]:
                leaves = check_number(stage, "gather", stage.gather(leaves, specs), specs)
            finish_sender = self.stages[sender].start_gather(leaves, specs)
        # The stream goes on with other gathers, which nobody is to wait for here.
        started = stream and stream.record_event()

        def finish() -> Tensors:
            if started:
                # Before the rows are read. By default that stream would wait which is current on the current device.
                started.wait(torch.accelerator.current_stream(started.device))
            gathered = check_number(self.stages[sender], "gather", finish_sender(), specs)
            comm.keep_for_current(gathered, stream)
            for stage in self.stages[sender + 1 :]:
                gathered = check_number(stage, "gather", stage.gather(gathered, specs), specs)
            return gathered

        return finish

    def start_scatter(self, grads: Tensors, specs: Specs, states: States | None = None) -> Callable[[], Any]:
        if states is None:
            check_stateless(self)
        old_states = states or [None] * len(grads)
        by_stage: list[States] = [()] * len(self.stages)
        sender = self._sender

        def start_stage(number: int, stage_grads: Tensors) -> PendingScatter:
            stage_states = [state and state[number] for state in old_states]
            return start_scatter(self.stages[number], stage_grads, specs, stage_states)

        for number in reversed(range(sender + 1, len(self.stages))):
            grads, by_stage[number] = start_stage(number, grads)()
        finish_sender = start_stage(sender, grads)

        def finish() -> Any:
            shards, by_stage[sender] = finish_sender()
            for number in reversed(range(sender)):
                shards, by_stage[number] = start_stage(number, shards)()
            if states is None:
                return shards
            # A leaf has a state for each stage, or None.
            states_of_leaves = zip(*by_stage, strict=True)
            return shards, [old and new for old, new in zip(old_states, states_of_leaves, strict=True)]

        return finish

    @cached_property
    def _sender(self) -> int:
        """The index of the stage that communicates last in a gather, and first in a scatter; 0 if none does."""
        return max([index for index, stage in enumerate(self.stages) if sends(stage)], default=0)


@dataclass(frozen=True)
class _Masked(ShardTransform):
    """One transform for the leaves that a mask matches and another for the rest; see `resolve_masks`."""

    transform: ShardTransform
    # No spec holds it, so that it may be an object that cannot be hashed.
    mask: Mask = field(hash=False)
    otherwise: ShardTransform

    @property
    def axes(self) -> tuple[Axis, ...]:
        return self.transform.axes

    def layout(self, *_: Any, **__: Any) -> Any:
        raise ValueError(
            "masked: this transform has no layout or gather of its own, because it depends on the name of each leaf. "
            "Use the transform in a leaf's spec (leaf.spec.transform)."
        )

    gather = scatter = layout


def compose(*transforms: ShardTransform) -> ShardTransform:
    """Chain transforms, storage first: gather runs left to right, scatter right to left.

    Args:
        *transforms: From the one next to storage to the one next to the computation.

    Returns:
        Their composition. Two compositions of equal parts compare equal. Without any, a transform that changes nothing.

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
    return compose_with_policy(transforms)


def split_gather(transform: Any, axis_name: str) -> tuple[ShardTransform, ShardTransform]:
    """Split a gather before the stage that gathers over a mesh axis.

    Args:
        transform: The transform of a leaf whose policy names a `regather_axis`.
        axis_name: The axis.

    Returns:
        The stages before that one, which make the pieces that ranks keep, and the others, which gather pieces.

    Raises:
        ValueError: if no stage gathers over this axis alone.
    """
    stages = transform.stages if isinstance(transform, _Composed) else ()
    for number, stage in enumerate(stages):
        if [axis.name for axis in stage.axes] == [axis_name]:
            return split_stages(transform, number)
    raise ValueError(
        f"gather: regather_axis={axis_name!r} has no stage of its own in {type(transform).__name__}. Compose the "
        "strategy with other transforms by fs.compose, rather than wrap it."
    )


def compose_with_policy(
    transforms: Sequence[ShardTransform],
    reshard: ReshardPolicy | None = None,
    model_dtypes: ModelDtypes | None = None,
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
    stages: list[ShardTransform] = []
    for transform in transforms:
        expect_transform("compose", "transforms", transform)
        stages += transform.stages if isinstance(transform, _Composed) else [transform]
    stages = [stage for stage in stages if stage != _NOTHING]
    _check_each_axis_once(stages)
    _check_splits_stay_behind(stages)
    strategies = [transform for transform in transforms if _has_policy(transform)]
    if len(strategies) + (reshard is not None) > 1:
        raise ValueError(
            "compose: two of these are strategies such as zero3. Keep one, and replace the other by its layout, such "
            "as fs.fully_shard."
        )
    if strategies and isinstance(strategies[0], _Composed):
        reshard = strategies[0].reshard
        model_dtypes = strategies[0].model_dtypes
    return _Composed(tuple(stages), reshard, model_dtypes) if stages else _NOTHING


def _has_policy(transform: ShardTransform) -> bool:
    return any(isinstance(part, _Composed) and part.reshard for part in walk_parts(transform))


def _check_each_axis_once(stages: Sequence[ShardTransform]) -> None:
    """Refuse two stages for one mesh axis."""
    names = []
    for stage in stages:
        # Leaves that a mask leaves out may have other axes. Each is composed again once its name is known.
        axes = stage.axes if masks(stage) else layout_axes(stage)
        names += [axis.name for axis in axes]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"compose: two transforms use the axes {twice}. Remove one of them.")


def _check_splits_stay_behind(stages: Sequence[ShardTransform]) -> None:
    """Refuse a stage that splits a dim for good before one that gathers: the dim would not be full yet."""
    gathered: list[str] = []
    for stage in reversed(stages):
        kept = [part.axis.name for part in walk_parts(stage) if isinstance(part, _SplitDim)]
        if gathered and kept:
            raise ValueError(
                f"compose: split_dim or own_dim over {kept} comes before the transform that gathers {gathered}. Put it "
                "after that transform."
            )
        gathered = [axis.name for axis in summed_axes(stage)] + gathered


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
    otherwise = _NOTHING if otherwise is None else otherwise
    expect_transform("masked", "otherwise", otherwise)
    # A list cannot be hashed.
    hashable = tuple(mask) if isinstance(mask, list) else mask
    return _Masked(transform, hashable, otherwise)


def masks(transform: ShardTransform) -> tuple[Mask, ...]:
    """List the masks by which a transform chooses leaves; each must match one."""
    return tuple(part.mask for part in walk_parts(transform) if isinstance(part, _Masked))


def resolve_masks(transform: Any, name: str, leaf: Any) -> ShardTransform:
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
        chosen = transform.transform if matches(transform.mask, name, leaf) else transform.otherwise
        return resolve_masks(chosen, name, leaf)
    if isinstance(transform, Wrapped):
        return replace(transform, inner=resolve_masks(transform.inner, name, leaf))
    if not isinstance(transform, _Composed):
        raise ValueError(
            f"{type(transform).__name__}: a mask inside this transform cannot be resolved. Subclass fs.Wrapped and put "
            "the masked transform in `inner`."
        )
    # Composed anew, as stages may be compositions now.
    stages = [resolve_masks(stage, name, leaf) for stage in transform.stages]
    return compose_with_policy(stages, transform.reshard, transform.model_dtypes)
