"""Vocabulary-parallel embedding and cross entropy: each rank of an axis has some rows of the vocabulary's weight.

Follows Shoeybi et al., "Megatron-LM" (arXiv:1909.08053), section 3: no rank holds a full row of logits.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import fshard as fs
from fshard.ext import _compat
from fshard.extend import (
    NUMBER,
    annotate_collectives,
    calling,
    check_arguments,
    check_axis,
    describe,
    expect,
    is_tracing,
    widen,
)

REDUCTIONS = ("mean", "sum", "none")


def vocab_parallel_embedding(
    ids: torch.Tensor,
    weight: torch.Tensor,
    axis: fs.Axis,
    *,
    scatter_dim: int | None = None,
    vocab_size: int | None = None,
) -> torch.Tensor:
    """Look up embeddings in a weight of which each rank has some rows.

    Args:
        ids: Token ids of any shape, the same on every rank of the axis.
        weight: This rank's rows, of shape (rows, width); ranks have pieces of the vocabulary in the order of the axis.
        axis: The mesh axis.
        scatter_dim: A dim of the ids, counted from the front, of which each rank gets its piece, as sequence
            parallelism needs it; None gives every rank all embeddings.
        vocab_size: The number of rows of the whole weight. Pieces are then those of `weight.chunk(axis.size)`, or all
            of the same size and padded at the end, as `fully_shard` stores them; padding does not count. With None,
            ranks send each other their numbers of rows in each call, and pieces may have any size, or no rows.

    Returns:
        Embeddings of shape (*ids.shape, width), which agree between ranks; with `scatter_dim` a piece of them.

    Raises:
        ValueError: if an argument does not fit; on a CPU, if an id is not in the vocabulary.
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
    # If ranks passed different sizes, a padded piece could fit both of them, and padding of one rank would count.
    compared = [f"vocab_size={vocab_size!r:.40}"]
    with calling(api_name, lambda: [axis], begins=False), annotate_collectives((), compared):
        _check_ids(api_name, "ids", ids)
        _check_weight(api_name, weight)
        piece = _locate_piece(api_name, len(weight), ids.device, axis, vocab_size)
        local_ids, is_remote = _find_local_ids(api_name, ids, piece)
        if not len(weight):
            # A rank without rows looks up a row of zeros, so that its backward has the same collectives as the others'.
            weight = F.pad(weight, (0, 0, 0, 1))
        embeddings = F.embedding(local_ids, weight)
        embeddings = embeddings.masked_fill(is_remote[..., None], 0.0)
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
    """Compute the cross entropy of F.linear(h, weight) with a weight of which each rank has some rows.

    The result equals torch.nn.functional.cross_entropy of the full logits, to any order of derivatives. Each rank
    computes its part of a row of logits; ranks send each other three numbers for each target: the largest logit, the
    sum of exponentials and the logit of the target. Exponentials are taken in float32 at least.

    Args:
        h: Hidden values of shape (*targets.shape, width), cast to varying by `pcast` or `all_gather`.
        weight: This rank's rows, of shape (rows, width); ranks have pieces of the vocabulary in the order of the axis.
            None if `h` is this rank's part of the logits, of shape (*targets.shape, rows).
        targets: Token ids, the same on every rank of the axis.
        axis: The mesh axis.
        reduction: "mean" over targets that count, "sum", or "none".
        ignore_index: A target that does not count.
        vocab_size: The number of rows of the whole weight, as for `vocab_parallel_embedding`. With None, ranks send
            each other their numbers of rows in each call.

    Returns:
        The loss, which agrees between ranks: a scalar, or of the targets' shape for "none".

    Raises:
        ValueError: if an argument does not fit; on a CPU, if a target is not in the vocabulary. On other devices, and
            in a graph, the loss of such a target is NaN.
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
    # As for the embedding.
    size_text = f"vocab_size={vocab_size!r:.40}"
    with calling(api_name, lambda: [axis], begins=False), annotate_collectives((), [size_text]):
        _check_ids(api_name, "targets", targets)
        if weight is not None:
            _check_weight(api_name, weight)
        _check_loss(api_name, h, weight, targets, reduction, ignore_index)
        rows = h.shape[-1] if weight is None else len(weight)
        piece = _locate_piece(api_name, rows, targets.device, axis, vocab_size)
        is_ignored = targets == ignore_index
        targets = targets.masked_fill(is_ignored, 0)
        local_targets, is_remote = _find_local_ids(api_name, targets, piece)
        logits = _local_logits(h, weight, piece.rows)
        # Any shift gives the same loss; the largest logit keeps exponentials finite.
        shift = fs.pmax(logits.detach().amax(-1), axis)
        local_logits = logits.gather(-1, local_targets[..., None])[..., 0]
        local_logits = local_logits.masked_fill(is_remote, 0.0)
        local_sums = (logits - shift[..., None]).exp().sum(-1)
        sums, target_logits = fs.psum_invariant([local_sums, local_logits], axis)
    losses = sums.log() + shift - target_logits
    is_known = (targets >= 0) & (targets < piece.vocabulary)
    losses = losses.masked_fill(~is_known, float("nan")).masked_fill(is_ignored, 0.0)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (~is_ignored).sum()


class _Piece(NamedTuple):
    """The part of a vocabulary that this rank has. Numbers that ranks sent each other are tensors.

    Attributes:
        start: The id of its first row.
        rows: How many of this rank's rows count; the others are padding.
        vocabulary: The number of rows of all ranks.
    """

    start: int | torch.Tensor
    rows: int
    vocabulary: int | torch.Tensor


def _locate_piece(
    api_name: str,
    rows: int,
    device: torch.device,
    axis: fs.Axis,
    vocab_size: int | None,
) -> _Piece:
    """Find where the rows of this rank lie, from the size of the vocabulary or from the sizes of all pieces."""
    rank = fs.axis_index(axis)
    if vocab_size is None:
        if axis.size == 1:
            return _Piece(0, rows, rows)
        # Ranks may have different numbers of rows, so the number of this rank does not say where its rows begin.
        local_size = torch.full((1,), rows, device=device)
        sizes = fs.all_gather(local_size, axis)
        return _Piece(sizes[:rank].sum(), rows, sizes.sum())
    check_arguments(api_name, NUMBER, vocab_size=vocab_size)
    size = -(-vocab_size // axis.size)
    start = min(rank * size, vocab_size)
    unpadded = min(size, vocab_size - start)
    sizes_text = f"{unpadded} rows" if unpadded == size else f"{unpadded} rows, or {size} with padding,"
    expected = f"{sizes_text} of a vocabulary of {vocab_size} on rank {rank} of {axis.name!r}"
    remedy = "cut the weight by weight.chunk(axis.size), or leave out vocab_size="
    expect(rows in (unpadded, size), api_name, expected, f"{rows}", remedy)
    return _Piece(start, unpadded, vocab_size)


def _local_logits(h: torch.Tensor, weight: torch.Tensor | None, rows: int) -> torch.Tensor:
    """Compute the logits of the first rows of this rank, in float32 at least."""
    if weight is not None:
        h = F.linear(h, weight[:rows])
    logits = widen(h[..., :rows])
    if not rows:
        # The exponential of minus infinity adds nothing to those of other ranks.
        return F.pad(logits, (0, 1), value=float("-inf"))
    return logits


def _find_local_ids(api_name: str, ids: torch.Tensor, piece: _Piece) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the places of ids among this rank's rows.

    Returns:
        The places, 0 for ids that are not in this rank's rows, and which ids these are.
    """
    if ids.is_cpu and ids.numel() and not is_tracing() and not _compat.is_transformed(ids):
        least, most = ids.aminmax()
        is_known = least >= 0 and most < piece.vocabulary
        expect(bool(is_known), api_name, f"ids from 0 to {int(piece.vocabulary) - 1}", f"{int(least)} to {int(most)}")
    places = ids - piece.start
    is_remote = (places < 0) | (places >= piece.rows)
    return places.masked_fill(is_remote, 0), is_remote


