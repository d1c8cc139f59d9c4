"""Attention over sequences that are split between ranks: `ring_attention` and `ulysses`.

Ring attention follows Liu, Zaharia and Abbeel 2023 (https://arxiv.org/abs/2310.01889): keys and values are sent around
the ranks of an axis, while each rank computes with those that it has. Striped Attention (Brandon et al. 2023,
https://arxiv.org/abs/2311.09431) balances its causal form by another order of the sequence; the zigzag order here is
that of Llama 3's context parallelism (Dubey et al. 2024, https://arxiv.org/abs/2407.21783). `ulysses`, which exchanges
heads for time, follows Jacobs et al. 2023 (https://arxiv.org/abs/2309.14509). The results for blocks of keys are merged
as in FlashAttention (Dao et al. 2022, https://arxiv.org/abs/2205.14135) and in online softmax before it (Milakov and
Gimelshein 2018, https://arxiv.org/abs/1805.02867).

In the comments on shapes B is the batch, H the heads, T the time of a rank and D the head dim. Queries, keys, values
and results are [B, H, T, D]; the log-sum-exp of each query's scores is [B, H, T].
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

import fshard as fs
from fshard.ext import _compat
from fshard.ext.parallel.custom_call import custom_call
from fshard.extend import Range, check_arguments, check_axis, check_flags, describe, expect, widen

Tensors = Sequence[torch.Tensor]

# Without a fused kernel scores are computed for so many queries at a time, so that memory stays linear in time.
ROWS = 512

# For other scales torch's kernels return NaN where they mask.
SCALE = Range("a finite number above 0", lambda value: isinstance(value, int | float) and 0 < value < math.inf)
ORDER = Range('"contiguous" or "zigzag"', lambda value: value in ("contiguous", "zigzag"))


class Attended(NamedTuple):
    """The result of attention for some queries, over the keys so far.

    Attributes:
        out: The result.
        logs: Each query's log-sum-exp of scores.
    """

    out: torch.Tensor
    logs: torch.Tensor


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
    """Compute attention over a sequence that is split between the ranks of an axis, by sending keys and values around.

    Memory grows linearly with the time of one rank. The forward sends k and v to each other rank once. The backward
    sends them again, together with the sums of their gradients. Autograd saves q, k, v, the result and one number for
    each query. Under torch.func and with tangents each rank gathers all k and v instead, and differentiable operations
    keep the scores of its queries and all keys.

    In "contiguous" order, rank r of n sees the keys of r + 1 ranks in a causal ring, and all ranks wait for the last
    one. In "zigzag" order, the time is cut into 2 n chunks, of which rank r holds chunk r from the front and chunk r
    from the back, and each rank computes 2 n + 1 blocks of a chunk's queries and a chunk's keys. `ring_positions` cuts
    the batch and the positions accordingly.

    Args:
        q: Queries of this rank, of shape (batch, heads, time, head dim).
        k: Keys, of the same shape; repeat them if several heads share one.
        v: Values, of the same shape except for the head dim.
        axis: The mesh axis that splits the sequence; every rank holds the same amount of time.
        is_causal: Whether a query only sees keys up to its own position, as in scaled_dot_product_attention.
        order: "contiguous" or "zigzag".
        scale: The factor of scores, above 0; None means 1 / sqrt(head dim).

    Returns:
        The result for this rank's queries, of shape (batch, heads, time, head dim of v).

    Raises:
        ValueError: if shapes or dtypes do not fit each other, the time is odd in "zigzag" order, or an argument is not
            as described.

    >>> x = torch.ones(1, 1, 2, 4)
    >>> ring_attention(x, x, x, fs.Axis("cp", 1, ""), is_causal=True).shape
    torch.Size([1, 1, 2, 4])
    """
    api_name = "ring_attention"
    check_axis(api_name, axis)
    check_flags(api_name, is_causal=is_causal)
    check_arguments(api_name, ORDER, order=order)
    _check_tensors(api_name, q, k, v)
    time, head_dim = q.shape[2:]
    if scale is None:
        scale = 1 / math.sqrt(head_dim)
    check_arguments(api_name, SCALE, scale=scale)
    is_zigzag = order == "zigzag"
    is_cut = not is_zigzag or time % 2 == 0
    expected = "an even size of dim 2, the time, whose halves are the chunks in 'zigzag' order"
    expect(is_cut, api_name, expected, str(time), "cut by fs.ring_positions")
    ring = _Ring(axis, is_causal, is_zigzag and axis.size > 1, scale)
    # Ranks compare it. Messages of other shapes would have other sizes.
    options = f"is_causal={is_causal}, order={order!r}, scale={scale:.6g}"
    device_type = q.device.type
    is_on = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    # Scores are computed in float32 at least, as in fused kernels.
    with torch.autocast(device_type, enabled=False) if is_on else nullcontext():
        (out,) = custom_call(
            ring.forward,
            ring.backward,
            [q, k, v],
            f"{api_name}({options}) of {q.dtype} {tuple(q.shape)} and {tuple(v.shape)}",
            axis,
            plain=ring.run_plain,
            remedy="take second derivatives by torch.func",
        )
    return out


class _Block(NamedTuple):
    """A chunk of this rank's queries, and a chunk of some rank's keys.

    Attributes:
        query: The number of the chunk of queries among those of this rank.
        key: The number of the chunk of keys among those of that rank.
        is_causal: Whether a query only sees keys up to its own position, because the chunks are the same.
    """

    query: int
    key: int
    is_causal: bool


class _Ring(NamedTuple):
    """The arguments of a ring.

    Attributes:
        axis: The axis.
        is_causal: Whether a query only sees keys up to its own position.
        is_zigzag: Whether a rank holds two chunks of time, from both ends of the sequence, and not one.
        scale: The factor of scores.
    """

    axis: fs.Axis
    is_causal: bool
    is_zigzag: bool
    scale: float

    def chunks_of(self, rank: int) -> list[int]:
        """Number the chunks of time that a rank holds."""
        if not self.is_zigzag:
            return [rank]
        last_chunk = 2 * self.axis.size - 1
        return [rank, last_chunk - rank]

    def cut(self, tensor: torch.Tensor) -> Tensors:
        """Cut a rank's time into its chunks."""
        if not self.is_zigzag:
            return [tensor]
        return tensor.chunk(2, dim=2)

    def blocks(self, step: int) -> list[_Block]:
        """List the blocks of this rank's queries and the keys of the rank that is so many steps before it.

        Blocks whose keys are not seen are left out.
        """
        rank = fs.comm.rank(self.axis)
        key_chunks = self.chunks_of((rank - step) % self.axis.size)
        blocks = []
        for i, query_chunk in enumerate(self.chunks_of(rank)):
            for j, key_chunk in enumerate(key_chunks):
                if key_chunk <= query_chunk or not self.is_causal:
                    is_causal = self.is_causal and query_chunk == key_chunk
                    blocks.append(_Block(i, j, is_causal))
        return blocks

    def run_plain(self, tensors: Tensors) -> Tensors:
        """Compute the result from the keys of all ranks, by operations that are differentiable to any order."""
        q, k, v = tensors
        keys, values = fs.all_gather((k, v), self.axis, dim=2)
        # [B, H, T, D] @ [B, H, D, T * ranks] -> [B, H, T, T * ranks]
        scores = widen(q) @ widen(keys).mT * self.scale
        if self.is_causal:
            size = self.axis.size
            positions = _list_positions(keys.shape[2], size, self.is_zigzag)
            key_positions = positions.to(q.device)
            query_positions = key_positions.chunk(size)[fs.comm.rank(self.axis)]
            scores = scores.masked_fill(key_positions > query_positions[:, None], -math.inf)
        out = scores.softmax(-1) @ widen(values)
        return [out.to(q.dtype)]

    def forward(self, tensors: Tensors) -> tuple[Tensors, Tensors]:
        """Attend to the keys of every rank, while the next keys are on their way.

        Returns:
            The result, and the tensors that `backward` needs.
        """
        q, k, v = tensors
        queries = self.cut(q)
        results: list[Any] = [None] * len(queries)
        for step in range(self.axis.size):
            is_last = step == self.axis.size - 1
            receive = None if is_last else self._send([k, v])
            keys = self.cut(k)
            values = self.cut(v)
            for i, j, is_causal in self.blocks(step):
                block = attend(queries[i], keys[j], values[j], is_causal, self.scale)
                results[i] = merge(results[i], block)
            if receive is not None:
                k, v = receive()
        joined, logs = (_join_time(parts) for parts in zip(*results, strict=True))
        out = joined.to(q.dtype)
        return [out], [*tensors, out, logs]

    def backward(self, saved: Tensors, grads: Tensors) -> Tensors:
        """Send keys and values around once more, and with them the sums of their gradients, which return at the end.

        The sums have the dtype of the logs. A rank computes with its own keys last, when their sums have arrived.
        """
        *qkv, out, logs = saved
        q, k, v = qkv
        dq, dk, dv = (x.new_zeros(x.shape, dtype=logs.dtype) for x in qkv)
        of_queries = grads[0], q, out, logs, dq
        queries = list(zip(*map(self.cut, of_queries), strict=True))
        size = self.axis.size
        receive = self._send([k, v]) if size > 1 else None
        for step in range(1, size + 1):
            current_k, current_v = receive() if receive is not None else (k, v)
            receive = self._send([current_k, current_v]) if step + 1 < size else None
            if step > 1:
                (dk,) = self._send([dk])()
                (dv,) = self._send([dv])()
            of_keys = current_k, current_v, dk, dv
            keys = list(zip(*map(self.cut, of_keys), strict=True))
            self._add_gradients(self.blocks(step % size), queries, keys)
            del current_k, current_v, of_keys, keys
        return [total.to(x.dtype) for total, x in zip((dq, dk, dv), qkv, strict=True)]

    def _add_gradients(self, blocks: Sequence[_Block], queries: Sequence[Tensors], keys: Sequence[Tensors]) -> None:
        """Add to the sums of gradients, in place.

        Args:
            blocks: The blocks.
            queries: For each chunk of queries the cotangent of the result, the queries, the result, the logs and the
                sum of the queries' gradients.
            keys: For each chunk the keys, the values, and the sums of their gradients.
        """
        for i, j, is_causal in blocks:
            grad, query, out, logs, query_sum = queries[i]
            key, value, key_sum, value_sum = keys[j]
            dq, dk, dv = attend_backward(grad, query, key, value, out, logs, is_causal, self.scale)
            query_sum.add_(dq)
            key_sum.add_(dk)
            value_sum.add_(dv)

    def _send(self, tensors: Tensors) -> Callable[[], Tensors]:
        """Start to send tensors to the next rank, without a copy of large ones."""
        size = self.axis.size
        rank = fs.comm.rank(self.axis)
        send = [0] * size
        send[(rank + 1) % size] = 1
        receive = [0] * size
        receive[(rank - 1) % size] = 1
        # [B, H, T, D] -> [1, B, H, T, D], one row for the next rank
        rows = [tensor.unsqueeze(0) for tensor in tensors]
        finish = fs.comm.start_all_to_all(rows, send, receive, self.axis, "ring_attention")
        return lambda: [row[0] for row in finish()]


