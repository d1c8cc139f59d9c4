"""compose: transforms one after another."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache

import torch

from fshard.checks import kind
from fshard.transforms.base import Finish, FinishWithState, ShardTransform, States, Tensors
from fshard.tree import Axis, Mask, Spec, Tree

_NOTHING = ShardTransform()


@dataclass(frozen=True)
class _Composed(ShardTransform):
    stages: tuple[ShardTransform, ...]

    @property
    def axes(self) -> tuple[Axis, ...]:
        return tuple(axis for stage in self.stages for axis in stage.axes)

    @property
    def layout_axes(self) -> tuple[Axis, ...]:
        return tuple(dict.fromkeys(axis for stage in self.stages for axis in stage.layout_axes))

    @property
    def bucket_bytes(self) -> int | None:
        return max((stage.bucket_bytes for stage in self.stages if stage.bucket_bytes is not None), default=None)

    @property
    def masks(self) -> tuple[Mask, ...]:
        return tuple(mask for stage in self.stages for mask in stage.masks)

    @property
    def has_state(self) -> bool:
        return any(stage.has_state for stage in self.stages)

    @property
    def new_gradients(self) -> bool | None:
        return next((stage.new_gradients for stage in self.stages if stage.new_gradients is not None), None)

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        # Scatter runs from the last stage to the first; a cast behind the reduction does not change its dtype.
        found = None
        for stage in reversed(self.stages):
            found = stage.reduce_dtype or found
            if stage.axes:
                break
        return found

    def layout(self, spec: Spec) -> Spec:
        for stage in reversed(self.stages):
            spec = stage.layout(spec)
        return spec

    def misplaced(self, before: Sequence[ShardTransform], behind: Sequence[ShardTransform]) -> str | None:
        # A composition stands in another one only as a part of a transform for some leaves.
        places = ((stage, self.stages[:i], self.stages[i + 1 :]) for i, stage in enumerate(self.stages))
        return next((why for s, a, b in places if (why := s.misplaced((*before, *a), (*b, *behind)))), None)

    def at(self, name: str) -> ShardTransform:
        stages = tuple(stage.at(name) for stage in self.stages)
        return self if stages == self.stages else _shared(stages)

    def bucketed(self, nbytes: int) -> ShardTransform:
        return _Composed(tuple(stage.bucketed(nbytes) for stage in self.stages))

    def store(self, shard: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            shard = stage.store(shard)
        return shard

    def beside(self) -> torch.Stream | None:
        return next((stream for stage in self.stages if (stream := stage.beside()) is not None), None)

    def gather(self, leaves: Tensors, specs: Sequence[Spec]) -> Tensors:
        for stage in self.stages:
            leaves = stage.gather(leaves, specs)
        return leaves

    def scatter(self, grads: Tensors, specs: Sequence[Spec]) -> Tensors:
        for stage in reversed(self.stages):
            grads = stage.scatter(grads, specs)
        return grads

    def init(self, grad: torch.Tensor) -> Tree:
        states: list[Tree] = []
        spec = Spec(tuple(grad.shape))
        for stage in reversed(self.stages):
            states.append(stage.init(grad))
            # What a stage scatters has the shape that the stages behind it have left.
            spec = stage.layout(spec) if stage.axes else spec
            grad = grad.new_zeros(()).expand(spec.local_shape)
        return None if all(state is None for state in states) else tuple(reversed(states))

    def scatter_with_state(self, grads: Tensors, specs: Sequence[Spec], states: States) -> tuple[Tensors, States]:
        return self.start_scatter_with_state(grads, specs, states)()

    def start_gather(self, leaves: Tensors, specs: Sequence[Spec]) -> Finish:
        last = max((i for i, stage in enumerate(self.stages) if _communicates(stage)), default=len(self.stages) - 1)
        stream = self.beside()
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

    def start_scatter(self, grads: Tensors, specs: Sequence[Spec]) -> Finish:
        stages, first = self._in_scatter()
        for stage in stages[:first]:
            grads = stage.scatter(grads, specs)
        finish = stages[first].start_scatter(grads, specs)

        def finish_all() -> Tensors:
            scattered = finish()
            for stage in stages[first + 1 :]:
                scattered = stage.scatter(scattered, specs)
            return scattered

        return finish_all

    def start_scatter_with_state(self, grads: Tensors, specs: Sequence[Spec], states: States) -> FinishWithState:
        stages, first = self._in_scatter()
        # One column for each stage, in the order of scatter.
        columns = [
            [None if state is None else state[len(stages) - 1 - i] for state in states] for i in range(len(stages))
        ]
        after: list[States] = []
        for stage, column in zip(stages[:first], columns[:first], strict=True):
            grads, new = stage.scatter_with_state(grads, specs, column)
            after.append(new)
        finish = stages[first].start_scatter_with_state(grads, specs, columns[first])

        def finish_all() -> tuple[Tensors, States]:
            scattered, new = finish()
            news = [*after, new]
            for stage, column in zip(stages[first + 1 :], columns[first + 1 :], strict=True):
                scattered, new = stage.scatter_with_state(scattered, specs, column)
                news.append(new)
            rows = zip(*reversed(news), strict=True)
            return scattered, [None if state is None else row for state, row in zip(states, rows, strict=True)]

        return finish_all

    def _in_scatter(self) -> tuple[tuple[ShardTransform, ...], int]:
        """The stages in the order of scatter, and the first of them that communicates."""
        stages = self.stages[::-1]
        return stages, next((i for i, stage in enumerate(stages) if _communicates(stage)), 0)


@lru_cache(maxsize=64)
def _shared(stages: tuple[ShardTransform, ...]) -> ShardTransform:
    """One object for leaves of the same stages, which are looked up by identity."""
    return compose(*stages)


def _handed_over(tensors: Tensors, stream: torch.Stream) -> Tensors:
    """Let the stream that computes wait for what another has made, whose memory is not to be used again before."""
    current = torch.accelerator.current_stream(stream.device)
    current.wait_stream(stream)
    for tensor in tensors:
        tensor.record_stream(current)
    return tensors


def _communicates(stage: ShardTransform) -> bool:
    return any(axis.size > 1 for axis in stage.axes)


def compose(*transforms: ShardTransform) -> ShardTransform:
    """Chain transforms, storage first: gather runs left to right, scatter right to left.

    Args:
        *transforms: From the one next to storage to the one next to the computation.

    Returns:
        Their composition, equal to any other of equal parts; without any, a transform that changes nothing.

    Raises:
        ValueError: if two of them use the same mesh axis or say how long tensors stay, one that moves shards to another
            device is not the first, a dim would be split anew before it has been gathered, or something is no
            transform.
    """
    for transform in transforms:
        if not isinstance(transform, ShardTransform):
            expected = "ShardTransforms such as fs.fully_shard(mesh)"
            raise ValueError(f"compose: expected transforms to be {expected}, got {kind(transform)}")
    stages = tuple(s for t in transforms for s in (t.stages if isinstance(t, _Composed) else (t,)) if s != _NOTHING)
    if not stages:
        return _NOTHING
    composed = _Composed(stages)
    # What depends on a leaf's name may be for other leaves; it is looked at again for each.
    names = [axis.name for stage in stages for axis in (stage.axes if stage.masks else stage.layout_axes)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"compose: expected one transform for each axis, got two for the axes {twice}; drop one of the two"
        )
    for i, stage in enumerate(stages):
        if problem := stage.misplaced(stages[:i], stages[i + 1 :]):
            raise ValueError(f"compose: {problem}")
    return composed
