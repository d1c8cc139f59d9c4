"""The loss of a language model's head, chunk by chunk, so that the logits of all tokens never exist at once."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function

import fshard as fs
from fshard.ext import _compat
from fshard.extend import (
    NUMBER,
    any_dual,
    check_arguments,
    describe,
    differentiate,
    expect,
    is_differentiated,
    record_on_tape,
    without_saved_tensor_hooks,
)

Pair = tuple[torch.Tensor, torch.Tensor]


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> Pair:
    """Sum the cross entropy of targets, and count the targets; -100 is ignored.

    Args:
        logits: Of shape (tokens, vocabulary).
        targets: Token ids, of shape (tokens,).

    Returns:
        The sum and the count.

    >>> cross_entropy(torch.zeros(2, 4), torch.tensor([1, -100]))
    (tensor(1.3863), tensor(1))
    """
    return F.cross_entropy(logits, targets, reduction="sum"), (targets != -100).sum()


def chunked_loss(
    h: torch.Tensor,
    head: Any,
    targets: torch.Tensor,
    *,
    chunks: int = 8,
    loss: Callable[[torch.Tensor, torch.Tensor], Pair] = cross_entropy,
    dtype: torch.dtype | None = None,
) -> Pair:
    """Compute the loss of F.linear(h, *head) over a vocabulary, and its gradients, chunk by chunk of the tokens.

    The result equals `loss` of all logits, but only the logits of one chunk are held at a time. The forward computes
    the gradients of each chunk at once, so the backward computes nothing again, and the head is gathered once and its
    gradient is reduced once. Follows Hsu et al., "Liger Kernel" (arXiv:2410.10989), section 3.

    Args:
        h: Hidden values of shape (*targets.shape, width).
        head: The weight, of shape (vocabulary, width), or a pair of the weight and a bias. Sharded leaves are gathered.
        targets: Token ids.
        chunks: How many chunks the tokens are cut into.
        loss: Maps the logits of a chunk, (tokens, vocabulary), and its targets, (tokens,), to the sum of its losses and
            the number of targets that count. It may call collectives, such as `vocab_parallel_cross_entropy` of this
            rank's part of the logits.
        dtype: The dtype that logits are cast to, and in which the head's gradient is added up; None means the head's.

    Returns:
        The sum of losses and the count, as a loss with reduce="weighted" returns them.

    Raises:
        ValueError: if shapes do not fit, `loss` uses a tensor that requires a gradient and is not the logits, or the
            result is differentiated twice without torch.func.

    >>> import torch, fshard as fs
    >>> h, targets, mesh = torch.ones(3, 2), torch.tensor([0, 3, 1]), fs.init_mesh({"shard": -1}, device="cpu")
    >>> params = fs.shard({"head": torch.arange(8.0).reshape(4, 2)}, fs.zero3(mesh))
    >>> fs.value_and_grad(lambda p: fs.chunked_loss(h, p["head"], targets), reduce="weighted")(params)[0]
    tensor(6.6852)
    """
    api_name = "chunked_loss"
    # One call, so that weight and bias are one unit.
    parts = list(head) if isinstance(head, list | tuple) else [head]
    full_head = fs.gather(parts)
    for name, tensor in {"head": full_head and full_head[0], "h": h, "targets": targets}.items():
        expect(isinstance(tensor, torch.Tensor), api_name, f"{name} to be a tensor", describe(tensor))
    shape = (*targets.shape, full_head[0].shape[-1])
    expect(h.shape == shape, api_name, f"h of shape {shape}, by targets and head", describe(h))
    check_arguments(api_name, NUMBER, chunks=chunks)

    def chunk_loss(
        h: torch.Tensor,
        targets: torch.Tensor,
        *head: torch.Tensor,
    ) -> Pair:
        logits = F.linear(h, *head)
        if dtype is not None:
            logits = logits.to(dtype=dtype)
        return loss(logits, targets)

    # [..., width] -> [tokens, width]
    rows = h.flatten(0, -2)
    targets_of_chunks = targets.flatten().chunk(chunks)
    tensors = [rows, *full_head]
    is_transformed = any(map(_compat.is_transformed, tensors)) or any_dual(tensors)
    if any(map(is_differentiated, tensors)) and not is_transformed:
        with without_saved_tensor_hooks():
            return _ChunkedLoss.apply(chunk_loss, targets_of_chunks, dtype, *tensors)
    if is_transformed:
        chunk_loss = fs.remat(chunk_loss)
    chunks_of_rows = zip(rows.chunk(chunks), targets_of_chunks, strict=True)
    return _sum_pairs([chunk_loss(h, targets, *full_head) for h, targets in chunks_of_rows])


class _ChunkedLoss(Function):
    """Computes the gradients in its forward, so that its backward only has to scale them."""

    @staticmethod
    def forward(
        ctx: Any,
        chunk_loss: Any,
        targets_of_chunks: Any,
        dtype: Any,
        *tensors: torch.Tensor,
    ) -> Pair:
        h, *head = tensors
        leaves = [part.detach().requires_grad_(part.requires_grad) for part in head]
        pairs: list[Pair] = []
        grads_of_rows: list[Any] = []
        grads_of_head: list[Any] = [None] * len(head)
        chunks_of_rows = h.detach().chunk(len(targets_of_chunks))
        for rows, targets in zip(chunks_of_rows, targets_of_chunks, strict=True):
            rows.requires_grad_(h.requires_grad)
            with torch.enable_grad(), record_on_tape() as tape:
                total, count = chunk_loss(rows, targets, *leaves)
            inputs = [rows, *leaves]
            if not pairs:
                ctx.variance = _find_variance(total, [*inputs, *tape.tokens[:1]])
            grad_of_rows, *grads = differentiate(total, torch.ones_like(total), inputs, tape.tokens)
            if h.requires_grad:
                # A loss need not use the logits of every chunk.
                grads_of_rows.append(torch.zeros_like(rows) if grad_of_rows is None else grad_of_rows)
            pairs.append((total.detach(), count))
            for i, grad in enumerate(grads):
                if grad is not None:
                    grad = grad.to(dtype or head[i].dtype)
                    grads_of_head[i] = grad if grads_of_head[i] is None else grads_of_head[i].add_(grad)
        ctx.grads = [torch.cat(grads_of_rows) if grads_of_rows else None, *grads_of_head]
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        total, count = _sum_pairs(pairs)
        if isinstance(count, torch.Tensor):
            ctx.mark_non_differentiable(count)
        return total, count

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor, _: Any) -> Any:
        grads = ctx.grads
        ctx.grads = None
        is_first = grads is not None and not torch.is_grad_enabled()
        remedy = "call it again, or differentiate with torch.func"
        expect(is_first, "chunked_loss", "one backward, for a first derivative", "another, or create_graph", remedy)
        scaled: list[Any] = []
        for grad, dtype in zip(grads, ctx.dtypes, strict=True):
            # In place: nothing else uses these gradients, and a copy of the head's would be as large as the head.
            scaled.append(None if grad is None else grad.mul_(scale).to(dtype))
        return None, None, None, *scaled


def _sum_pairs(pairs: Sequence[Pair]) -> Pair:
    totals, counts = zip(*pairs, strict=True)
    # Of half precision, torch adds up in float32 and rounds once.
    total = torch.stack([torch.as_tensor(total) for total in totals]).sum(0)
    return total, sum(counts)


def _find_variance(total: torch.Tensor, sources: Sequence[torch.Tensor]) -> Any:
    """Find the first node of a loss's graph that makes a varying value invariant, and check where the graph ends.

    Checks of varying values then see this node in the place of the psum_invariant inside the loss.

    Raises:
        ValueError: if the graph ends at a tensor that requires a gradient and is not one of the sources.
    """
    expected = "loss to compute with logits and targets"
    for node in _compat.list_graph("chunked_loss", total, sources, expected, "detach it"):
        variance = getattr(node, "variance", None)
        if variance and not variance.result:
            return variance
    return None
