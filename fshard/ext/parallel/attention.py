"""Attention over sequences that are split between ranks: keys that travel around them, or exchanges of heads for time.

Ring attention follows Liu, Zaharia and Abbeel 2023 (https://arxiv.org/abs/2310.01889): keys and values travel around
the ranks of an axis while each rank computes with those that it has. Striped Attention (Brandon et al. 2023,
https://arxiv.org/abs/2311.09431) balances its causal form by another order of the sequence; the zig-zag order here is
that of Llama 3's context parallelism (Dubey et al. 2024, https://arxiv.org/abs/2407.21783). Exchanges of heads for time
follow Jacobs et al. 2023 (https://arxiv.org/abs/2309.14509). Blocks of keys are joined by the arithmetic of
FlashAttention (Dao et al. 2022, https://arxiv.org/abs/2205.14135) and of online softmax before it (Milakov and
Gimelshein 2018, https://arxiv.org/abs/1805.02867).

Tensors have the shape (batch, heads, time, head dim); the log-sum-exp of each query's scores has no last dim.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

import fshard as fs
from fshard.ext import _compat
from fshard.extend import check_axis, custom_call, describe, expect

Tensors = Sequence[torch.Tensor]

# So many queries at a time compute scores, where no fused kernel does: memory stays linear in time.
ROWS = 512

# Maps q, k, v, whether each query sees the keys up to its own place alone, and the scale, to the result and the logs.
Block = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool, float], tuple[torch.Tensor, torch.Tensor]]


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    axis: fs.Axis,
    *,
    is_causal: bool = False,
    order: str = "contiguous",
    scale: float | None = None,
) -> torch.Tensor:
    """Compute attention over a sequence whose pieces the ranks of an axis hold, by sending keys and values around.

    Memory grows linearly with the time of one rank. The forward sends k and v to each other rank once; the backward
    sends them again, and with them the sums of their gradients. Autograd saves q, k, v, the result and one number for
    each query. Under torch.func and with tangents the same ring runs by differentiable operations, which keep the
    scores of a rank's queries and all keys.

    In "contiguous" order rank r of n computes 4 r + 3 blocks of a causal ring, of 2 n chunks of time, and all wait for
    the last rank. In "zigzag" order, in which rank r holds chunk r from the front and chunk r from the back, each rank
    computes 2 n + 1 blocks. `ring_positions` cuts the batch and the positions so.

    Args:
        q: Queries of this rank, of shape (batch, heads, time, head dim).
        k: Keys, of the same shape; repeat them where several heads share one.
        v: Values, of the same shape but for the head dim.
        axis: The mesh axis that splits the sequence; every rank holds as much time.
        is_causal: Whether a query sees the keys up to its own place alone, as for scaled_dot_product_attention.
        order: "contiguous" or "zigzag".
        scale: Of the scores, above 0; None means 1 / sqrt(head dim).

    Returns:
        The result for this rank's queries, of shape (batch, heads, time, head dim of v).

    Raises:
        ValueError: if shapes or dtypes do not fit each other, the time is odd in "zigzag" order, or an argument is none
            of the above.

    >>> x = torch.ones(1, 1, 2, 4)
    >>> ring_attention(x, x, x, fs.Axis("cp", 1, ""), is_causal=True).shape
    torch.Size([1, 1, 2, 4])
    """
    what = "ring_attention"
    check_axis(what, axis)
    expect(type(is_causal) is bool, f"{what}: is_causal", "True or False", f"{is_causal!r:.40}")
    _check_order(what, order)
    _check_tensors(what, q, k, v)
    if scale is not None:
        # With others torch's kernels return NaN where they mask.
        real = isinstance(scale, int | float) and 0 < scale < math.inf
        expect(real, what, "scale to be a finite number above 0", f"{scale!r:.40}")
    halved, zigzag = axis.size > 1 and q.shape[2] > 1, order == "zigzag"
    ring = _Ring(axis, is_causal, zigzag, halved, 1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    even = f"an even number of places in time, of which each half is a chunk in {order!r} order"
    expect(order == "contiguous" or q.shape[2] % 2 == 0, what, even, str(q.shape[2]), "cut by fs.ring_positions")
    told = f"{what}(is_causal={is_causal}, order={order!r}, scale={ring.scale:.6g})"
    remedy = "take second derivatives by torch.func"
    (out,) = custom_call(ring.forward, ring.backward, [q, k, v], told, axis, plain=ring.plain, remedy=remedy)
    return out


class _Ring(NamedTuple):
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

    def cut(self, tensor: torch.Tensor) -> Tensors:
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

    def plain(self, tensors: Tensors) -> Tensors:
        """Compute the result by operations that are differentiable to any order."""
        return self._around(tensors, attend_plainly, self._permuted, skip=False)[:1]

    def forward(self, tensors: Tensors) -> tuple[Tensors, Tensors]:
        """Compute the result, and what `backward` needs."""
        out, logs = self._around(tensors, attend, self._sent, skip=True)
        return [out], [*tensors, out, logs]

    def _around(
        self, tensors: Tensors, block: Block, send: Callable[[Tensors], Callable[[], Tensors]], skip: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend to the keys of every rank, while those of the next one are on their way.

        Args:
            tensors: q, k and v.
            block: What attends to some keys.
            send: Starts to send tensors to the next rank, and returns what waits for those of the last.
            skip: Whether blocks are left out whose keys are not seen. Else they are computed and not chosen: all ranks
                then have the same graph, and run the transposes of their collectives in the same order.

        Returns:
            The result and the logs.
        """
        q, k, v = tensors
        queries = self.cut(q)
        found: list[Any] = [None] * len(queries)
        for step in range(self.axis.size):
            receive = send([k, v]) if step + 1 < self.axis.size else None
            keys, values = self.cut(k), self.cut(v)
            for i, j, causal, seen in self.pairs(step):
                if seen or not skip:
                    both = joined(found[i], block(queries[i], keys[j], values[j], causal, self.scale))
                    found[i] = both if skip or found[i] is None else _chosen(seen, both, found[i])
            if receive is not None:
                k, v = receive()
        out, logs = (torch.cat(part, 2) if self.halved else part[0] for part in zip(*found, strict=True))
        return out.to(q.dtype), logs

    def backward(self, saved: Tensors, grads: Tensors) -> Tensors:
        """Send keys and values around once more, and with them the sums of their gradients, home in the end.

        Sums travel in the dtype of the logs. A rank's own keys come last: until then their sums travel.
        """
        q, k, v, out, logs = saved
        size = self.axis.size
        dq, dk, dv = (x.new_zeros(x.shape, dtype=logs.dtype) for x in (q, k, v))
        of_queries = list(zip(*map(self.cut, (grads[0], q, out, logs, dq)), strict=True))

        def add(step: int, there: Tensors) -> None:
            of_keys = list(zip(*map(self.cut, (*there, dk, dv)), strict=True))
            for i, j, causal, seen in self.pairs(step):
                if seen:
                    (grad, query, result, log, to_query), (key, value, *to_keys) = of_queries[i], of_keys[j]
                    parts = attend_backward(grad, query, key, value, result, log, causal, self.scale)
                    for total, part in zip((to_query, *to_keys), parts, strict=True):
                        total.add_(part)

        receive = self._sent([k, v]) if size > 1 else None
        for step in range(1, size + 1):
            there = receive() if receive else [k, v]
            receive = self._sent(there) if step + 1 < size else None
            if step > 1:
                (dk,) = self._sent([dk])()
                (dv,) = self._sent([dv])()
            add(step % size, there)
            del there
        return [total.to(x.dtype) for total, x in zip((dq, dk, dv), (q, k, v), strict=True)]

    def _sent(self, tensors: Tensors) -> Callable[[], Tensors]:
        """Start to send tensors to the next rank, without a copy of large ones; returns what waits for the last's."""
        size, own = self.axis.size, fs.comm.rank(self.axis)
        told = f"causal={self.causal}, zigzag={self.zigzag}, scale={self.scale:.6g}"
        shapes = ", ".join(f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in tensors)
        send, receive = ([int(rank == (own + step) % size) for rank in range(size)] for step in (1, -1))
        rows, label = (
            [tensor.unsqueeze(0) for tensor in tensors],
            fs.comm.Label("ring_attention", parts=f"{told}, {shapes}"),
        )
        finish = fs.comm.start_all_to_all(rows, send, receive, self.axis, label)
        return lambda: [row[0] for row in finish()]

    def _permuted(self, tensors: Tensors) -> Callable[[], Tensors]:
        around = [(rank, (rank + 1) % self.axis.size) for rank in range(self.axis.size)]
        received: Tensors = fs.ppermute(list(tensors), self.axis, around)
        return lambda: received


