"""Vocabulary-parallel embedding and cross entropy: each rank of an axis has some rows of the vocabulary's weight.

Follows Shoeybi et al., "Megatron-LM" (arXiv:1909.08053), section 3: no rank holds a full row of logits.
"""

from typing import Any

import torch
import torch.nn.functional as F

import fshard as fs
from fshard.ext import _compat
from fshard.extend import check_axis, describe, expect

REDUCTIONS = ("mean", "sum", "none")


def vocab_parallel_embedding(
    ids: torch.Tensor, weight: torch.Tensor, axis: fs.Axis, *, scatter_dim: int | None = None
) -> torch.Tensor:
    """Look up embeddings of which each rank has some rows.

    Args:
        ids: Token ids of any shape, the same on every rank of the axis.
        weight: This rank's rows, of shape (vocabulary / axis.size, width), as `split_dim(axis, dim=0)` leaves them.
        axis: The mesh axis.
        scatter_dim: A dim of the ids, counted from the front, of which each rank gets its piece, as sequence
            parallelism goes on with it; None gives every rank all.

    Returns:
        Embeddings of shape (*ids.shape, width), which agree between ranks; with `scatter_dim` a piece of them.

    Raises:
        ValueError: if an argument does not fit; on a processor, if an id is not in the vocabulary.

    >>> import torch, fshard as fs
    >>> weight = torch.tensor([[0.0, 0.5], [1.0, 1.5], [2.0, 2.5], [3.0, 3.5]])  # a vocabulary of four
    >>> def program():
    ...     axis = fs.axis_of(fs.init_mesh({"tp": -1}, device="cpu"))
    ...     mine = weight.chunk(2)[fs.axis_index(axis)]
    ...     return fs.vocab_parallel_embedding(torch.tensor([3, 0]), mine, axis).tolist()
    >>> fs.testing.spmd(program, world=2)
    [[[3.0, 3.5], [0.0, 0.5]], [[3.0, 3.5], [0.0, 0.5]]]
    """
    what = "vocab_parallel_embedding"
    _check(what, ids, weight, axis, "ids")
    own, others = _own_rows(what, ids, len(weight), axis, None)
    found = F.embedding(own, weight).masked_fill(others[..., None], 0.0)
    return fs.psum_invariant(found, axis) if scatter_dim is None else fs.reduce_scatter(found, axis, dim=scatter_dim)


def vocab_parallel_cross_entropy(
    h: torch.Tensor,
    weight: torch.Tensor | None,
    targets: torch.Tensor,
    axis: fs.Axis,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
) -> torch.Tensor:
    """Compute the cross entropy of F.linear(h, weight) where each rank has some rows of the weight.

    Equal to torch.nn.functional.cross_entropy of the full logits, to any order of derivatives. Each rank computes its
    own part of a row of logits; ranks send each other three numbers for each target: the largest logit, the sum of
    exponentials and the target's own logit. Exponentials are taken in float32 at least.

    Args:
        h: Hidden values of shape (*targets.shape, width), handed to each rank's own maths by `pvary` or `all_gather`.
        weight: This rank's rows, of shape (vocabulary / axis.size, width), as `split_dim(axis, dim=0)` leaves them;
            None where `h` is this rank's part of the logits, of shape (*targets.shape, vocabulary / axis.size).
        targets: Token ids, the same on every rank of the axis.
        axis: The mesh axis.
        reduction: "mean" over targets that count, "sum", or "none".
        ignore_index: A target that does not count.

    Returns:
        The loss, which agrees between ranks: a scalar, or of the targets' shape for "none".

    Raises:
        ValueError: if an argument does not fit; on a processor, if a target is not in the vocabulary. Elsewhere, and in
            a graph, the loss of such a target is NaN.

    >>> import torch, fshard as fs
    >>> h, weight, targets = torch.ones(1, 2), torch.arange(8.0).reshape(4, 2), torch.tensor([2])
    >>> torch.nn.functional.cross_entropy(h @ weight.T, targets)
    tensor(4.0185)
    >>> def program():
    ...     axis = fs.axis_of(fs.init_mesh({"tp": -1}, device="cpu"))
    ...     mine = weight.chunk(2)[fs.axis_index(axis)]
    ...     return fs.vocab_parallel_cross_entropy(fs.pvary(h, axis), mine, targets, axis)
    >>> fs.testing.spmd(program, world=2)
    [tensor(4.0185), tensor(4.0185)]
    """
    what = "vocab_parallel_cross_entropy"
    _check(what, targets, torch.empty(0, 0) if weight is None else weight, axis, "targets")
    width = "rows" if weight is None else weight.shape[1]
    fits = isinstance(h, torch.Tensor) and h.dim() and h.shape[:-1] == targets.shape and width in ("rows", h.shape[-1])
    shape = str((*targets.shape, width)).replace("'", "")
    expect(fits, what, f"h to be a tensor of shape {shape}", describe(h))
    expect(reduction in REDUCTIONS, what, f"reduction to be one of {REDUCTIONS}", f"{reduction!r:.40}")
    whole = isinstance(ignore_index, int) and not isinstance(ignore_index, bool)
    expect(whole, what, "ignore_index to be a whole number", f"{ignore_index!r:.40}")
    logits = h if weight is None else F.linear(h, weight)
    rows = logits.shape[-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    own, others = _own_rows(what, targets, rows, axis, ignore_index)
    # Any shift gives the same loss; the largest logit keeps exponentials finite.
    shift = fs.pmax(logits.detach().amax(-1), axis)
    mine = logits.gather(-1, own[..., None])[..., 0].masked_fill(others, 0.0)
    total, chosen = fs.psum_invariant([(logits - shift[..., None]).exp().sum(-1), mine], axis)
    losses = total.log() + shift - chosen
    ignored = targets == ignore_index
    known = (targets >= 0) & (targets < rows * axis.size)
    losses = losses.masked_fill(~known, float("nan")).masked_fill(ignored, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() / (~ignored).sum() if reduction == "mean" else losses.sum()


def _check(what: str, ids: Any, weight: Any, axis: fs.Axis, name: str) -> None:
    check_axis(what, axis)
    whole = isinstance(ids, torch.Tensor) and not ids.is_floating_point() and not ids.is_complex()
    expect(whole, what, f"{name} to be a tensor of whole numbers", describe(ids))
    matrix = isinstance(weight, torch.Tensor) and weight.dim() == 2
    remedy = "pass the gathered leaf"
    expect(matrix, what, "weight to be a matrix, this rank's rows of it", describe(weight), remedy)


def _own_rows(
    what: str, ids: torch.Tensor, rows: int, axis: fs.Axis, ignored: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find ids in this rank's rows, and tell which are another rank's, or nobody's."""
    if ids.is_cpu and not _compat.is_tracing() and not _compat.is_transformed(ids):
        counted = ids if ignored is None else ids[ids != ignored]
        least, most = (int(counted.min()), int(counted.max())) if counted.numel() else (0, 0)
        known = least >= 0 and most < rows * axis.size
        expect(known, what, f"ids from 0 to {rows * axis.size - 1}", f"{least} to {most}")
    own = ids - fs.axis_index(axis) * rows
    others = (own < 0) | (own >= rows)
    return own.masked_fill(others, 0), others
