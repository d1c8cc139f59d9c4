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
        split = self.inner.layout(fs.Spec(tuple(grad.shape))).partition
        return grad.new_zeros(grad.shape) if split and self.axes[0].size > 1 else None

    def scatter(self, grads: Tensors, specs: Specs, states: Sequence[Any]) -> tuple[Tensors, list[Any]]:
        (axis,), exact = self.axes, [i for i, state in enumerate(states) if state is None]
        out = dict(zip(exact, self.inner.scatter([grads[i] for i in exact], [specs[i] for i in exact])))
        after, chosen = list(states), {}
        for i in (i for i in range(len(grads)) if i not in out):
            due = grads[i] + states[i]
            size = math.prod(specs[i].local_shape)
            rows = pad(due.reshape(-1), (0, axis.size * size - due.numel())).view(axis.size, size)
            indices = rows.abs().topk(math.ceil(self.density * size)).indices  # (ranks, k)
            chosen[i] = rows.gather(1, indices), indices.int()
            left = rows.scatter(1, indices, 0).view(-1)[: due.numel()].view(due.shape)
            after[i] = left.nan_to_num(0.0, 0.0, 0.0)  # what is not finite must not stay for good
        send, ones = [tensor for pair in chosen.values() for tensor in pair], [1] * axis.size
        received = fs.comm.all_to_all(send, ones, ones, axis, "scatter")
        for place, i in enumerate(chosen):
            total = after[i].new_zeros(math.prod(specs[i].local_shape))
            for values, indices in zip(*received[2 * place : 2 * place + 2]):  # of each rank
                total.index_add_(0, indices, values)
            out[i] = total.view(specs[i].local_shape)
        return [out[i] for i in range(len(grads))], after


def main() -> None:
    args, mesh = parse_args("topk", __doc__, density=0.02), fs.init_mesh({"shard": -1}, device="cpu")
    topk = TopK(fs.fully_shard(mesh, min_shard_elements=1024), args.density)
    strategies = {"ZeRO-3": fs.zero3(mesh), f"top {100 * args.density:g}% of gradients": fs.zero3(mesh, layout=topk)}
    compare(args, strategies, "for gradients", lambda entry: entry.sent * (entry.label == "scatter"))


if __name__ == "__main__":
    main()
