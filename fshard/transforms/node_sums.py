"""Sums over ranks of which each has several partial sums, those of nodes of one tree over a job's microbatches."""

import torch

from fshard import comm
from fshard.microbatches import Share, TreeSum, nodes
from fshard.transforms.base import Finish, Tensors
from fshard.tree import Axis

# A gradient that is several partial sums has them along its last dim.
NODES = -1


def start_node_sums(stacks: Tensors, axis: Axis, microbatches: int) -> Finish:
    """Start sending each rank its row of partial sums.

    Args:
        stacks: Tensors of shape (ranks, *shape, nodes of this rank).
        axis: The mesh axis.
        microbatches: How many the job has.

    Returns:
        A function that finishes and returns sums of `shape` over all nodes.
    """
    if not stacks:
        return list
    share = Share(microbatches, axis.size, comm.rank(axis), "once")
    own = nodes(share.indices)
    rows = [[part for stack in stacks for part in stack[rank].unbind(NODES)] for rank in range(share.ranks)]
    theirs = [nodes(share.of(rank)) for rank in range(share.ranks)]
    kinds = [[(stack.shape[1:NODES], stack.dtype) for stack in stacks for _ in found] for found in theirs]
    assert all(stack.shape[NODES] == len(own) for stack in stacks)
    exchanging = comm.start_all_to_all(rows, kinds, axis, "scatter")

    def finish() -> Tensors:
        received = exchanging()
        sums = []
        for n in range(len(stacks)):
            tree = TreeSum()
            for found, row in zip(theirs, received, strict=True):
                for (start, size), part in zip(found, row[n * len(found) : (n + 1) * len(found)], strict=True):
                    tree.add(start, part, size, own=True)
            total = tree.total()
            assert total is not None
            sums.append(total)
        return sums

    return finish


def start_whole_node_sums(grads: Tensors, axis: Axis, microbatches: int) -> Finish:
    """Start summing partial sums into values that every rank holds: each sums a row and sends it to the others."""
    shapes = [grad.shape[:NODES] for grad in grads]
    flat = [grad.reshape(-1, grad.shape[NODES]) for grad in grads]
    padded = [torch.nn.functional.pad(grad, (0, 0, 0, -len(grad) % axis.size)) for grad in flat]
    summing = start_node_sums([grad.unflatten(0, (axis.size, -1)) for grad in padded], axis, microbatches)

    def finish() -> Tensors:
        gathered = comm.all_gather(summing(), axis, "scatter") if shapes else []
        return [rows.reshape(-1)[: shape.numel()].view(shape) for rows, shape in zip(gathered, shapes, strict=True)]

    return finish
