"""Slots: each leaf as one call sees it."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fshard.checks import kind
from fshard.comm import PACK_BYTES
from fshard.errors import Problem, leaf_error
from fshard.objective import divided
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
        several: Whether gradients of several microbatches are added up.
        partial: This rank's full gradient so far.
        owed: Whether a reduction of it is due on every rank, whatever this one has.
        grad: Its reduced gradient.
        used: Whether a backward of this rank has reached it.
        state: That of its transform, if it has one.
        hooks: What runs on this rank's full gradient in each backward, by the numbers of its registrations.
    """

    __slots__ = (
        *(
            "alone",
            "derived",
            "first",
            "grad",
            "hooks",
            "like",
            "owed",
            "own_grad",
            "own_partial",
            "partial",
            "path",
            "spec",
        ),
        *("several", "state", "stored", "tensor", "trained", "unhooked", "used"),
    )

    def __init__(self, path: str, leaf: Sharded, derived: bool = False) -> None:
        """Take a leaf in."""
        self.path, self.spec, self.tensor, self.derived = path, leaf.spec, leaf.local, derived
        self.stored = leaf.local.detach()
        self.trained = leaf.local.requires_grad
        transform = leaf.spec.transform
        if derived and self.trained and transform and transform.has_state:
            found = "a leaf computed from others whose transform has a state"
            remedy = "gather leaves as they are, or give the result the spec of one whose transform has no state"
            raise leaf_error("gather: no state", [Problem(path, found, "one of the parameters")], remedy)
        self.like: Like | None = None
        self.alone = self.several = False
        self.first: Any = None
        self.partial: torch.Tensor | None = None
        self.owed = self.used = False
        self.grad: torch.Tensor | None = None
        self.own_grad = self.own_partial = False
        self.state: Any = None
        self.hooks: dict[int, Callable[[torch.Tensor], torch.Tensor | None]] = {}
        self.unhooked: torch.Tensor | None = None

    def set_like(self, full: torch.Tensor) -> None:
        """Note the dtype and shape of what was gathered, the same on every rank."""
        self.like = Like(full.shape, full.dtype, full.device)
        transform = self.spec.transform
        self.alone = self.nbytes >= ((transform and transform.bucket_bytes) or PACK_BYTES)

    def take_partial(self, grad: torch.Tensor) -> None:
        """Add to this rank's full gradient, where hooks are to run to that of the running backward."""
        self.used = True
        if self.hooks:
            self.unhooked = grad if self.unhooked is None else self.unhooked + grad
        else:
            self._add(grad)

    def run_hooks(self) -> None:
        """Run hooks on the gradient of the running backward, which is complete, and add what they make of it.

        Raises:
            ValueError: if a hook returns something else than a gradient.
        """
        if self.unhooked is None:
            return
        # A copy, which hooks may keep or write to.
        grad, self.unhooked = self.unhooked.clone(), None
        for hook in self.hooks.values():
            with torch.no_grad():
                found = hook(grad)
            fits = isinstance(found, torch.Tensor) and _like(found) == _like(grad)
            if found is not None and not fits:
                problem = Problem(self.path, kind(found), f"None or {kind(grad)}")
                raise leaf_error(
                    "register_hook: a hook's result is no gradient", [problem], "return one like its argument"
                )
            grad = grad if found is None else found.detach()
        self._add(grad)

    def _add(self, grad: torch.Tensor) -> None:
        """Add to what is kept; the first part may be anybody's, a sum is the slot's own."""
        if self.partial is None:
            self.partial, self.own_partial = grad, False
        else:
            wide = self._widened(self.partial)
            self.partial = wide.add_(grad) if self.own_partial or wide is not self.partial else wide + grad
            self.own_partial = True

    def _widened(self, grad: torch.Tensor) -> torch.Tensor:
        """A part of the gradient in the dtype that parts are added up in."""
        return grad.to(self.spec.sum_dtype(grad.dtype)) if self.several else grad

    def take(self, grad: torch.Tensor, divisor: Any, own: bool) -> None:
        """Add a reduced part of the gradient, divided.

        Args:
            grad: The part.
            divisor: What it is to be divided by.
            own: Whether it may be written to.
        """
        stored = self.stored.dtype
        wide = grad.to(self.spec.sum_dtype(stored) if self.several else stored)
        grad, own = wide, own or wide is not grad
        if not (isinstance(divisor, int) and divisor == 1):
            grad, own = grad.div_(divisor) if own else divided(grad, divisor), True
        if self.grad is not None:
            grad, own = self.grad.add_(grad) if self.own_grad else self.grad + grad, True
        self.grad, self.own_grad = grad, own

    def gradient(self, divisor: Any = 1) -> torch.Tensor:
        """Give up the finished gradient, divided and in the stored dtype; zeros where this rank has none."""
        grad, self.grad = self.grad, None
        return torch.zeros_like(self.stored) if grad is None else divided(grad, divisor).to(self.stored.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the gathered tensor."""
        assert self.like is not None
        return self.like.shape.numel() * self.like.dtype.itemsize

    def zeros(self) -> torch.Tensor:
        """The gradient of a rank that did not use the leaf."""
        assert self.like is not None
        return torch.zeros(self.like.shape, dtype=self.like.dtype, device=self.like.device)


def _like(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.layout


def policy_of(slots: Sequence[Slot]) -> Residency:
    """The policy of leaves that share one strategy; the plain one where their specs say nothing."""
    return next((slot.spec.residency for slot in slots if slot.spec.residency), _PLAIN)


def specs_of(slots: Sequence[Slot], group: Sequence[int]) -> tuple[Spec, ...]:
    """The specs of some slots, as transforms take them."""
    return tuple(slots[i].spec for i in group)


def start_scatter(slots: Sequence[Slot], grads: Sequence[torch.Tensor]) -> Callable[[], Sequence[torch.Tensor]]:
    """Start reducing gradients of slots that share a transform; when that is finished, its states are new."""
    transform, specs = slots[0].spec.transform, tuple(slot.spec for slot in slots)
    assert transform is not None
    if not transform.has_state:
        return transform.start_scatter(grads, specs)
    finish = transform.start_scatter_with_state(grads, specs, [slot.state for slot in slots])

    def finish_states() -> Sequence[torch.Tensor]:
        scattered, states = finish()
        for slot, state in zip(slots, states, strict=True):
            slot.state = state
        return scattered

    return finish_states
