"""ShardTransform, the one extension point."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fshard.tree import Axis, Mask, Spec, Tree

Tensors = Sequence[torch.Tensor]
States = Sequence[Tree]
Finish = Callable[[], Tensors]
FinishWithState = Callable[[], tuple[Tensors, States]]


class LayoutError(ValueError):
    """A leaf's shape does not fit a transform: what was expected and what it is."""

    def __init__(self, got: str, expected: str) -> None:
        """Keep both parts, so that `shard` can add the leaf's path."""
        super().__init__(f"expected {expected}, got {got}")
        self.got, self.expected = got, expected


@dataclass(frozen=True)
class ShardTransform:
    """A pure pair: gather turns stored tensors into the ones computed with, scatter is its transpose for gradients.

    Subclass as a frozen dataclass: transforms live in specs, are compared by value and must be hashable. Both methods
    take all leaves that travel together and return as many, output i from input i alone; they change nothing they are
    given, and leave trailing dims they do not know of alone (vmap puts its batch there).

    A transform that remembers something from step to step, such as what a lossy scatter left out, defines `init` and
    `scatter_with_state` in the place of `scatter`. Gather has no state: it runs as often as a strategy wants.
    """

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The mesh axes that gather or scatter communicate over."""
        return ()

    @property
    def layout_axes(self) -> tuple[Axis, ...]:
        """The mesh axes that leaves are placed on: those of `axes`, and such that leaves stay split over."""
        return self.axes

    @property
    def bucket_bytes(self) -> int | None:
        """The size of the buffers that leaves travel in; None where only what is small shares one."""
        return None

    @property
    def masks(self) -> tuple[Mask, ...]:
        """By which leaves are chosen in it; each must mean one."""
        return ()

    @property
    def has_state(self) -> bool:
        """Whether scatter has a state."""
        return type(self).init is not ShardTransform.init

    @property
    def new_gradients(self) -> bool | None:
        """Whether scatter returns new tensors, which may be written to; None where it returns what it was given."""
        return False

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """The dtype that gradients are reduced in; None leaves them in theirs."""
        return None

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

    def misplaced(self, before: Sequence["ShardTransform"], behind: Sequence["ShardTransform"]) -> str | None:
        """Say why this transform makes no sense in a composition.

        Args:
            before: The transforms between it and storage.
            behind: Those between it and the computation.

        Returns:
            The reason; None where it does.
        """
        return None

    def at(self, name: str) -> "ShardTransform":
        """The transform of one leaf.

        Args:
            name: The leaf's keys joined by dots, such as "blocks.0.norm.weight".

        Returns:
            This transform, but for those that depend on the name.
        """
        return self

    def bucketed(self, nbytes: int) -> "ShardTransform":
        """This transform with leaves that travel in buffers of a size; the same where it has no say in that."""
        return self

    def store(self, shard: torch.Tensor) -> torch.Tensor:
        """Bring a new shard to where it is kept.

        Args:
            shard: A local tensor in storage of its own, where the full tensor was.

        Returns:
            The tensor, perhaps on another device.
        """
        return shard

    def beside(self) -> torch.Stream | None:
        """A stream to start gathers on, beside the one that computes; None where that one serves."""
        return None

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

        Raises:
            ValueError: if the transform has a state, which autograd and torch.func cannot carry.
        """
        if self.has_state:
            name = type(self).__name__.strip("_")
            raise ValueError(
                f"scatter: {name} has a state, which autograd cannot carry through fs.gather; differentiate at "
                "gathered parameters and call fs.scatter_grads with transform_state=, or use fs.value_and_grad"
            )
        return grads

    def init(self, grad: torch.Tensor) -> Tree:
        """Make the state of one leaf.

        Args:
            grad: Zeros in the shape, on the device and in the stored dtype of gradients that scatter is given.

        Returns:
            A tree of tensors, this rank's own; None where the leaf needs none.
        """
        return None

    def scatter_with_state(self, grads: Tensors, specs: Sequence[Spec], states: States) -> tuple[Tensors, States]:
        """Scatter, with a state for each leaf.

        Gradients are sums so far, not yet divided for a mean, and so are residuals of them. What is not finite should
        not get into a state, where it would stay.

        Args:
            grads: As for `scatter`.
            specs: As for `scatter`.
            states: What `init` or the last call returned for each leaf; not to be written to.

        Returns:
            What `scatter` returns, and the new states.
        """
        return self.scatter(grads, specs), states

    def start_gather(self, leaves: Tensors, specs: Sequence[Spec]) -> Finish:
        """Start a gather whose communication may overlap what runs until it is finished.

        Args:
            leaves: As for `gather`.
            specs: As for `gather`.

        Returns:
            A function that finishes and returns gather's result; here all is done at the start. It must not start
            communication itself: when it is called may depend on a rank's data.
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

    def start_scatter_with_state(self, grads: Tensors, specs: Sequence[Spec], states: States) -> FinishWithState:
        """Start a scatter with states whose communication may overlap what runs until it is finished.

        Args:
            grads: As for `scatter`.
            specs: As for `scatter`.
            states: As for `scatter_with_state`.

        Returns:
            A function that finishes and returns the result of `scatter_with_state`; here all is done at the start.
        """
        if self.has_state:
            done = self.scatter_with_state(grads, specs, states)
            return lambda: done
        finish = self.start_scatter(grads, specs)
        return lambda: (finish(), states)
