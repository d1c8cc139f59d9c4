"""Attention over sequences that are split between ranks, by keys and values that travel around them.

Ring attention follows Liu, Zaharia and Abbeel 2023 (https://arxiv.org/abs/2310.01889): keys and values travel around
the ranks of an axis while each rank computes with those that it has. Striped Attention (Brandon et al. 2023,
https://arxiv.org/abs/2311.09431) balances its causal form by another order of the sequence; the zig-zag order here is
that of Llama 3's context parallelism (Dubey et al. 2024, https://arxiv.org/abs/2407.21783).
"""

import math
from functools import partial
from typing import Any

import torch

import fshard as fs
from fshard.ext.parallel.ring import LABEL, Ring, backward, forward, plain
from fshard.extend import check_axis, custom_call, describe, expect


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    axis: fs.Axis,
    causal: bool = True,
    *,
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
        causal: Whether a query sees the keys up to its own place alone.
        order: "contiguous" or "zigzag".
        scale: Of the scores, above 0; None means 1 / sqrt(head dim).

    Returns:
        The result for this rank's queries, of shape (batch, heads, time, head dim of v).

    Raises:
        ValueError: if shapes or dtypes do not fit each other, the time is odd in "zigzag" order, or an argument is none
            of the above.

    >>> x = torch.ones(1, 1, 2, 4)
    >>> ring_attention(x, x, x, fs.Axis("cp", 1, "")).shape
    torch.Size([1, 1, 2, 4])
    """
    what = LABEL
    check_axis(what, axis)
    expect(type(causal) is bool, f"{what}: causal", "True or False", f"{causal!r:.40}")
    _check_order(what, order)
    _check_tensors(what, q, k, v)
    if scale is not None:
        # With others torch's kernels return NaN where they mask.
        real = isinstance(scale, int | float) and 0 < scale < math.inf
        expect(real, what, "scale to be a finite number above 0", f"{scale!r:.40}")
    halved, zigzag = axis.size > 1 and q.shape[2] > 1, order == "zigzag"
    ring = Ring(axis, causal, zigzag, halved, 1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    even = f"an even number of places in time, of which each half is a chunk in {order!r} order"
    expect(order == "contiguous" or q.shape[2] % 2 == 0, what, even, str(q.shape[2]), "cut by fs.ring_positions")
    told = f"{what}(causal={causal}, order={order!r}, scale={ring.scale:.6g})"
    run, back = partial(forward, ring=ring), partial(backward, ring=ring)
    known, remedy = partial(plain, ring=ring), "take second derivatives by torch.func"
    (out,) = custom_call(run, back, [q, k, v], told, axis, plain=known, remedy=remedy)
    return out


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


def _check_order(what: str, order: Any) -> None:
    expect(order in ("contiguous", "zigzag"), what, 'order to be "contiguous" or "zigzag"', f"{order!r:.40}")


def check_four_dims(what: str, name: str, tensor: Any) -> None:
    """Refuse what is no floating tensor of four dims."""
    fits = isinstance(tensor, torch.Tensor) and tensor.dim() == 4 and tensor.is_floating_point()
    expect(fits, what, f"{name} to be a floating tensor (batch, heads, time, head dim)", describe(tensor))


def _check_tensors(what: str, q: Any, k: Any, v: Any) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_four_dims(what, name, tensor)
    expect(q.shape[2] > 0, what, "a place in time or more on every rank", "none")
    for name, tensor, shape in (("k", k, q.shape), ("v", v, (*q.shape[:-1], v.shape[-1]))):
        needed = f"{name} to be of shape {tuple(shape)} and dtype {q.dtype}, as q is"
        remedy = "repeat heads that several share by k.repeat_interleave(times, 1)"
        expect(tensor.shape == shape and tensor.dtype == q.dtype, what, needed, describe(tensor), remedy)
