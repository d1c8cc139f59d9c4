"""Vocabulary-parallel embedding and cross entropy: each rank of an axis has some rows of the vocabulary's weight.

Follows Shoeybi et al., "Megatron-LM" (arXiv:1909.08053), section 3: no rank holds a full row of logits.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import fshard as fs
from fshard.ext import _compat
from fshard.extend import annotate_collectives, calling, check_axis, describe, expect

REDUCTIONS = ("mean", "sum", "none")


def vocab_parallel_embedding(
    ids: torch.Tensor,
    weight: torch.Tensor,
    axis: fs.Axis,
    *,
    scatter_dim: int | None = None,
    vocab_size: int | None = None,
) -> torch.Tensor:
    """Look up embeddings of which each rank has some rows.

    Args:
        ids: Token ids of any shape, the same on every rank of the axis.
        weight: This rank's rows, of shape (rows, width); ranks have pieces of the vocabulary in the order of the axis.
        axis: The mesh axis.
        scatter_dim: A dim of the ids, counted from the front, of which each rank gets its piece, as sequence
            parallelism goes on with it; None gives every rank all.
        vocab_size: The number of rows of the whole weight. Pieces are then those of `weight.chunk(axis.size)`, or all
            of the same size and padded at the end, as `fully_shard` stores them; padding does not count. None lets
            ranks send each other their numbers of rows in each call, and pieces may have any size, also none.

    Returns:
        Embeddings of shape (*ids.shape, width), which agree between ranks; with `scatter_dim` a piece of them.

    Raises:
        ValueError: if an argument does not fit; on a processor, if an id is not in the vocabulary.
        CollectiveError: if another rank's argument does not fit.

    >>> import torch, fshard as fs
    >>> weight = torch.tensor([[0.0, 0.5], [1.0, 1.5], [2.0, 2.5], [3.0, 3.5]])  # a vocabulary of four
    >>> def program():
    ...     axis = fs.axis_of(fs.init_mesh({"tp": -1}, device="cpu"))
    ...     mine = weight.chunk(2)[fs.axis_index(axis)]
    ...     return fs.vocab_parallel_embedding(torch.tensor([3, 0]), mine, axis).tolist()
    >>> fs.testing.spmd(program, world=2)
    [[[3.0, 3.5], [0.0, 0.5]], [[3.0, 3.5], [0.0, 0.5]]]
    """
    api_name = "vocab_parallel_embedding"
    check_axis(api_name, axis)
    with calling(api_name, lambda: [axis], begins=False), _compare_vocabularies(vocab_size):
        _check(api_name, ids, weight, vocab_size, "ids")
        piece = _locate_piece(api_name, len(weight), ids.device, axis, vocab_size)
        own_ids, is_other = _own_ids(api_name, ids, piece, None)
        # A rank without rows looks up a row of zeros, so that its backward has the collectives of the others'.
        table = weight if len(weight) else F.pad(weight, (0, 0, 0, 1))
        embeddings = F.embedding(own_ids, table).masked_fill(is_other[..., None], 0.0)
        if scatter_dim is None:
            return fs.psum_invariant(embeddings, axis)
        return fs.reduce_scatter(embeddings, axis, dim=scatter_dim)


def vocab_parallel_cross_entropy(
    h: torch.Tensor,
    weight: torch.Tensor | None,
    targets: torch.Tensor,
    axis: fs.Axis,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    vocab_size: int | None = None,
) -> torch.Tensor:
    """Compute the cross entropy of F.linear(h, weight) where each rank has some rows of the weight.

    Equal to torch.nn.functional.cross_entropy of the full logits, to any order of derivatives. Each rank computes its
    own part of a row of logits; ranks send each other three numbers for each target: the largest logit, the sum of
    exponentials and the target's own logit. Exponentials are taken in float32 at least.

    Args:
        h: Hidden values of shape (*targets.shape, width), cast to varying by `pcast` or `all_gather`.
        weight: This rank's rows, of shape (rows, width); ranks have pieces of the vocabulary in the order of the axis.
            None where `h` is this rank's part of the logits, of shape (*targets.shape, rows).
        targets: Token ids, the same on every rank of the axis.
        axis: The mesh axis.
        reduction: "mean" over targets that count, "sum", or "none".
        ignore_index: A target that does not count.
        vocab_size: The number of rows of the whole weight, as for `vocab_parallel_embedding`; None lets ranks send each
            other their numbers of rows in each call.

    Returns:
        The loss, which agrees between ranks: a scalar, or of the targets' shape for "none".

    Raises:
        ValueError: if an argument does not fit; on a processor, if a target is not in the vocabulary. Elsewhere, and in
            a graph, the loss of such a target is NaN.
        CollectiveError: if another rank's argument does not fit.

    >>> import torch, fshard as fs
    >>> h, weight, targets = torch.ones(1, 2), torch.arange(8.0).reshape(4, 2), torch.tensor([2])
    >>> torch.nn.functional.cross_entropy(h @ weight.T, targets)
    tensor(4.0185)
    >>> def program():
    ...     axis = fs.axis_of(fs.init_mesh({"tp": -1}, device="cpu"))
    ...     mine = weight.chunk(2)[fs.axis_index(axis)]
    ...     return fs.vocab_parallel_cross_entropy(fs.pcast(h, axis, to="varying"), mine, targets, axis)
    >>> fs.testing.spmd(program, world=2)
    [tensor(4.0185), tensor(4.0185)]
    """
    api_name = "vocab_parallel_cross_entropy"
    check_axis(api_name, axis)
    with calling(api_name, lambda: [axis], begins=False), _compare_vocabularies(vocab_size):
        _check(api_name, targets, torch.empty(0, 0) if weight is None else weight, vocab_size, "targets")
        _check_loss(api_name, h, weight, targets, reduction, ignore_index)
        rows = h.shape[-1] if weight is None else len(weight)
        piece = _locate_piece(api_name, rows, targets.device, axis, vocab_size)
        own_targets, is_other = _own_ids(api_name, targets, piece, ignore_index)
        logits = _own_logits(h, weight, piece.rows)
        # Any shift gives the same loss; the largest logit keeps exponentials finite.
        shift = fs.pmax(logits.detach().amax(-1), axis)
        own_chosen = logits.gather(-1, own_targets[..., None])[..., 0].masked_fill(is_other, 0.0)
        own_total = (logits - shift[..., None]).exp().sum(-1)
        total, chosen = fs.psum_invariant([own_total, own_chosen], axis)
    losses = total.log() + shift - chosen
    is_ignored = targets == ignore_index
    is_known = (targets >= 0) & (targets < piece.vocabulary)
    losses = losses.masked_fill(~is_known, float("nan")).masked_fill(is_ignored, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() / (~is_ignored).sum() if reduction == "mean" else losses.sum()


class _Piece(NamedTuple):
    """The part of a vocabulary that this rank has; a tensor where ranks have told each other.

    Attributes:
        start: The id of its first row.
        rows: How many of this rank's rows count; others are padding.
        vocabulary: The number of rows of all ranks.
    """

    start: int | torch.Tensor
    rows: int
    vocabulary: int | torch.Tensor


def _compare_vocabularies(vocab_size: Any) -> AbstractContextManager[None]:
    """Let ranks that pass different sizes of the vocabulary hear of it by the collectives inside a context.

    Pieces that are padded to one size would otherwise fit both, and padding of one rank would count.
    """
    if vocab_size is None:
        return nullcontext()
    return annotate_collectives((), [f"vocabulary of {vocab_size!r:.40}"])


def _locate_piece(api_name: str, rows: int, device: torch.device, axis: fs.Axis, vocab_size: int | None) -> _Piece:
    """Find where the rows of this rank lie, from the size of the vocabulary or from the sizes of all pieces."""
    rank = fs.axis_index(axis)
    if vocab_size is None:
        if axis.size == 1:
            return _Piece(0, rows, rows)
        # Ranks may have different numbers of rows, so that this rank's own number does not tell where they begin.
        sizes = fs.all_gather(torch.full((1,), rows, device=device), axis)
        return _Piece(sizes[:rank].sum(), rows, sizes.sum())
    size = -(-vocab_size // axis.size)
    start = min(rank * size, vocab_size)
    unpadded = min(size, vocab_size - start)
    sizes_text = f"{unpadded} rows" if unpadded == size else f"{unpadded} rows, or {size} with padding,"
    expected = f"{sizes_text} of a vocabulary of {vocab_size} on rank {rank} of {axis.name!r}"
    remedy = "cut the weight by weight.chunk(axis.size), or leave out vocabulary="
    expect(rows in (unpadded, size), api_name, expected, f"{rows}", remedy)
    return _Piece(start, unpadded, vocab_size)


def _own_logits(h: torch.Tensor, weight: torch.Tensor | None, rows: int) -> torch.Tensor:
    """Compute the logits of some rows of this rank, in float32 at least."""
    if weight is not None:
        h = F.linear(h, _first(weight, rows, dim=0))
    logits = _first(h, rows, dim=-1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # The exponential of minus infinity adds nothing to those of other ranks.
    return logits if rows else F.pad(logits, (0, 1), value=float("-inf"))


def _first(tensor: torch.Tensor, size: int, dim: int) -> torch.Tensor:
    """Leave out what lies behind the first places of a dim."""
    return tensor if tensor.shape[dim] == size else tensor.narrow(dim, 0, size)


def _check(api_name: str, ids: Any, weight: Any, vocab_size: Any, name: str) -> None:
    is_whole = isinstance(ids, torch.Tensor) and not ids.is_floating_point() and not ids.is_complex()
    expect(is_whole, api_name, f"{name} to be a tensor of whole numbers", describe(ids))
    is_matrix = isinstance(weight, torch.Tensor) and weight.dim() == 2
    remedy = "pass the gathered leaf"
    expect(is_matrix, api_name, "weight to be a matrix, this rank's rows of it", describe(weight), remedy)
    fits = vocab_size is None or (type(vocab_size) is int and vocab_size > 0)
    expect(fits, api_name, "vocab_size to be a whole number of 1 or more, or None", f"{vocab_size!r:.40}")


def _check_loss(api_name: str, h: Any, weight: Any, targets: torch.Tensor, reduction: Any, ignore_index: Any) -> None:
    width = "rows" if weight is None else weight.shape[1]
    fits = isinstance(h, torch.Tensor) and h.dim() and h.shape[:-1] == targets.shape and width in ("rows", h.shape[-1])
    shape = str((*targets.shape, width)).replace("'", "")
    expect(fits, api_name, f"h to be a tensor of shape {shape}", describe(h))
    expect(reduction in REDUCTIONS, api_name, f"reduction to be one of {REDUCTIONS}", f"{reduction!r:.40}")
    is_whole = isinstance(ignore_index, int) and not isinstance(ignore_index, bool)
    expect(is_whole, api_name, "ignore_index to be a whole number", f"{ignore_index!r:.40}")


def _own_ids(api_name: str, ids: torch.Tensor, piece: _Piece, ignored: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Find ids in this rank's rows, and tell which are another rank's, or nobody's."""
    if ids.is_cpu and not _compat.is_tracing() and not _compat.is_transformed(ids):
        counted = ids if ignored is None else ids[ids != ignored]
        least, most = (int(counted.min()), int(counted.max())) if counted.numel() else (0, 0)
        vocabulary = int(piece.vocabulary)
        is_known = least >= 0 and most < vocabulary
        expect(is_known, api_name, f"ids from 0 to {vocabulary - 1}", f"{least} to {most}")
    own_ids = ids - piece.start
    is_other = (own_ids < 0) | (own_ids >= piece.rows)
    return own_ids.masked_fill(is_other, 0), is_other
