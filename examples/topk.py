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

Tensors, Specs = Sequence[torch.Tensor], Sequence[fs.Spec]


@dataclass(frozen=True)
class TopK(fs.Wrapped):
    density: float

    def layout(self, spec: fs.Spec) -> fs.Spec:
        laid_out = self.inner.layout(spec)
        if laid_out.dim_of(self.axes[0]):
            raise ValueError("TopK: expected inner to split dim 0, got another dim")
        return laid_out

    def init(self, grad: torch.Tensor) -> torch.Tensor | None:
        is_split = bool(self.inner.layout(fs.Spec(tuple(grad.shape))).partition)
        return grad.new_zeros(grad.shape) if is_split and self.axes[0].size > 1 else None

    def scatter(self, grads: Tensors, specs: Specs, states: Sequence[Any]) -> tuple[Tensors, list[Any]]:
        (axis,) = self.axes
        results: list[Any] = [None] * len(grads)
        new_states = list(states)
        exact = [i for i, state in enumerate(states) if state is None]
        sparse = [i for i, state in enumerate(states) if state is not None]
        sums = self.inner.scatter([grads[i] for i in exact], [specs[i] for i in exact])
        for i, total in zip(exact, sums):
            results[i] = total
        send = []
        for i in sparse:
            values, indices, new_states[i] = self.choose(grads[i] + states[i], specs[i])
            send += [values, indices]
        one_row_each = [1] * axis.size
        received = fs.comm.all_to_all(send, one_row_each, one_row_each, axis, "scatter")
        for i, values, indices in zip(sparse, received[::2], received[1::2]):
            total = grads[i].new_zeros(math.prod(specs[i].local_shape))
            for values_of_rank, indices_of_rank in zip(values, indices):
                total.index_add_(0, indices_of_rank, values_of_rank)
            results[i] = total.view(specs[i].local_shape)
        return results, new_states

    def choose(self, due: torch.Tensor, spec: fs.Spec) -> tuple[torch.Tensor, ...]:
        """The largest elements of each rank's shard with their places, (ranks, k) each, and the others."""
        (axis,) = self.axes
        size = math.prod(spec.local_shape)
        padded = pad(due.reshape(-1), (0, axis.size * size - due.numel()))
        rows = padded.view(axis.size, size)
        indices = rows.abs().topk(math.ceil(self.density * size)).indices
        others = rows.scatter(1, indices, 0).view(-1)[: due.numel()].view(due.shape)
        # What is not finite must not stay for good.
        return rows.gather(1, indices), indices.int(), others.nan_to_num(0.0, 0.0, 0.0)


def main() -> None:
    args = parse_args("topk", __doc__, density=0.02)
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    topk = TopK(fs.fully_shard(mesh, min_shard_elements=1024), args.density)
    strategies = {
        "ZeRO-3": fs.zero3(mesh),
        f"top {100 * args.density:g}% of gradients": fs.zero3(mesh, layout=topk),
    }
    compare(args, strategies, "for gradients", lambda entry: entry.sent * (entry.label == "scatter"))


if __name__ == "__main__":
    main()
