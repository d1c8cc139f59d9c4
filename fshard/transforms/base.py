"""ShardTransform, the one extension point, and compose."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fshard.checks import kind
from fshard.tree import Axis, Spec

Tensors = Sequence[torch.Tensor]
Finish = Callable[[], Tensors]


class LayoutError(ValueError):
    """A leaf's shape does not fit a transform: what was found and what was needed."""

    def __init__(self, found: str, needed: str) -> None:
        """Keep both parts, so that `shard` can add the leaf's path."""
        super().__init__(f"found {found}, needed {needed}")
        self.found, self.needed = found, needed


@dataclass(frozen=True)
class ShardTransform:
    """A pure pair: gather turns stored tensors into the ones computed with, scatter is its transpose for gradients.

    Subclass as a frozen dataclass: transforms live in specs, are compared by value and must be hashable. Both methods
    take all leaves that travel together and return as many, output i from input i alone; they change nothing they are
    given, and leave trailing dims they do not know of alone (vmap puts its batch there).
    """

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The mesh axes that gather or scatter communicate over."""
        return ()

    @property
    def new_gradients(self) -> bool | None:
        """Whether scatter returns new tensors, which may be written to; None where it returns what it was given."""
        return False

    def layout(self, spec: Spec) -> Spec:
        """Say how this transform stores a leaf.

        Args:
            spec: The leaf as the transform to the right leaves it.

        Returns:
            The spec with what this transform adds: axes, and dims split over them.

        Raises:
            LayoutError: if the leaf's shape does not fit.
        """
        return spec

    def gather(self, leaves: Tensors, specs: Sequence[Spec]) -> Tensors:
        """Turn stored tensors into the ones to the right of this transform.

        Args:
            leaves: One tensor per leaf.
            specs: The leaves' storage specs.

        Returns:
            One tensor per leaf.
        """
        return leaves

    def scatter(self, grads: Tensors, specs: Sequence[Spec]) -> Tensors:
        """Turn gradients of gather's outputs into gradients of its inputs, summed over this transform's axes.

        Args:
            grads: One tensor per leaf, shaped as gather's outputs.
            specs: The leaves' storage specs.

        Returns:
            One tensor per leaf, shaped as gather's inputs.
        """
        return grads

    def start_gather(self, leaves: Tensors, specs: Sequence[Spec]) -> Finish:
        """Start a gather whose communication may overlap what runs until it is finished.

        Args:
            leaves: As for `gather`.
            specs: As for `gather`.

        Returns:
            A function that finishes and returns gather's result; here all is done at the start.
        """
        gathered = self.gather(leaves, specs)
        return lambda: gathered

    def start_scatter(self, grads: Tensors, specs: Sequence[Spec]) -> Finish:
        """Start a scatter whose communication may overlap what runs until it is finished.

        Args:
            grads: As for `scatter`.
            specs: As for `scatter`.

        Returns:
            A function that finishes and returns scatter's result; here all is done at the start.
        """
        scattered = self.scatter(grads, specs)
        return lambda: scattered


@dataclass(frozen=True)
class _Composed(ShardTransform):
    stages: tuple[ShardTransform, ...]

    @property
    def axes(self) -> tuple[Axis, ...]:
        return tuple(axis for stage in self.stages for axis in stage.axes)

    @property
    def new_gradients(self) -> bool | None:
        return next((stage.new_gradients for stage in self.stages if stage.new_gradients is not None), None)

    def layout(self, spec: Spec) -> Spec:
        for stage in reversed(self.stages):
            spec = stage.layout(spec)
        return spec

    def gather(self, leaves: Tensors, specs: Sequence[Spec]) -> Tensors:
        for stage in self.stages:
            leaves = stage.gather(leaves, specs)
        return leaves

    def scatter(self, grads: Tensors, specs: Sequence[Spec]) -> Tensors:
        for stage in reversed(self.stages):
            grads = stage.scatter(grads, specs)
        return grads

    def start_gather(self, leaves: Tensors, specs: Sequence[Spec]) -> Finish:
        return _start([(s, s.start_gather, s.gather) for s in self.stages], leaves, specs)

    def start_scatter(self, grads: Tensors, specs: Sequence[Spec]) -> Finish:
        return _start([(s, s.start_scatter, s.scatter) for s in reversed(self.stages)], grads, specs)


def _start(stages: Sequence[tuple[ShardTransform, Any, Any]], tensors: Tensors, specs: Sequence[Spec]) -> Finish:
    """Run stages up to the last one that communicates, and leave those behind it for the end."""

    def done() -> Tensors:
        return tensors

    finish: Finish = done
    for stage, start, run in stages:
        finish = start(finish(), specs) if stage.axes else partial(_then, finish, run, specs)
    return finish


def _then(finish: Finish, run: Any, specs: Sequence[Spec]) -> Tensors:
    return run(finish(), specs)


def compose(*transforms: ShardTransform) -> ShardTransform:
    """Chain transforms, storage first: gather runs left to right, scatter right to left.

    Args:
        *transforms: From the one next to storage to the one next to the computation.

    Returns:
        Their composition, equal to any other of equal parts.

    Raises:
        ValueError: if two of them use the same mesh axis, or something is no transform.
    """
    for transform in transforms:
        if not isinstance(transform, ShardTransform):
            raise ValueError(f"compose: got {kind(transform)}, needed ShardTransforms such as fs.fully_shard(mesh)")
    stages = tuple(s for t in transforms for s in (t.stages if isinstance(t, _Composed) else (t,)))
    composed = _Composed(stages)
    names = [axis.name for axis in composed.axes]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"compose: the axes {twice} are used by two transforms, needed one each; drop one of the two")
    return composed