def _join_time(chunks: Tensors) -> torch.Tensor:
    """Join a rank's chunks of time."""
    if len(chunks) == 1:
        return chunks[0]
    return torch.cat(list(chunks), dim=2)


def ring_positions(axis: fs.Axis, time: int, order: str = "contiguous") -> torch.Tensor:
    """List the positions of a sequence that this rank holds: x[:, positions] cuts a batch for `ring_attention`.

    Args:
        axis: The mesh axis that splits the sequence.
        time: The length of the whole sequence.
        order: "contiguous" or "zigzag".

    Returns:
        Whole numbers in ascending order, equally many on every rank.

    Raises:
        ValueError: if the number of ranks, or in "zigzag" order twice that, does not divide the time.

    >>> ring_positions(fs.Axis("cp", 1, ""), 4)
    tensor([0, 1, 2, 3])
    """
    check_axis("ring_positions", axis)
    check_arguments("ring_positions", ORDER, order=order)
    is_zigzag = order == "zigzag"
    chunks_count = axis.size * (2 if is_zigzag else 1)
    divides = type(time) is int and time > 0 and time % chunks_count == 0
    expected = f"time to be a multiple of {chunks_count}, the chunks in {order!r} order of {axis.size} ranks"
    expect(divides, "ring_positions", expected, f"{time!r:.40}", "pad the sequence")
    pieces = _list_positions(time, axis.size, is_zigzag).chunk(axis.size)
    return pieces[fs.comm.rank(axis)].clone()


