"""Reduce gradients by top-k with error feedback, in a custom transform next to plain ZeRO-3.

    torchrun --standalone --nproc_per_node 2 examples/topk.py --density 0.02

Each rank adds the elements that it has not sent yet to its gradient, and sends to every other rank the largest elements
of that rank's shard. The other elements stay in the transform's state (Stich et al., 2018, "Sparsified SGD with
Memory").
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from compare import compare, parse_args
from torch.nn.functional import pad

import fshard as fs

Tensors = Sequence[torch.Tensor]
Specs = Sequence[fs.Spec]


@dataclass(frozen=True)
class TopK(fs.Wrapped):
    density: float

    def layout(self, spec: fs.Spec) -> fs.Spec:
        laid_out = self.inner.layout(spec)
        (axis,) = self.axes
        if laid_out.dim_of(axis):
            raise ValueError("TopK: expected inner to split dim 0, got another dim")
        return laid_out

    def init(self, grad: torch.Tensor) -> torch.Tensor | None:
        (axis,) = self.axes
        spec = self.inner.layout(fs.Spec(tuple(grad.shape)))
        if not spec.partition or axis.size == 1:
            return None
        return grad.new_zeros(grad.shape)

    def scatter(
        self,
        grads: Tensors,
        specs: Specs,
        states: Sequence[Any],
    ) -> tuple[Tensors, list[Any]]:
        (axis,) = self.axes
        results: list[Any] = [None] * len(grads)
        new_states = list(states)
        exact = []
        sparse = []
        for i, state in enumerate(states):
            group = exact if state is None else sparse
            group.append(i)

        exact_grads = [grads[i] for i in exact]
        exact_specs = [specs[i] for i in exact]
        sums = self.inner.scatter(exact_grads, exact_specs)
        for i, total in zip(exact, sums):
            results[i] = total

        chosen = []
        for i in sparse:
            due = grads[i] + states[i]
            values, indices, new_states[i] = self.choose(due, specs[i])
            chosen += [values, indices]
        one_row_each = [1] * axis.size
        received = fs.comm.all_to_all(chosen, one_row_each, one_row_each, axis, "scatter")
        values_by_leaf = received[::2]
        indices_by_leaf = received[1::2]
        for i, values, indices in zip(sparse, values_by_leaf, indices_by_leaf):
            shape = specs[i].local_shape
            total = grads[i].new_zeros(math.prod(shape))
            for values_of_rank, indices_of_rank in zip(values, indices):
                total.index_add_(0, indices_of_rank, values_of_rank)
            results[i] = total.view(shape)
        return results, new_states

    def choose(self, due: torch.Tensor, spec: fs.Spec) -> tuple[torch.Tensor, ...]:
        """The largest elements of each rank's shard with their places, (ranks, k) each, and the others."""
        (axis,) = self.axes
        size = math.prod(spec.local_shape)
        missing = axis.size * size - due.numel()
        padded = pad(due.reshape(-1), (0, missing))
        rows = padded.view(axis.size, size)
        count = math.ceil(self.density * size)
        indices = rows.abs().topk(count).indices
        values = rows.gather(1, indices)
        others = rows.scatter(1, indices, 0).view(-1)
        others = others[: due.numel()].view(due.shape)
        # What is not finite must not stay for good.
        return values, indices.int(), others.nan_to_num(0.0, 0.0, 0.0)


def bytes_of_gradients(entry: fs.comm.Collective) -> float:
    return entry.sent if entry.label == "scatter" else 0.0


def main() -> None:
    args = parse_args("topk", __doc__, density=0.02)
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    plain = fs.fully_shard(mesh, min_shard_elements=1024)
    topk = TopK(plain, args.density)
    strategies = {
        "ZeRO-3": fs.zero3(mesh),
        f"top {100 * args.density:g}% of gradients": fs.zero3(mesh, layout=topk),
    }
    compare(args, strategies, "for gradients", bytes_of_gradients)


if __name__ == "__main__":
    main()
