"""Leaves: the owners of gradients."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from fshard import _compat
from fshard.collectives import divided
from fshard.engine.plan import PLAIN
from fshard.microbatches import TreeSum
from fshard.transforms.compose import check_stateless, reduction, sum_dtype
from fshard.tree import Sharded

if TYPE_CHECKING:
    from fshard.engine.use import Use


class Leaf:
    """One leaf as a call sees it: the owner of its gradient.

    Attributes:
        path: The leaf's path.
        spec: Its spec.
        policy: Its reshard policy; the default where its spec has none.
        tensor: The local tensor that autograd knows: an own leaf of the call, or a derived one.
        stored: The same outside of any graph.
        trained: Whether it takes a gradient.
        derived: Whether it was computed inside the call, so that autograd goes on from its reduced gradient.
        accumulated: Whether gradients of several microbatches are added up.
        keeper: The use whose full tensor other uses share, where nothing is gathered again.
        first: The first use of the running forward, in whose backward the gradient is complete.
        owed: Whether a reduction is due on every rank, whether this one has used the leaf or not.
        used: Whether this rank's loss used it.
        state: The state of its transform, if that has one.
        tree: The sum over all microbatches of the job in one binary tree; None where they are added up in turn.
        full: This rank's full gradient, not yet reduced.
        reduced: The reduced gradient.
    """

    # Of the class: a call makes thousands of leaves.
    accumulated = owed = used = False
    keeper: "Use | None" = None
    first: "Use | None" = None
    state: Any = None
    tree: TreeSum | None = None
    shape: Sequence[int] = ()
    nbytes = -1
    full: torch.Tensor | None = None
    reduced: torch.Tensor | None = None

    def __init__(
        self, path: str, leaf: Sharded, stored: torch.Tensor, *, derived: bool = False, tree: bool = False
    ) -> None:
        """Take a leaf in."""
        self.path, self.spec, self.tensor, self.derived = path, leaf.spec, leaf.local, derived
        self.stored = stored.detach() if stored.requires_grad else stored
        self.trained, self.policy = leaf.local.requires_grad, leaf.spec.reshard or PLAIN
        if derived and self.trained:
            check_stateless(leaf.spec.transform)
        if tree:
            self.tree = TreeSum()

    def gathered(self, full: torch.Tensor) -> None:
        """Note shape, dtype and device of the full tensor, the same on every rank."""
        if self.nbytes < 0:
            self.shape, self.nbytes = full.shape, full.nbytes
            self.dtype, self.device = full.dtype, full.device

    def wide(self, grad: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Cast to the dtype in which gradients, by default of shards, are added up.

        Those of microbatches are added up in at least the dtype of the reduction.
        """
        wanted = dtype or self.stored.dtype
        wanted = sum_dtype(self.spec, wanted) if self.accumulated else wanted
        # Most gradients have that dtype, and an operator takes longer to find that out.
        return grad if grad.dtype is wanted else grad.to(wanted)

    def add_full(self, grad: torch.Tensor) -> None:
        """Add to this rank's full gradient, in its memory if nothing else holds that: a hook's, or another leaf's."""
        self.used = True
        if self.full is not None:
            full, self.full = self.wide(self.full, grad.dtype).detach(), None
            is_own = full.is_contiguous() and not _compat.share_memory([full])[0]
            grad = full.add_(grad) if is_own else full + grad
        self.full = grad

    def take_full(self) -> torch.Tensor:
        """Hand over this rank's full gradient; zeros where it has none."""
        full, self.full, self.owed = self.full, None, False
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device) if full is None else full

    def add_reduced(self, grad: torch.Tensor) -> None:
        """Add to the reduced gradient."""
        self.reduced = grad if self.reduced is None else self.reduced + grad

    def take_reduced(self) -> torch.Tensor | None:
        """Hand over the reduced gradient."""
        reduced, self.reduced = self.reduced, None
        return reduced

    def take_grad(self, divisor: Any = 1) -> torch.Tensor:
        """Hand over the reduced gradient, divided and in the stored dtype; zeros where there is none."""
        reduced = self.take_reduced()
        if self.tree is not None and (reduced := self.tree.total()) is not None:
            reduced = self.wide(reduced)
        return torch.zeros_like(self.stored) if reduced is None else divided(reduced, divisor).to(self.stored.dtype)

    def end_microbatch(self) -> None:
        """Take the gradient of a microbatch into the tree, in the dtype of the reduction, or else of full gradients."""
        if self.tree is not None:
            part = self.take_reduced()
            self.tree.add(None if part is None else part.to(reduction(self.spec.transform).dtype or self.dtype))
