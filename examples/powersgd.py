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
        split = self.inner.layout(fs.Spec(tuple(grad.shape))).partition
        if not split or self.axes[0].size == 1 or grad.dim() < 2 or not grad.numel():
            return None
        left = grad.new_zeros(len(grad), grad[0].numel())
        # The same on every rank, which torch's own generator need not be.
        q = torch.randn(left.shape[1], min(self.rank, *left.shape), generator=torch.Generator().manual_seed(0))
        return left, q.to(left)

    def scatter(self, grads: Tensors, specs: Specs, states: Sequence[Any]) -> tuple[Tensors, list[Any]]:
        (axis,) = self.axes
        exact = [i for i, state in enumerate(states) if state is None]
        out = dict(zip(exact, self.inner.scatter([grads[i] for i in exact], [specs[i] for i in exact])))
        low, after = [i for i in range(len(grads)) if i not in out], list(states)
        due = [grads[i].reshape(states[i][0].shape) + states[i][0] for i in low]  # (rows, columns) each
        sums = fs.comm.all_reduce([m @ states[i][1] for m, i in zip(due, low)], axis, "scatter")
        bases = [torch.linalg.qr(p).Q for p in sums]  # (rows, rank) each
        mine = [m.T @ p for m, p in zip(due, bases)]  # (columns, rank) each
        for i, m, p, own, q in zip(low, due, bases, mine, fs.comm.all_reduce(mine, axis, "scatter")):
            # One step that is not finite must not stay for good.
            after[i] = tuple(part.nan_to_num(0.0, 0.0, 0.0) for part in (m - p @ own.T, q))
            count = specs[i].local_shape[0]
            rows = pad(p, (0, 0, 0, axis.size * count - len(p))).view(axis.size, count, -1)[fs.comm.rank(axis)]
            out[i] = (rows @ q.T).view(specs[i].local_shape)
        return [out[i] for i in range(len(grads))], after


def main() -> None:
    args, mesh = parse_args("powersgd", __doc__, rank=4), fs.init_mesh({"shard": -1}, device="cpu")
    low = PowerSGD(fs.fully_shard(mesh, min_shard_elements=1024), args.rank)
    strategies = {"ZeRO-3": fs.zero3(mesh), f"PowerSGD of rank {args.rank}": fs.zero3(mesh, layout=low)}
    compare(args, strategies, "for gradients", lambda entry: entry.sent * (entry.label == "scatter"))


if __name__ == "__main__":
    main()
