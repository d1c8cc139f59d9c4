"""Slots: each leaf as one call sees it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fshard import _compat
from fshard.comm import PACK_BYTES
from fshard.tree import Residency, Sharded, Spec

_PLAIN = Residency()


class Like(NamedTuple):
    """What zeros in the place of a tensor are made of."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class Slot:
    """One leaf as a call sees it.

    Attributes:
        path: The leaf's path.
        spec: Its spec, as the caller passed it.
        tensor: The local tensor that autograd knows: the call's own leaf, or one computed from such.
        trained: Whether it takes a gradient.
        derived: Whether it was computed inside the call, so that autograd needs its gradient finished.
        like: What the gathered tensor is like, once it has been gathered.
        alone: Whether it is large enough for an autograd node and a collective of its own.
        first: The use in whose backward its gradient is complete.
        partial: This rank's full gradient so far.
        owed: Whether a reduction of it is due on every rank, whatever this one has.
        grad: Its reduced gradient.
    """

    __slots__ = (
        "alone",
        "derived",
        "first",
        "grad",
        "like",
        "owed",
        "partial",
        "path",
        "spec",
        "stored",
        "tensor",
        "trained",
    )

    def __init__(self, path: str, leaf: Sharded, derived: bool = False) -> None:
        """Take a leaf in."""
        self.path, self.spec, self.tensor, self.derived = path, leaf.spec, leaf.local, derived
        self.stored = leaf.local.detach()
        self.trained = leaf.local.requires_grad
        self.like: Like | None = None
        self.alone = False
        self.first: Any = None
        self.partial: torch.Tensor | None = None
        self.owed = False
        self.grad: torch.Tensor | None = None

    def set_like(self, full: torch.Tensor) -> None:
        """Note the dtype and shape of what was gathered, the same on every rank."""
        self.like = Like(full.shape, full.dtype, full.device)
        self.alone = full.numel() * full.element_size() >= PACK_BYTES

    def gradient(self) -> torch.Tensor | None:
        """Give up the finished gradient; None where the leaf takes none."""
        grad, self.grad = self.grad, None
        if not self.trained:
            return None
        return torch.zeros_like(self.stored) if grad is None else grad

    def add(self, grad: torch.Tensor) -> None:
        """Add a part of the finished gradient."""
        self.grad = summed(self.grad, grad)

    def zeros(self) -> torch.Tensor:
        """The gradient of a rank that did not use the leaf."""
        assert self.like is not None
        return torch.zeros(self.like.shape, dtype=self.like.dtype, device=self.like.device)


def policy_of(slots: Sequence[Slot]) -> Residency:
    """The policy of leaves that share one strategy; the plain one where their specs say nothing."""
    return next((slot.spec.residency for slot in slots if slot.spec.residency), _PLAIN)


def summed(total: torch.Tensor | None, grad: torch.Tensor) -> torch.Tensor:
    """Add to a sum that the caller gives up, in place where nobody else can see it."""
    if total is None:
        return grad
    return total.add_(grad) if _compat.is_sole_owner(total) and total.is_contiguous() else total + grad


def specs_of(slots: Sequence[Slot], group: Sequence[int]) -> tuple[Spec, ...]:
    """The specs of some slots, as transforms take them."""
    return tuple(slots[i].spec for i in group)