def _chosen(first: bool, one: Tensors, other: Tensors) -> Tensors:
    pairs = zip(one, other, strict=True)
    return tuple(torch.where(torch.full_like(a, first, dtype=torch.bool), a, b) for a, b in pairs)


def ring_positions(axis: fs.Axis, time: int, order: str = "contiguous") -> torch.Tensor:
    """List the places of a sequence that this rank holds: x[:, positions] cuts a batch for `ring_attention`.

    Args:
        axis: The mesh axis that splits the sequence.
        time: The length of the whole sequence.
        order: "contiguous" or "zigzag".

    Returns:
        Whole numbers, as many on every rank, ascending.

    Raises:
        ValueError: if the ranks, each of which holds two chunks in "zigzag" order, do not divide the time.

    >>> ring_positions(fs.Axis("cp", 1, ""), 4)
    tensor([0, 1, 2, 3])
    """
    check_axis("ring_positions", axis)
    _check_order("ring_positions", order)
    number = axis.size * (1 if order == "contiguous" else 2)
    whole = type(time) is int and time > 0 and time % number == 0
    needed = f"time to be a multiple of {number}, the chunks in {order!r} order of {axis.size} ranks"
    expect(whole, "ring_positions", needed, f"{time!r:.40}", "pad the sequence")
    chunks = torch.arange(time).chunk(number)
    own = fs.comm.rank(axis)
    return torch.cat([chunks[i] for i in ([own] if order == "contiguous" else [own, number - 1 - own])])


