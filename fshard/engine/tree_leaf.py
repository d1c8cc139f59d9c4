"""A leaf whose gradients of all microbatches of a job are added up in one binary tree."""

from typing import Any

import torch

from fshard.engine.unit import Leaf, Part
from fshard.errors import Problem, refuse
from fshard.microbatches import Share, TreeSum
from fshard.transforms.compose import reduction
from fshard.tree import Sharded
from fshard.tree.checks import describe


class TreeLeaf(Leaf):
    """A leaf of a call with `sums="tree"`."""

    __slots__ = ("_share", "_tree")

    def __init__(self, path: str, leaf: Sharded, stored: torch.Tensor, share: Share) -> None:
        """Take a leaf in."""
        super().__init__(path, leaf, stored)
        self._share, self._tree = share, TreeSum()

    @property
    def _early(self) -> bool:
        return self._share.communicate == "each"

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype of all sums over microbatches: that of the reduction, or else of full gradients."""
        return reduction(self.spec.transform).dtype or self.dtype

    def take_partial(self) -> torch.Tensor:
        """Hand over this rank's full gradient, of this microbatch or of all."""
        if self._early:
            return super().take_partial()
        self.owed = False
        self._enter()
        total = self._tree.total()
        return self.zeros().to(self._dtype) if total is None else total

    def end_microbatch(self, last: bool) -> None:
        """Take the gradient of a microbatch into the tree when its backward has ended."""
        if self._early or not last:
            self._enter()

    def _enter(self) -> None:
        if self._early:
            part, self._reduced = self._reduced, None
        else:
            part, self._full = self._full, None
        wide = None if part is None else part.grad.to(self._dtype)
        own = part is not None and wide is not part.grad
        self._tree.add(wide, own=own)

    def as_part(self, grad: torch.Tensor, own: bool | None = None) -> Part:
        """Cast a part of the reduced gradient to the dtype of the tree, which loses nothing; see `Leaf`."""
        part = super().as_part(grad, own)
        return Part(part.grad.to(self._dtype), part.own) if self._early else part

    def take_grad(self, divisor: Any = 1) -> torch.Tensor:
        """Hand over the reduced gradient, divided and in the stored dtype; zeros where this rank has none."""
        if self._early and (total := self._tree.total()) is not None:
            self.add_reduced(super().as_part(total, own=False))
        return super().take_grad(divisor)


def check_sums(what: str, leaves: list[Leaf], share: Share) -> None:
    """Refuse leaves whose shards cannot hold the sums of single microbatches.

    Raises:
        ValueError: with the path of every such leaf.
    """
    if share.communicate == "once":
        return
    pairs = [(leaf, reduction(leaf.spec.transform).dtype) for leaf in leaves if leaf.trained]
    problems = [
        Problem(leaf.path, f"{describe(leaf.stored)}, reduced in {dtype}", "a dtype as wide as the reduction's")
        for leaf, dtype in pairs
        if dtype is not None and torch.promote_types(dtype, leaf.stored.dtype) != leaf.stored.dtype
    ]
    remedy = 'pass communicate="once", or store parameters in the dtype of the reduction'
    refuse(f"{what}: shards would round the sums of microbatches", problems, remedy)
