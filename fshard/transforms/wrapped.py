"""Wrapped: a transform around another one, of which a user's own changes a part."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fshard.transforms.base import Finish, FinishWithState, ShardTransform, States, Tensors
from fshard.tree import Axis, Mask, Spec, Tree


@dataclass(frozen=True)
class Wrapped(ShardTransform):
    """Does all that another transform does; subclass it to do a part otherwise, such as how gradients are summed.

    Where a subclass defines gather, scatter or `scatter_with_state`, the other transform's way of starting them early
    is not used for that part.

    Attributes:
        inner: The other transform.
    """

    inner: ShardTransform

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The mesh axes that the other transform communicates over."""
        return self.inner.axes

    @property
    def layout_axes(self) -> tuple[Axis, ...]:
        """The mesh axes that it places leaves on."""
        return self.inner.layout_axes

    @property
    def masks(self) -> tuple[Mask, ...]:
        """By which leaves are chosen in it."""
        return self.inner.masks

    @property
    def bucket_bytes(self) -> int | None:
        """The size of its buffers."""
        return self.inner.bucket_bytes

    @property
    def has_state(self) -> bool:
        """Whether one of the two has a state."""
        return self.inner.has_state or type(self).init is not Wrapped.init

    @property
    def new_gradients(self) -> bool | None:
        """Whether the other one's scatter returns new tensors; unknown, so no, where that is replaced."""
        return False if self._scatters else self.inner.new_gradients

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """The dtype that the other one reduces gradients in; unknown where its scatter is replaced."""
        return None if self._scatters else self.inner.reduce_dtype

    def misplaced(self, before: Sequence[ShardTransform], behind: Sequence[ShardTransform]) -> str | None:
        """Why the other one makes no sense in a composition."""
        return self.inner.misplaced(before, behind)

    def at(self, name: str) -> ShardTransform:
        """This transform around what the other one is for a leaf."""
        return replace(self, inner=self.inner.at(name))

    def bucketed(self, nbytes: int) -> ShardTransform:
        """This transform around the other one with buckets."""
        return replace(self, inner=self.inner.bucketed(nbytes))

    def store(self, shard: torch.Tensor) -> torch.Tensor:
        """Where the other one keeps shards."""
        return self.inner.store(shard)

    def beside(self) -> torch.Stream | None:
        """The other one's stream."""
        return self.inner.beside()

    def layout(self, spec: Spec) -> Spec:
        """How the other one stores a leaf."""
        return self.inner.layout(spec)

    def gather(self, leaves: Tensors, specs: Sequence[Spec]) -> Tensors:
        """The other one's gather."""
        return self.inner.gather(leaves, specs)

    def scatter(self, grads: Tensors, specs: Sequence[Spec]) -> Tensors:
        """The other one's scatter."""
        return super().scatter(grads, specs) if self.has_state else self.inner.scatter(grads, specs)

    def init(self, grad: torch.Tensor) -> Tree:
        """The other one's state."""
        return self.inner.init(grad)

    def scatter_with_state(self, grads: Tensors, specs: Sequence[Spec], states: States) -> tuple[Tensors, States]:
        """The other one's scatter."""
        if type(self).scatter is not Wrapped.scatter:
            return self.scatter(grads, specs), states
        return self.inner.scatter_with_state(grads, specs, states)

    def start_gather(self, leaves: Tensors, specs: Sequence[Spec]) -> Finish:
        """Start the other one's gather, or do this one's."""
        if type(self).gather is not Wrapped.gather:
            return super().start_gather(leaves, specs)
        return self.inner.start_gather(leaves, specs)

    def start_scatter(self, grads: Tensors, specs: Sequence[Spec]) -> Finish:
        """Start the other one's scatter, or do this one's."""
        if self._scatters or self.has_state:
            return super().start_scatter(grads, specs)
        return self.inner.start_scatter(grads, specs)

    def start_scatter_with_state(self, grads: Tensors, specs: Sequence[Spec], states: States) -> FinishWithState:
        """Start the other one's scatter, or do this one's."""
        if self._scatters:
            done = self.scatter_with_state(grads, specs, states)
            return lambda: done
        return self.inner.start_scatter_with_state(grads, specs, states)

    @property
    def _scatters(self) -> bool:
        """Whether a subclass has a scatter of its own."""
        own = type(self)
        return own.scatter is not Wrapped.scatter or own.scatter_with_state is not Wrapped.scatter_with_state