def ulysses(attention: Callable[..., torch.Tensor], axis: fs.Axis) -> Callable[..., torch.Tensor]:
    """Make attention over a sequence whose pieces ranks hold of one over whole sequences: each gets some of the heads.

    Two exchanges of all ranks bring the whole time of these heads and take the result back, which costs less traffic
    than a ring, but no more ranks than heads. Pieces lie in rank order.

    Args:
        attention: Called as attention(q, k, v, **keywords) on tensors of shape (batch, heads, time, head dim), as
            torch's scaled_dot_product_attention; returns the result for q.
        axis: The mesh axis that splits the sequence.

    Returns:
        A function of the same arguments, for tensors of this rank's time and of all heads.

    Raises:
        ValueError: by the function returned, if the ranks do not divide the heads of a tensor.

    >>> import torch, fshard as fs
    >>> attention = torch.nn.functional.scaled_dot_product_attention
    >>> q, k, v = torch.arange(48.0).sin().reshape(3, 1, 2, 4, 2)  # batch 1, two heads, time 4, head dim 2
    >>> def program():
    ...     axis = fs.axis_of(fs.init_mesh({"cp": -1}, device="cpu"))
    ...     return fs.ulysses(attention, axis)(*(x.chunk(2, dim=2)[fs.axis_index(axis)] for x in (q, k, v)))
    >>> pieces = fs.testing.spmd(program, world=2)
    >>> pieces[0].shape, torch.allclose(torch.cat(pieces, dim=2), attention(q, k, v))
    (torch.Size([1, 2, 2, 2]), True)
    """
    expect(callable(attention), "ulysses", "attention to be a function", describe(attention))
    check_axis("ulysses", axis)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **keywords: Any) -> torch.Tensor:
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            _check_four_dims("ulysses", name, tensor)
            needed = f"heads of {name}, its dim 1, to be a multiple of {axis.size}, the ranks of {axis.name!r}"
            remedy = "repeat or pad heads, or use fs.ring_attention"
            expect(tensor.shape[1] % axis.size == 0, "ulysses", needed, str(tensor.shape[1]), remedy)
        whole = attention(*fs.all_to_all((q, k, v), axis, 1, 2), **keywords)
        _check_four_dims("ulysses", "the result of attention", whole)
        return fs.all_to_all(whole, axis, 2, 1)

    return run


