"""Split every shard between two nodes, in a custom transform next to HSDP and plain ZeRO-3.

    torchrun --standalone --nproc_per_node 4 examples/sibling.py

HSDP keeps every shard on both nodes. Here, each node keeps half of every shard. gather fetches the other half from the
sibling, which is the rank at the same place in the other node, and then all-gathers within the node. scatter is the
transpose. On 2 nodes of S ranks, with n bytes of parameters, each rank keeps and sends to the other node:

              kept   by a gather     by a scatter    in a step of ZeRO-3, which gathers twice
    HSDP      n/S    0               n/S             n/S
    siblings  n/2S   n/2S            n/2S            1.5 n/S
    ZeRO-3    n/2S   n/S - n/(2SS)   n/S - n/(2SS)   3 n/S - 1.5 n/SS, by a ring through both nodes

Siblings halve HSDP's memory for parameters, gradients and optimizer state, and the work of an update. They send 1.5
times as many bytes between nodes, or equally many if units are gathered once. The transform sends halves exactly,
because nodes must not drift apart.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from compare import compare, parse_args
from torch.nn.functional import pad

import fshard as fs

Tensors = Sequence[torch.Tensor]
Specs = Sequence[fs.Spec]


@dataclass(frozen=True)
class Sibling(fs.ShardTransform):
    across: fs.Axis  # a rank and its siblings
    node: fs.Axis  # the ranks of one node
    min_elements: int = 1024  # smaller leaves stay whole

    @property
    def axes(self) -> tuple[fs.Axis, ...]:
        return (self.across, self.node)

    def layout(self, spec: fs.Spec) -> fs.Spec:
        elements = math.prod(spec.shape)
        if not spec.shape or elements < self.min_elements:
            return spec.on(self.node).on(self.across)
        return spec.split(self.node, 0).split(self.across, 0)

    def gather(self, leaves: Tensors, specs: Specs) -> Tensors:
        results = list(leaves)
        split = [i for i, spec in enumerate(specs) if spec.partition]
        for axis in (self.across, self.node):
            shards = [results[i] for i in split]
            gathered = fs.comm.all_gather(shards, axis, "gather")
            for i, rows in zip(split, gathered):
                count = specs[i].shared_out(0, axis)
                results[i] = rows.flatten(0, 1)[:count]
        return results

    def scatter(self, grads: Tensors, specs: Specs) -> Tensors:
        results = list(grads)
        split = [i for i, spec in enumerate(specs) if spec.partition]
        whole = [i for i, spec in enumerate(specs) if not spec.partition]
        for axis in (self.node, self.across):
            rows = [rows_of_ranks(results[i], axis) for i in split]
            for i, total in zip(split, fs.comm.reduce_scatter(rows, axis, "scatter")):
                results[i] = total
            terms = [results[i] for i in whole]
            for i, total in zip(whole, fs.comm.all_reduce(terms, axis, "scatter")):
                results[i] = total
        return results


def rows_of_ranks(grad: torch.Tensor, axis: fs.Axis) -> torch.Tensor:
    """A row for each rank, the last one padded."""
    missing = -len(grad) % axis.size
    other_dims = (0, 0) * (grad.dim() - 1)
    padded = pad(grad, (*other_dims, 0, missing))
    return padded.unflatten(0, (axis.size, -1))


def main() -> None:
    args = parse_args("sibling", __doc__, steps=60)
    mesh = fs.init_mesh({"replicate": 2, "shard": -1}, device="cpu")
    flat = fs.init_mesh({"shard": -1}, device="cpu")
    across = fs.axis_of(mesh, "replicate")
    node = fs.axis_of(mesh, "shard")
    siblings = Sibling(across, node)
    # With larger buckets, units this small would be merged, and gathered once.
    zero3 = partial(fs.zero3, bucket_bytes=0)
    strategies = {
        "ZeRO-3": zero3(flat),
        "HSDP": fs.hsdp(mesh),
        "siblings": zero3(mesh, layout=siblings),
    }

    def bytes_between_nodes(entry: fs.comm.Collective) -> float:
        if entry.size == flat.size():
            # Of a ring through all ranks two links lead to the other node.
            return entry.sent * 2 / flat.size()
        if entry.axis == "replicate":
            return entry.sent
        return 0.0

    compare(args, strategies, "between nodes", bytes_between_nodes)


if __name__ == "__main__":
    main()