def _list_positions(time: int, size: int, is_zigzag: bool) -> torch.Tensor:
    """List the positions of a sequence in the order in which so many ranks hold them."""
    positions = torch.arange(time)
    if not is_zigzag:
        return positions
    # [time] -> 2 of [ranks, time of a chunk] -> [ranks, 2, time of a chunk] -> [time]
    front, back = positions.unflatten(0, (2, size, -1))
    return torch.stack([front, back.flip(0)], dim=1).flatten()


def ulysses(attention: Callable[..., torch.Tensor], axis: fs.Axis) -> Callable[..., torch.Tensor]:
    """Turn attention over whole sequences into attention over a sequence split between ranks; each gets some heads.

    Two all-to-alls give each rank the whole time of its heads, and return the result. This sends less than a ring, but
    there can be no more ranks than heads. The pieces of the sequence are in rank order.

    Args:
        attention: Called as attention(q, k, v, **keywords) with tensors of shape (batch, heads, time, head dim), as
            torch's scaled_dot_product_attention; returns the result for q.
        axis: The mesh axis that splits the sequence.

    Returns:
        A function of the same arguments, for tensors of this rank's time and of all heads.

    Raises:
        ValueError: by the function returned, if the number of ranks does not divide the heads of a tensor.

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
        _check_four_dims("ulysses", q=q, k=k, v=v)
        heads = [tensor.shape[1] for tensor in (q, k, v)]
        divides = not any(count % axis.size for count in heads)
        expected = f"heads, dim 1 of q, k and v, to be multiples of {axis.size}, the ranks of {axis.name!r}"
        expect(divides, "ulysses", expected, str(heads), "repeat or pad heads, or use fs.ring_attention")
        # [B, H, T, D] -> [B, H / ranks, T * ranks, D]
        whole_sequences = fs.all_to_all((q, k, v), axis, split_dim=1, concat_dim=2)
        out = attention(*whole_sequences, **keywords)
        # The time of a result in another layout would be another dim.
        _check_four_dims("ulysses", **{"the result of attention": out})
        # [B, H / ranks, T * ranks, D] -> [B, H, T, D]
        return fs.all_to_all(out, axis, split_dim=2, concat_dim=1)

    return run


def _check_four_dims(api_name: str, **tensors: Any) -> None:
    """Refuse anything but floating tensors of four dims."""
    for name, tensor in tensors.items():
        fits = isinstance(tensor, torch.Tensor) and tensor.dim() == 4 and tensor.is_floating_point()
        expect(fits, api_name, f"{name} to be a floating tensor (batch, heads, time, head dim)", describe(tensor))


def _check_tensors(api_name: str, q: Any, k: Any, v: Any) -> None:
    _check_four_dims(api_name, q=q, k=k, v=v)
    # Kernels divide by these sizes.
    expected = "sizes of heads, time and head dim of 1 or more on every rank"
    expect(all(q.shape[1:]), api_name, expected, str(tuple(q.shape)))
    v_shape = *q.shape[:-1], v.shape[-1]
    for name, tensor, shape in (("k", k, q.shape), ("v", v, v_shape)):
        fits = tensor.shape == shape and tensor.dtype == q.dtype
        expected = f"{name} to be of shape {tuple(shape)} and dtype {q.dtype}, as q is"
        remedy = "repeat heads that several share by k.repeat_interleave(times, 1)"
        expect(fits, api_name, expected, describe(tensor), remedy)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> Attended:
    """Compute attention for a block, by the fused kernel where there is one."""
    if _compat.fuses_attention(q, k, v):
        return Attended(*_compat.fused_attention(q, k, v, is_causal, scale))
    outs = []
    logs = []
    for rows, scores in _scores(q, k, is_causal, scale):
        tile_logs = scores.logsumexp(-1)
        weights = (scores - tile_logs[..., None]).exp()
        outs.append(weights @ v.to(rows.dtype))
        logs.append(tile_logs)
    return Attended(torch.cat(outs, 2), torch.cat(logs, 2))


def attend_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logs: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the terms that a block adds to the cotangents of q, k and v.

    Args:
        grad: The cotangent of `out`.
        q: Queries.
        k: Keys.
        v: Values.
        out: The result for all keys, of which these are some.
        logs: Each query's log-sum-exp over all keys.
        is_causal: Whether a query only sees keys up to its own position.
        scale: The factor of scores.

    Returns:
        The terms of dq, dk and dv.
    """
    if _compat.fuses_attention(q, k, v):
        return _compat.fused_attention_backward(grad, q, k, v, out, logs, is_causal, scale)
    wide_k = k.to(logs.dtype)
    wide_v = v.to(logs.dtype)
    dq = []
    dk = torch.zeros_like(wide_k)
    dv = torch.zeros_like(wide_v)
    tiles = zip(
        _scores(q, k, is_causal, scale),
        grad.split(ROWS, 2),
        out.split(ROWS, 2),
        logs.split(ROWS, 2),
        strict=True,
    )
    for (rows, scores), tile_grad, tile_out, tile_logs in tiles:
        weights = (scores - tile_logs[..., None]).exp()
        wide_grad = tile_grad.to(logs.dtype)
        delta = (wide_grad * tile_out).sum(-1, keepdim=True)
        # The gradients of scores: [B, H, rows, D] @ [B, H, D, T] -> [B, H, rows, T]
        slopes = (wide_grad @ wide_v.mT - delta) * weights * scale
        dq.append(slopes @ wide_k)
        # [B, H, T, rows] @ [B, H, rows, D] -> [B, H, T, D]
        dk += slopes.mT @ rows
        dv += weights.mT @ wide_grad
    return torch.cat(dq, 2), dk, dv


def _scores(
    q: torch.Tensor,
    k: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> Iterator[tuple[Any, Any]]:
    """Yield some queries at a time, at least as wide as float32, and their scores."""
    k = widen(k)
    for number, rows in enumerate(q.split(ROWS, 2)):
        rows = rows.to(k.dtype)
        # [B, H, rows, D] @ [B, H, D, T] -> [B, H, rows, T]
        scores = rows @ k.mT * scale
        if is_causal:
            # The first of these queries sees the keys up to its own position, number * ROWS.
            is_later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(number * ROWS + 1)
            scores = scores.masked_fill(is_later, -math.inf)
        yield rows, scores


def merge(before: Attended | None, block: Attended) -> Attended:
    """Merge the results of the same queries for other keys, where every query sees a key of each.

    Args:
        before: The result so far; None if there is none.
        block: The result for the next block.

    Returns:
        The result for the keys of both, in the dtype of the logs.
    """
    logs = block.logs
    out = block.out.to(logs.dtype)
    if before is None:
        return Attended(out, logs)
    merged_logs = torch.logaddexp(before.logs, logs)
    weight = (logs - merged_logs).exp()[..., None]
    return Attended(torch.lerp(before.out, out, weight), merged_logs)
