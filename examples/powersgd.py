"""Reduce gradients by PowerSGD (low rank, with error feedback), in a custom transform next to plain ZeRO-3.

    torchrun --standalone --nproc_per_node 2 examples/powersgd.py --rank 4

The transform adds the error of earlier steps to a gradient M, sends M as P = M Q, sums P and makes P orthonormal, and
then sends Q = M^T P. Each rank keeps its own rows of P Q^T (Vogels et al., 2019, "PowerSGD"). The state of a leaf is
the error M - P Q^T, and Q, with which the next step starts. fs.fully_shard stores and gathers the leaves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from compare import compare, parse_args
from torch.nn.functional import pad

import fshard as fs

Tensors, Specs = Sequence[torch.Tensor], Sequence[fs.Spec]


@dataclass(frozen=True)
class PowerSGD(fs.Wrapped):
    rank: int

    def layout(self, spec: fs.Spec) -> fs.Spec:
        laid_out = self.inner.layout(spec)
        if laid_out.dim_of(self.axes[0]):
            raise ValueError("PowerSGD: expected inner to split dim 0, got another dim")
        return laid_out

    def init(self, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        is_split = bool(self.inner.layout(fs.Spec(tuple(grad.shape))).partition)
        if not is_split or self.axes[0].size == 1 or grad.dim() < 2 or not grad.numel():
            return None
        left = grad.new_zeros(len(grad), grad[0].numel())
        # The same on every rank, which torch's own generator need not be.
        generator = torch.Generator().manual_seed(0)
        q = torch.randn(left.shape[1], min(self.rank, *left.shape), generator=generator)
        return left, q.to(left)

    def scatter(self, grads: Tensors, specs: Specs, states: Sequence[Any]) -> tuple[Tensors, list[Any]]:
        results: list[Any] = [None] * len(grads)
        new_states = list(states)
        exact = [i for i, state in enumerate(states) if state is None]
        low = [i for i, state in enumerate(states) if state is not None]
        sums = self.inner.scatter([grads[i] for i in exact], [specs[i] for i in exact])
        for i, total in zip(exact, sums):
            results[i] = total
        factors = self.reduce([grads[i] for i in low], [states[i] for i in low])
        for i, (p, q, error) in zip(low, factors):
            # One step that is not finite must not stay for good.
            new_states[i] = error.nan_to_num(0.0, 0.0, 0.0), q.nan_to_num(0.0, 0.0, 0.0)
            results[i] = self.rows_of_this_rank(p, specs[i]) @ q.T
            results[i] = results[i].view(specs[i].local_shape)
        return results, new_states

    def reduce(self, grads: Tensors, states: Sequence[Any]) -> list[tuple[torch.Tensor, ...]]:
        """For each gradient P (rows, rank) and Q (columns, rank) over all ranks, and what this rank has not sent."""
        (axis,) = self.axes
        matrices = []
        products = []
        for grad, (left, q) in zip(grads, states):
            matrices.append(grad.reshape(left.shape) + left)
            products.append(matrices[-1] @ q)
        bases = [torch.linalg.qr(p).Q for p in fs.comm.all_reduce(products, axis, "scatter")]
        mine = [matrix.T @ p for matrix, p in zip(matrices, bases)]
        sums = fs.comm.all_reduce(mine, axis, "scatter")
        factors = []
        for matrix, p, my_q, q in zip(matrices, bases, mine, sums):
            factors.append((p, q, matrix - p @ my_q.T))
        return factors

    def rows_of_this_rank(self, p: torch.Tensor, spec: fs.Spec) -> torch.Tensor:
        axis = self.axes[0]
        count = spec.local_shape[0]
        padded = pad(p, (0, 0, 0, axis.size * count - len(p)))
        return padded.view(axis.size, count, -1)[fs.comm.rank(axis)]


def main() -> None:
    args = parse_args("powersgd", __doc__, rank=4)
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    low_rank = PowerSGD(fs.fully_shard(mesh, min_shard_elements=1024), args.rank)
    strategies = {
        "ZeRO-3": fs.zero3(mesh),
        f"PowerSGD of rank {args.rank}": fs.zero3(mesh, layout=low_rank),
    }
    compare(args, strategies, "for gradients", lambda entry: entry.sent * (entry.label == "scatter"))


if __name__ == "__main__":
    main()