def _check_ids(api_name: str, name: str, ids: Any) -> None:
    is_whole = isinstance(ids, torch.Tensor) and not (ids.is_floating_point() or ids.is_complex())
    expect(is_whole, api_name, f"{name} to be a tensor of whole numbers", describe(ids))


def _check_weight(api_name: str, weight: Any) -> None:
    is_matrix = isinstance(weight, torch.Tensor) and weight.dim() == 2
    expected = "weight to be a matrix, this rank's rows of it"
    expect(is_matrix, api_name, expected, describe(weight), "pass the gathered leaf")


def _check_loss(
    api_name: str,
    h: Any,
    weight: torch.Tensor | None,
    targets: torch.Tensor,
    reduction: Any,
    ignore_index: Any,
) -> None:
    fits = isinstance(h, torch.Tensor) and h.dim() and h.shape[:-1] == targets.shape
    if fits and weight is not None:
        fits = h.shape[-1] == weight.shape[1]
    last_dim = "rows" if weight is None else str(weight.shape[1])
    shape = ", ".join([*map(str, targets.shape), last_dim])
    expect(fits, api_name, f"h to be a tensor of shape ({shape})", describe(h))
    expect(reduction in REDUCTIONS, api_name, f"reduction to be one of {REDUCTIONS}", f"{reduction!r:.40}")
    expect(type(ignore_index) is int, api_name, "ignore_index to be a whole number", f"{ignore_index!r:.40}")
