"""The loss of a language model's head, chunk by chunk, so that logits of all tokens are never there at once."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function

import fshard as fs
from fshard.ext import _compat
from fshard.extend import describe, expect, record_on_tape, walk_graph, without_saved_tensor_hooks

Pair = tuple[torch.Tensor, torch.Tensor]


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> Pair:
    """Sum the cross entropy of targets, and count them; -100 does not count.

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

    Equal to `loss` of all logits, of which only one chunk's are held at a time. The forward differentiates each chunk
    at once: nothing is computed again in the backward, and the head is gathered once and its gradient reduced once.
    Follows Hsu et al., "Liger Kernel" (arXiv:2410.10989), section 3.

    Args:
        h: Hidden values of shape (*targets.shape, width).
        head: The weight, of shape (vocabulary, width), or a pair of it and a bias; Sharded leaves are gathered.
        targets: Token ids.
        chunks: How many chunks the tokens are cut into.
        loss: Maps the logits of a chunk, (tokens, vocabulary), and its targets, (tokens,), to the sum of its losses and
            the number of targets that count. It may call collectives, such as `vocab_parallel_cross_entropy` of this
            rank's part of the logits.
        dtype: The dtype that logits are cast to, and in which the head's gradient is added up; None takes the head's.

    Returns:
        The sum of losses and the count, as a loss with reduce="weighted" returns them.

    Raises:
        ValueError: if shapes do not fit, `loss` reaches a tensor that requires a gradient otherwise than by logits, or
            its graph is differentiated twice, which torch.func alone can.

    >>> import torch, fshard as fs
    >>> h, targets, mesh = torch.ones(3, 2), torch.tensor([0, 3, 1]), fs.init_mesh({"shard": -1}, device="cpu")
    >>> params = fs.shard({"head": torch.arange(8.0).reshape(4, 2)}, fs.zero3(mesh))
    >>> fs.value_and_grad(lambda p: fs.chunked_loss(h, p["head"], targets), reduce="weighted")(params)[0]
    tensor(6.6852)
    """
    # At once, as one unit.
    full = fs.gather(list(head) if isinstance(head, list | tuple) else [head])
    for name, given in {"head": full and full[0], "h": h, "targets": targets}.items():
        expect(isinstance(given, torch.Tensor), "chunked_loss", f"{name} to be a tensor", describe(given))
    shape = (*targets.shape, full[0].shape[-1])
    expect(h.shape == shape, "chunked_loss", f"h of shape {shape}, by targets and head", describe(h))
    expect(type(chunks) is int and chunks > 0, "chunked_loss", "chunks to be a positive number", f"{chunks!r:.40}")

    def one(h: torch.Tensor, targets: torch.Tensor, *head: torch.Tensor) -> Pair:
        logits = F.linear(h, *head)
        return loss(logits if dtype is None else logits.to(dtype=dtype), targets)

    tensors, ids = [h.flatten(0, -2), *full], targets.flatten().chunk(chunks)
    transformed = any(map(_compat.is_transformed, tensors)) or _compat.any_dual(tensors)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors) and not transformed:
        with without_saved_tensor_hooks():
            return _Differentiated.apply(one, ids, dtype, *tensors)
    run = fs.remat(one) if transformed else one
    return _summed([run(part, some, *full) for part, some in zip(tensors[0].chunk(chunks), ids, strict=True)])


class _Differentiated(Function):
    """Differentiates in its forward, so that its backward has only to scale."""

    @staticmethod
    def forward(ctx: Any, one: Any, ids: Any, dtype: Any, h: torch.Tensor, *head: torch.Tensor) -> Pair:
        leaves = [part.detach().requires_grad_(part.requires_grad) for part in head]
        pairs, of_h = list[Pair](), list[torch.Tensor]()
        of_head: list[Any] = [None] * len(head)
        for part, some in zip(h.detach().chunk(len(ids)), ids, strict=True):
            part.requires_grad_(h.requires_grad)
            with torch.enable_grad(), record_on_tape() as tape:
                total, count = one(part, some, *leaves)
            sources = [tensor for tensor in (part, *leaves, *tape.tokens[:1]) if tensor.requires_grad]
            if not pairs:
                # Checks of varying values see this node, and not the loss's own psum_invariant.
                known = (getattr(node, "variance", None) for node in _nodes(total, sources))
                ctx.variance = next((found for found in known if found and not found.result), None)
            ends = [total, *tape.tokens[1:]]
            starts = [torch.ones_like(total), *map(torch.zeros_like, ends[1:])]
            found = dict(zip(map(id, sources), torch.autograd.grad(ends, sources, starts), strict=True))
            pairs.append((total.detach(), count))
            of_h += [found[id(part)]] if h.requires_grad else []
            for i, leaf in enumerate(leaves):
                if leaf.requires_grad:
                    grad = found[id(leaf)].to(dtype or leaf.dtype)
                    of_head[i] = grad if of_head[i] is None else of_head[i].add_(grad)
        dtypes = [tensor.dtype for tensor in (h, *head)]
        ctx.grads = [*zip([torch.cat(of_h) if of_h else None, *of_head], dtypes, strict=True)]
        total, count = _summed(pairs)
        ctx.mark_non_differentiable(*[count] * isinstance(count, torch.Tensor))
        return total, count

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor, _: Any) -> Any:
        grads, ctx.grads = ctx.grads, None
        first = grads is not None and not torch.is_grad_enabled()
        needed, remedy = "one backward, for a first derivative", "call it again, or differentiate by torch.func"
        expect(first, "chunked_loss", needed, "another, or create_graph", remedy)
        # In place: nobody else has them, and that of the head is as large as it.
        return None, None, None, *[None if grad is None else grad.mul_(scale).to(dtype) for grad, dtype in grads]


def _summed(pairs: Sequence[Pair]) -> Pair:
    return tuple(map(sum, zip(*pairs, strict=True)))  # type: ignore[return-value]


def _nodes(total: torch.Tensor, sources: Sequence[torch.Tensor]) -> list[Any]:
    """List the nodes of a graph, which ends at some tensors alone."""
    known = {torch.autograd.graph.get_gradient_edge(source).node for source in sources}
    nodes = list[Any](walk_graph([total.grad_fn], lambda node: [other for other, _ in node.next_functions if other]))  # type: ignore[union-attr]
    alone = not any(hasattr(node, "variable") and node not in known for node in nodes)
    needed, found = "loss to compute with logits and targets", "a closure's tensor that requires a gradient"
    expect(alone, "chunked_loss", needed, found, "detach it")
    return nodes
