"""Attention of some queries to some keys, and how results for several blocks of keys are joined.

The arithmetic of FlashAttention (Dao et al. 2022, https://arxiv.org/abs/2205.14135) and of online softmax before it
(Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867). Tensors have the shape (batch, heads, time, head dim);
the log-sum-exp of each query's scores has no last dim.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fshard.ext import _compat

# So many queries at a time compute scores, where no fused kernel does: memory stays linear in time.
ROWS = 512

# Maps q, k, v, whether each query sees the keys up to its own place alone, and the scale, to the result and the logs.
Block = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool, float], tuple[torch.Tensor, torch.Tensor]]


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
