"""What runs around the ring of ring attention: blocks of keys, values and their gradients, step by step."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

import fshard as fs
from fshard.ext.parallel.attention_blocks import Block, attend, attend_backward, attend_plainly, joined

Tensors = Sequence[torch.Tensor]
LABEL = "ring_attention"


class Ring(NamedTuple):
    """The arguments of a ring, and whether a rank's time is cut in two chunks, so that blocks take less memory."""

    axis: fs.Axis
    causal: bool
    zigzag: bool
    halved: bool
    scale: float

    def chunks(self, rank: int) -> list[int]:
        """Number the chunks of time that a rank holds."""
        if not self.halved:
            return [rank]
        return [rank, 2 * self.axis.size - 1 - rank] if self.zigzag else [2 * rank, 2 * rank + 1]

    def cut(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """Cut a rank's time in its chunks."""
        return tensor.chunk(2, 2) if self.halved else [tensor]

    def pairs(self, step: int) -> list[tuple[int, int, bool, bool]]:
        """List the blocks of this rank and of the keys that the rank so many places before it holds.

        Returns:
            The number of its own chunk of queries and of the other's chunk of keys, whether they are the same chunk, in
            which a query sees keys up to its own place, and whether its queries see the keys.
        """
        own = fs.comm.rank(self.axis)
        queries, keys = self.chunks(own), self.chunks((own - step) % self.axis.size)
        numbered = [(i, j, a, b) for i, a in enumerate(queries) for j, b in enumerate(keys)]
        return [(i, j, self.causal and a == b, not self.causal or b <= a) for i, j, a, b in numbered]


def plain(tensors: Tensors, ring: Ring) -> Tensors:
    """Compute the result by operations that are differentiable to any order."""
    return _around(tensors, ring, attend_plainly, partial(_permuted, axis=ring.axis), skip=False)[:1]


def forward(tensors: Tensors, ring: Ring) -> tuple[Tensors, Tensors]:
    """Compute the result, and what `backward` needs."""
    out, logs = _around(tensors, ring, attend, partial(_sent, ring=ring), skip=True)
    return [out], [*tensors, out, logs]


def _around(
    tensors: Tensors, ring: Ring, block: Block, send: Callable[[Tensors], Callable[[], Tensors]], skip: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the keys of every rank, while those of the next one are on their way.

    Args:
        tensors: q, k and v.
        ring: The ring.
        block: What attends to some keys.
        send: Starts to send tensors to the next rank, and returns what waits for those of the last.
        skip: Whether blocks are left out whose keys are not seen. Else they are computed and not chosen: all ranks then
            have the same graph, and run the transposes of their collectives in the same order.

    Returns:
        The result and the logs.
    """
    q, k, v = tensors
    queries: list[Any] = list(ring.cut(q))
    found: list[Any] = [None] * len(queries)
    for step in range(ring.axis.size):
        receive = send([k, v]) if step + 1 < ring.axis.size else None
        keys, values = ring.cut(k), ring.cut(v)
        for i, j, causal, seen in ring.pairs(step):
            if seen or not skip:
                both = joined(found[i], block(queries[i], keys[j], values[j], causal, ring.scale))
                found[i] = both if skip or found[i] is None else _chosen(seen, both, found[i])
        if receive is not None:
            k, v = receive()
    out, logs = (torch.cat(part, 2) if ring.halved else part[0] for part in zip(*found, strict=True))
    return out.to(q.dtype), logs


def _chosen(first: bool, one: Tensors, other: Tensors) -> Tensors:
    pairs = zip(one, other, strict=True)
    return tuple(torch.where(torch.full_like(a, first, dtype=torch.bool), a, b) for a, b in pairs)


def backward(saved: Tensors, grads: Tensors, ring: Ring) -> Tensors:
    """Send keys and values around once more, and with them the sums of their gradients, home in the end.

    Sums travel in the dtype of the logs. A rank's own keys come last: until then their sums travel.
    """
    q, k, v, out, logs = saved
    send, size = partial(_sent, ring=ring), ring.axis.size
    dq, dk, dv = (x.new_zeros(x.shape, dtype=logs.dtype) for x in (q, k, v))
    of_queries = list(zip(*map(ring.cut, (grads[0], q, out, logs, dq)), strict=True))

    def add(step: int, k: torch.Tensor, v: torch.Tensor) -> None:
        of_keys = list(zip(*map(ring.cut, (k, v, dk, dv)), strict=True))
        for i, j, causal, seen in ring.pairs(step):
            if not seen:
                continue
            (grad, query, result, log, to_query), (key, value, *to_keys) = of_queries[i], of_keys[j]
            parts = attend_backward(grad, query, key, value, result, log, causal, ring.scale)
            for total, part in zip((to_query, *to_keys), parts, strict=True):
                total.add_(part)

    receive = send([k, v]) if size > 1 else None
    for step in range(1, size):
        assert receive is not None
        far_k, far_v = receive()
        receive = send([far_k, far_v]) if step + 1 < size else None
        if step > 1:
            (dk,) = send([dk])()
            (dv,) = send([dv])()
        add(step, far_k, far_v)
        del far_k, far_v
    if size > 1:
        (dk,) = send([dk])()
        (dv,) = send([dv])()
    add(0, k, v)
    return [total.to(x.dtype) for total, x in zip((dq, dk, dv), (q, k, v), strict=True)]


def _sent(tensors: Tensors, ring: Ring) -> Callable[[], Tensors]:
    """Start to send tensors to the next rank, of which large ones are not copied; returns what waits for the last's."""
    axis, own = ring.axis, fs.comm.rank(ring.axis)
    told = f"causal={ring.causal}, zigzag={ring.zigzag}, scale={ring.scale:.6g}"
    shapes = ", ".join(f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in tensors)
    after, before = (own + 1) % axis.size, (own - 1) % axis.size
    send, receive = ([int(rank == other) for rank in range(axis.size)] for other in (after, before))
    rows, label = [tensor.unsqueeze(0) for tensor in tensors], fs.comm.Label(LABEL, parts=f"{told}, {shapes}")
    finish = fs.comm.start_all_to_all(rows, send, receive, axis, label)
    return lambda: [row[0] for row in finish()]


def _permuted(tensors: Tensors, axis: fs.Axis) -> Callable[[], Tensors]:
    around = [(rank, (rank + 1) % axis.size) for rank in range(axis.size)]
    received: Tensors = fs.ppermute(list(tensors), axis, around)
    return lambda: received