def _check_order(what: str, order: Any) -> None:
    expect(order in ("contiguous", "zigzag"), what, 'order to be "contiguous" or "zigzag"', f"{order!r:.40}")


def _check_four_dims(what: str, name: str, tensor: Any) -> None:
    """Refuse what is no floating tensor of four dims."""
    fits = isinstance(tensor, torch.Tensor) and tensor.dim() == 4 and tensor.is_floating_point()
    expect(fits, what, f"{name} to be a floating tensor (batch, heads, time, head dim)", describe(tensor))


def _check_tensors(what: str, q: Any, k: Any, v: Any) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_four_dims(what, name, tensor)
    expect(q.shape[2] > 0, what, "a place in time or more on every rank", "none")
    for name, tensor, shape in (("k", k, q.shape), ("v", v, (*q.shape[:-1], v.shape[-1]))):
        needed = f"{name} to be of shape {tuple(shape)} and dtype {q.dtype}, as q is"
        remedy = "repeat heads that several share by k.repeat_interleave(times, 1)"
        expect(tensor.shape == shape and tensor.dtype == q.dtype, what, needed, describe(tensor), remedy)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention, by the fused kernel where there is one; see `Block`."""
    run = _compat.fused_attention if _compat.fuses_attention(q, k, v) else attend_plainly
    return run(q, k, v, causal, scale)


def attend_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logs: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute what a block adds to the cotangents of q, k and v.

    Args:
        grad: The cotangent of `out`.
        q: Queries.
        k: Keys.
        v: Values.
        out: The result for all keys, of which these are some.
        logs: Each query's log-sum-exp over all keys.
        causal: Whether each query sees the keys up to its own place alone.
        scale: Of the scores.

    Returns:
        The parts of dq, dk and dv.
    """
    if _compat.fuses_attention(q, k, v):
        return _compat.fused_attention_backward(grad, q, k, v, out, logs, causal, scale)
    wide_k, wide_v = k.to(logs.dtype), v.to(logs.dtype)
    dq, dk, dv = [], torch.zeros_like(wide_k), torch.zeros_like(wide_v)
    tiles = zip(*(x.split(ROWS, 2) for x in (grad, out, logs)), strict=True)
    for (rows, scores), (grad, out, logs) in zip(_scores(q, k, causal, scale), tiles, strict=True):
        weights, grad = (scores - logs[..., None]).exp(), grad.to(logs.dtype)
        delta = (grad * out).sum(-1, keepdim=True)
        slopes = (grad @ wide_v.mT - delta) * weights * scale
        dq.append(slopes @ wide_k)
        dk += slopes.mT @ rows
        dv += weights.mT @ grad
    return torch.cat(dq, 2), dk, dv


def attend_plainly(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention by operations that are differentiable to any order; see `Block`."""
    parts = []
    for rows, scores in _scores(q, k, causal, scale):
        logs = scores.logsumexp(-1)
        parts.append(((scores - logs[..., None]).exp() @ v.to(rows.dtype), logs))
    out, logs = (torch.cat(part, 2) for part in zip(*parts, strict=True))
    return out, logs


def _scores(q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float) -> Iterator[tuple[Any, Any]]:
    """Yield some queries at a time, at least as wide as float32, and their scores."""
    k = k.to(torch.promote_types(k.dtype, torch.float32))
    for number, rows in enumerate(q.split(ROWS, 2)):
        rows = rows.to(k.dtype)
        scores = rows @ k.mT * scale
        if causal:
            own = number * ROWS + torch.arange(rows.shape[2], device=q.device)
            scores = scores.masked_fill(torch.arange(k.shape[2], device=q.device) > own[:, None], -math.inf)
        yield rows, scores


def joined(
    found: tuple[torch.Tensor, torch.Tensor] | None, block: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join the results of the same queries for other keys, each of which has a key that every query sees.

    Args:
        found: The result and the logs so far; None where there are none.
        block: Those of the next block.

    Returns:
        The result and the logs for the keys of both, in the dtype of the logs.
    """
    out, logs = block[0].to(block[1].dtype), block[1]
    if found is None:
        return out, logs
    total = torch.logaddexp(found[1], logs)
    return torch.lerp(found[0], out, (logs - total).exp()[..., None]), total
