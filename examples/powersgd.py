"""Reduce gradients by PowerSGD (low rank, with error feedback), in a custom transform next to plain ZeRO-3.

    torchrun --standalone --nproc_per_node 2 examples/powersgd.py --rank 4

The transform adds the error of earlier steps to a gradient M, sends M as P = M Q, sums P and makes P orthonormal, and
then sends Q = M^T P. Each rank keeps its own rows of P Q^T (Vogels et al., 2019, "PowerSGD"). The state of a leaf is
the error M - P Q^T, and Q, with which the next step starts. fs.fully_shard stores and gathers the leaves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from compare import compare, parse_args
from torch.nn.functional import pad

import fshard as fs

Tensors = Sequence[torch.Tensor]
Specs = Sequence[fs.Spec]


class State(NamedTuple):
    """What a leaf of two dims or more keeps between steps, as matrices of its rows."""

    error: torch.Tensor  # (rows, columns)
    q: torch.Tensor  # (columns, rank)


class Factors(NamedTuple):
    """The sum of a gradient over ranks, P Q^T, and what this rank has not sent."""

    p: torch.Tensor  # (rows, rank)
    q: torch.Tensor  # (columns, rank)
    error: torch.Tensor  # (rows, columns)


@dataclass(frozen=True)
class PowerSGD(fs.Wrapped):
    rank: int

    def layout(self, spec: fs.Spec) -> fs.Spec:
        laid_out = self.inner.layout(spec)
        (axis,) = self.axes
        if laid_out.dim_of(axis):
            raise ValueError("PowerSGD: expected inner to split dim 0, got another dim")
        return laid_out

    def init(self, grad: torch.Tensor) -> State | None:
        (axis,) = self.axes
        spec = self.inner.layout(fs.Spec(tuple(grad.shape)))
        if not spec.partition or axis.size == 1:
            return None
        if grad.dim() < 2 or not grad.numel():
            return None
        rows = len(grad)
        columns = grad[0].numel()
        rank = min(self.rank, rows, columns)
        # The same on every rank, which torch's own generator need not be.
        generator = torch.Generator().manual_seed(0)
        q = torch.randn(columns, rank, generator=generator)
        return State(grad.new_zeros(rows, columns), q.to(grad))

    def scatter(
        self,
        grads: Tensors,
        specs: Specs,
        states: Sequence[Any],
    ) -> tuple[Tensors, list[Any]]:
        results: list[Any] = [None] * len(grads)
        new_states = list(states)
        exact = []
        low_rank = []
        for i, state in enumerate(states):
            group = exact if state is None else low_rank
            group.append(i)

        exact_grads = [grads[i] for i in exact]
        exact_specs = [specs[i] for i in exact]
        sums = self.inner.scatter(exact_grads, exact_specs)
        for i, total in zip(exact, sums):
            results[i] = total

        matrices = []
        for i in low_rank:
            error = states[i].error
            matrices.append(grads[i].reshape(error.shape) + error)
        first_factors = [states[i].q for i in low_rank]
        for i, factors in zip(low_rank, self.reduce(matrices, first_factors)):
            # One step that is not finite must not stay for good.
            error = factors.error.nan_to_num(0.0, 0.0, 0.0)
            q = factors.q.nan_to_num(0.0, 0.0, 0.0)
            new_states[i] = State(error, q)
            rows = self.rows_of_this_rank(factors.p, specs[i])
            total = rows @ factors.q.T
            results[i] = total.view(specs[i].local_shape)
        return results, new_states

    def reduce(self, matrices: Tensors, first_factors: Tensors) -> list[Factors]:
        """Sum matrices over ranks, each as the product of two factors."""
        (axis,) = self.axes
        products = []
        for matrix, q in zip(matrices, first_factors):
            products.append(matrix @ q)
        sums = fs.comm.all_reduce(products, axis, "scatter")
        bases = [torch.linalg.qr(total).Q for total in sums]

        mine = []
        for matrix, p in zip(matrices, bases):
            mine.append(matrix.T @ p)
        sums = fs.comm.all_reduce(mine, axis, "scatter")

        factors = []
        for matrix, p, my_q, q in zip(matrices, bases, mine, sums):
            error = matrix - p @ my_q.T
            factors.append(Factors(p, q, error))
        return factors

    def rows_of_this_rank(self, p: torch.Tensor, spec: fs.Spec) -> torch.Tensor:
        (axis,) = self.axes
        count = spec.local_shape[0]
        missing = axis.size * count - len(p)
        padded = pad(p, (0, 0, 0, missing))
        rows = padded.view(axis.size, count, -1)
        return rows[fs.comm.rank(axis)]


def bytes_of_gradients(entry: fs.comm.Collective) -> float:
    return entry.sent if entry.label == "scatter" else 0.0


def main() -> None:
    args = parse_args("powersgd", __doc__, rank=4)
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    plain = fs.fully_shard(mesh, min_shard_elements=1024)
    low_rank = PowerSGD(plain, args.rank)
    strategies = {
        "ZeRO-3": fs.zero3(mesh),
        f"PowerSGD of rank {args.rank}": fs.zero3(mesh, layout=low_rank),
    }
    compare(args, strategies, "for gradients", bytes_of_gradients)


if __name__ == "__main__":
    main()
