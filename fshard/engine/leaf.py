"""Leaves: the owners of gradients."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fshard import _compat
from fshard.collectives import divide
from fshard.engine.plan import DEFAULT_POLICY
from fshard.engine.started import Finish
from fshard.transforms.run import check_stateless
from fshard.transforms.structure import reduction, sum_dtype
from fshard.tree import Sharded

if TYPE_CHECKING:
    from fshard.engine.gathered_unit import GatheredUnit


class FullTensorFacts(NamedTuple):
    """The facts about a leaf's full tensor that remain when the tensor has been dropped. Equal on every rank."""

    shape: Sequence[int]
    dtype: torch.dtype
    device: torch.device
    nbytes: int


# The facts about a leaf that has not been gathered yet.
NOT_GATHERED = FullTensorFacts((), torch.float32, torch.device("cpu"), 0)


@functools.lru_cache(maxsize=1024)
def describe_full(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> FullTensorFacts:
    """Describe a full tensor by facts that thousands of leaves share, so that the garbage collector counts few."""
    return FullTensorFacts(shape, dtype, device, shape.numel() * dtype.itemsize)


class Leaf:
    """One leaf as a call sees it: the owner of its gradient.

    Attributes:
        path: The leaf's path.
        spec: The leaf's spec.
        policy: The leaf's reshard policy; the default policy if its spec has none.
        tensor: The local tensor that autograd knows: one that the call bound, or a derived one.
        stored: The same tensor outside of any graph.
        trained: Whether the leaf takes a gradient.
        derived: Whether the function computed the leaf, so that autograd goes on from its reduced gradient.
        accumulated: Whether the gradients of several microbatches are added up.
        dtype: The dtype of the stored tensor.
        full_facts: Shape, dtype, device and bytes of the full tensor; the stored tensor, which has them, if it is full.
        regather_axis: The mesh axis that the backward gathers over, if each rank keeps a piece for that.
        piece: That piece: what is gathered over the axes before, from the first gather to the last backward.
        started: Waits for a gather that the program has started, and returns its full tensor. The next gathered unit
            with the leaf takes it.
        shared_from: The gathered unit whose full tensor other units share, if the leaf is not gathered again.
        gathered_units: The gathered units of the running forward that hold the leaf. The backward passes the first one
            last, and the gradient is complete there.
        must_reduce: Whether every rank owes a reduction, whether this rank has used the leaf or not.
        used: Whether this rank's loss used the leaf.
        transform_state: The state of the leaf's transform, if that has one.
        full_grad: This rank's full gradient, not yet reduced.
        inner_sum: The sum of gradients that are reduced over all axes but the outermost one.
        reduced_grad: The reduced gradient.
    """

    def __init__(
        self,
        path: str,
        param: Sharded,
        stored: torch.Tensor,
        *,
        derived: bool = False,
        has_backward: bool = True,
    ) -> None:
        """Describe a leaf; it has no gradient yet.

        Args:
            path: The leaf's path.
            param: The leaf as the function computes with it.
            stored: The tensor to gather.
            derived: Whether the function computed the leaf.
            has_backward: Whether a backward follows, for which to keep a piece.
        """
        self.path = path
        self.spec = param.spec
        self.policy = param.spec.reshard or DEFAULT_POLICY
        self.tensor = param.local
        self.stored = stored.detach() if stored.requires_grad else stored
        self.trained = param.local.requires_grad
        self.derived = derived
        self.accumulated = False
        self.dtype = stored.dtype
        self.full_facts: FullTensorFacts | torch.Tensor = NOT_GATHERED
        self.regather_axis = self.policy.regather_axis if has_backward else None
        self.piece: Any = None
        self.started: Finish | None = None
        self.shared_from: GatheredUnit | None = None
        self.gathered_units: tuple[GatheredUnit, ...] = ()
        self.must_reduce = False
        self.used = False
        self.transform_state: Any = None
        self.full_grad: torch.Tensor | None = None
        self.inner_sum: torch.Tensor | None = None
        self.reduced_grad: torch.Tensor | None = None
        if derived and self.trained:
            check_stateless(param.spec.transform)

    def cast_for_sum(self, grad: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Cast a gradient to the dtype in which gradients are added up.

        Args:
            grad: The gradient.
            dtype: The dtype of the other gradients; None means the dtype of the stored shard. Over several microbatches
                it is widened to at least the dtype of the reduction.

        Returns:
            The gradient in that dtype.
        """
        target = dtype or self.dtype
        if self.accumulated:
            target = sum_dtype(self.spec, target)
        # Most gradients have that dtype already, and calling the operator to find that out takes longer.
        return grad if grad.dtype is target else grad.to(target)

    def add_full(self, grad: torch.Tensor) -> None:
        """Add to this rank's full gradient.

        Adds in place unless something else, such as a user's hook, holds the same memory.
        """
        self.used = True
        if self.full_grad is None:
            self.full_grad = grad
            return
        total = self.cast_for_sum(self.full_grad, grad.dtype).detach()
        # share_memory counts references, so drop this one first.
        self.full_grad = None
        can_write = total.is_contiguous() and not _compat.share_memory([total])[0]
        self.full_grad = total.add_(grad) if can_write else total + grad

    def take_full(self) -> torch.Tensor:
        """Hand over this rank's full gradient; zeros if it has none."""
        grad = self.full_grad
        self.full_grad = None
        self.must_reduce = False
        if grad is not None:
            return grad
        facts = self.full_facts
        return torch.zeros(facts.shape, dtype=facts.dtype, device=facts.device)

    def take_inner(self, grad: torch.Tensor) -> torch.Tensor:
        """Hand over the sum of gradients that are not yet reduced over the outermost axis, with one more.

        Args:
            grad: The gradient to add, in the dtype of the result.

        Returns:
            The sum.
        """
        inner_sum = self.inner_sum
        self.inner_sum = None
        return grad if inner_sum is None else (inner_sum + grad).to(grad.dtype)

    def add_reduced(self, grad: torch.Tensor) -> None:
        """Add to the reduced gradient."""
        self.reduced_grad = grad if self.reduced_grad is None else self.reduced_grad + grad

    def take_reduced(self) -> torch.Tensor | None:
        """Hand over the reduced gradient."""
        grad = self.reduced_grad
        self.reduced_grad = None
        return grad

    def take_grad(self, divisor: Any) -> torch.Tensor:
        """Hand over the reduced gradient, divided and in the stored dtype; zeros if there is none."""
        total = self.take_reduced()
        if total is None:
            return torch.zeros_like(self.stored)
        total = divide(total, divisor)
        return total if total.dtype is self.dtype else total.to(self.dtype)

    def take_microbatch(self) -> torch.Tensor | None:
        """Hand over the gradient of one microbatch, in the dtype of its reduction, or else of full gradients."""
        grad = self.take_reduced()
        if grad is None:
            return None
        return grad.to(reduction(self.spec.transform).dtype or self.full_facts.dtype)

    def put_sum(self, total: torch.Tensor) -> None:
        """Receive the sum over all microbatches as the reduced gradient."""
        self.reduced_grad = self.cast_for_sum(total)
