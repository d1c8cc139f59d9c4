"""Pipelines: the stages of a model on the ranks of a mesh axis, microbatches passing through them.

GPipe (Huang et al., arXiv:1811.06965), 1F1B (Narayanan et al., arXiv:2006.09503) and interleaved 1F1B (Narayanan et
al., arXiv:2104.04473); `fshard.ext.parallel.ticks` has their tables.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import fshard as fs
from fshard.ext import _compat
from fshard.ext.parallel.scheduled import Parts, Run, Stage, scheduled
from fshard.ext.parallel.ticks import SCHEDULES
from fshard.extend import calling, check_axis, describe, expect, flatten, refuse, sum_dtype

REDUCTIONS = ("mean", "sum", "weighted")


def pipeline(
    stage_fn: Callable[[Any, torch.Tensor], torch.Tensor],
    axis: fs.Axis,
    *,
    microbatches: int,
    last: Callable[..., Any],
    first: Callable[[Any, Any], torch.Tensor] | None = None,
    schedule: str = "1f1b",
    virtual_stages: int = 1,
    reduce: str = "mean",
) -> Callable[..., Any]:
    """Turn the parts of a model into a loss function for `value_and_grad`, pipelined over a mesh axis.

    Each part is called with the whole tree of parameters, gathered. What stages own is split over the axis by
    `split_dim`, as stacked layers are along dim 0, and a rank gets its own piece; leaves that are whole on all ranks of
    the axis, such as those of `first` and `last`, go through `pvary`, which sums their gradients. Every rank of the
    axis is given the same batch, and gets the loss of the last stage.

    With "gpipe" autograd makes the backward: it is differentiable to any order, by torch.func too, holds all
    microbatches, and every rank computes `first` and `last`, whose results count on the first and the last one alone.
    "1f1b" runs forwards and backwards by hand, one of them a tick: 2 (microbatches + ranks - 1) ticks, and at most
    ranks - stage microbatches live on a stage. "interleaved" gives each rank several virtual stages, which makes its
    idle time shorter by their number: leaves that are split over the axis are stacks of them in dim 0, and split in
    another dim; virtual stage c of rank r is number c * axis.size + r of the model. Both have first derivatives by
    autograd alone. Without a gradient all run forwards alone.

    Args:
        stage_fn: Called as stage_fn(params, h); returns a tensor of h's shape and dtype.
        axis: The mesh axis, whose ranks are the stages in their order.
        microbatches: How many equal parts the batch is cut in, along dim 0; with "interleaved" a multiple of axis.size.
        last: Called as last(params, h, *rest) with the last stage's result and a microbatch of what the loss function
            is given behind x; returns a scalar loss, or (sum, count) for "weighted".
        first: Called as first(params, x) with a microbatch; returns the first stage's h. None takes x itself.
        schedule: "gpipe", "1f1b" or "interleaved".
        virtual_stages: How many each rank has, with "interleaved".
        reduce: "mean" over microbatches, "sum", or "weighted", whose loss function returns (sum, count) of all
            microbatches for `value_and_grad(..., reduce="weighted")`.

    Returns:
        A function of (params, x, *rest), with trees of tensors as x and rest. Its loss agrees between ranks of the
        axis, and has the dtype of h, or float32 where that has fewer bits.

    Raises:
        ValueError: if an argument is out of range; by the function returned, on every rank of the axis, if the batch
            does not divide, ranks have batches of other shapes or other schedules, a leaf is plain or not split as the
            schedule needs it, or "1f1b" or "interleaved" is differentiated by torch.func, in forward mode or twice.
        RuntimeError: by the function returned, if a stage failed on another rank.

    >>> import fshard as fs
    >>> mesh = fs.init_mesh({"shard": 1, "pipe": -1}, device="cpu")
    >>> shard, pipe = fs.axis_of(mesh, "shard"), fs.axis_of(mesh, "pipe")
    >>> owned = fs.compose(fs.fully_shard(shard, dim=1), fs.split_dim(pipe, dim=0))
    >>> layout = fs.masked(owned, "layers", otherwise=fs.fully_shard(shard))
    >>> params = fs.shard({"layers": torch.ones(4, 3), "head": torch.ones(3)}, fs.zero3(mesh, layout=layout))
    >>> loss_fn = fs.pipeline(
    ...     lambda p, h: h * p["layers"].prod(0),
    ...     pipe,
    ...     microbatches=2,
    ...     last=lambda p, h, y: (h @ p["head"] - y).square().mean(),
    ... )
    >>> loss, grads = fs.value_and_grad(loss_fn)(params, torch.ones(4, 3), torch.zeros(4))
    >>> loss.item()
    9.0
    """
    check_axis("pipeline", axis)
    for name, f in (("stage_fn", stage_fn), ("last", last), ("first", first)):
        expect(callable(f) or (f is None and name == "first"), "pipeline", f"{name} to be a function", describe(f))
    expect(schedule in SCHEDULES, "pipeline", f"schedule to be one of {SCHEDULES}", f"{schedule!r:.40}")
    expect(reduce in REDUCTIONS, "pipeline", f"reduce to be one of {REDUCTIONS}", f"{reduce!r:.40}")
    for name, number in (("microbatches", microbatches), ("virtual_stages", virtual_stages)):
        whole = type(number) is int and number >= 1
        expect(whole, "pipeline", f"{name} to be a whole number of 1 or more", f"{number!r:.40}")
    needed = 'virtual_stages to be 1 but for schedule="interleaved"'
    expect(virtual_stages == 1 or schedule == "interleaved", "pipeline", needed, f"{virtual_stages}")
    groups = schedule != "interleaved" or microbatches % axis.size == 0
    needed = f'microbatches to be a multiple of the {axis.size} ranks of {axis.name!r} for schedule="interleaved"'
    expect(groups, "pipeline", needed, f"{microbatches}")
    parts = Parts(stage_fn, first or (lambda _, x: x), last, axis, microbatches, schedule, virtual_stages, reduce)

    def loss_fn(params: Any, x: Any, *rest: Any) -> Any:
        with calling("pipeline", lambda: [axis], begins=False):
            return _loss(parts, params, x, rest)

    return loss_fn


def _name(parts: Parts) -> str:
    return f"{parts.schedule} pipeline of {parts.microbatches} microbatches and {parts.virtual_stages} virtual stages"


def _loss(parts: Parts, params: Any, x: Any, rest: tuple[Any, ...]) -> Any:
    axis, flat = parts.axis, flatten(params)
    _begin(parts, flat, (x, *rest))
    split = [isinstance(leaf, fs.Sharded) and leaf.spec.dim_of(axis) is not None for leaf in flat.leaves]
    rebuild = flat.unflatten
    leaves = list(flatten(fs.gather(params)).leaves)
    shared = [i for i, leaf in enumerate(leaves) if not split[i] and _is_varied(leaf)]
    for i, leaf in zip(shared, fs.pvary([leaves[i] for i in shared], axis), strict=True):
        leaves[i] = leaf
    batches = [fs.tree_map(partial(_microbatch, parts.microbatches, i), (x, *rest)) for i in range(parts.microbatches)]
    with torch.no_grad():
        like = parts.first(rebuild(leaves), batches[0][0])
    floating = isinstance(like, torch.Tensor) and like.is_floating_point()
    expect(floating, "pipeline", "first to return a floating tensor", describe(like))
    stage = Stage(parts, batches, like.detach())
    if parts.schedule == "gpipe":
        found = _gpipe(parts, stage, rebuild(leaves))
    else:
        found = scheduled(Run(parts, stage, rebuild, like, split, _sum_dtypes(flat)), leaves, _name(parts))
    value, *counts = fs.psum_invariant(found, axis)
    return (value, counts[0].detach()) if counts else value


def _gpipe(parts: Parts, stage: Stage, params: Any) -> list[torch.Tensor]:
    """Run the same on every rank, so that their graphs are alike to any order: a rank takes what counts by `where`."""
    axis, count, stages = parts.axis, parts.microbatches, parts.axis.size
    own, pairs = fs.axis_index(axis), [(rank, rank + 1) for rank in range(stages - 1)]
    total, received = stage.nothing(), None
    for tick in range(count + stages - 1):
        h = stage.first(params, min(tick, count - 1))
        # Before the first microbatch comes, a stage takes one like it: derivatives at zeros may be NaN.
        h = h if received is None else torch.where(h.new_full((), own == 0, dtype=torch.bool), h, received)
        out = stage.stage(params, h)
        if tick >= stages - 1:
            parts_of_loss = stage.last(params, out, tick - stages + 1)
            total = [a + b for a, b in zip(total, parts_of_loss, strict=True)]
        if tick < count + stages - 2:
            received = fs.ppermute(out, axis, pairs)
    is_last = total[0].new_full((), own == stages - 1, dtype=torch.bool)
    return [torch.where(is_last, part, torch.zeros_like(part)) for part in total]


def _is_varied(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _microbatch(count: int, i: int, tensor: torch.Tensor) -> torch.Tensor:
    rows = len(tensor) // count
    return tensor[i * rows : (i + 1) * rows]


def _sum_dtypes(flat: Any) -> list[Callable[[torch.dtype], torch.dtype]]:
    return [partial(sum_dtype, leaf.spec) if isinstance(leaf, fs.Sharded) else _unchanged for leaf in flat.leaves]


def _unchanged(dtype: torch.dtype) -> torch.dtype:
    return dtype


def _begin(parts: Parts, flat: Any, batch: tuple[Any, ...]) -> None:
    """See that every rank of the axis begins the same pipeline, with a batch and parameters that fit.

    Args:
        parts: The arguments of `fs.pipeline`.
        flat: The parameters.
        batch: x and the rest.

    Raises:
        ValueError: if they do not, or a schedule is to be differentiated in a way that it is not.
    """
    _check_split(parts, flat)
    _check_shapes(parts, flatten(batch))
    _refuse_derivatives(parts, flat, batch)


def _check_split(parts: Parts, flat: Any) -> None:
    """Refuse leaves of which nobody can tell whether they are split over the axis, or that are split another way."""
    axis, interleaved = parts.axis, parts.schedule == "interleaved"

    def misfit(leaf: Any) -> tuple[str, str] | None:
        if not isinstance(leaf, fs.Sharded):
            plain = leaf is not None and (axis.size > 1 or interleaved)
            return ("a plain tensor", "a Sharded leaf, which pipeline gathers by itself") if plain else None
        if leaf.spec.transform is not None and axis in leaf.spec.transform.axes:
            return f"one whose gradients are reduced over {axis.name!r}", "one split by split_dim, or whole"
        dim, size = leaf.spec.dim_of(axis), parts.virtual_stages
        if interleaved and dim is not None and (dim == 0 or leaf.spec.shape[0] != size or leaf.local.shape[0] != size):
            found = f"shape {leaf.spec.shape}, split over {axis.name!r} in dim {dim}"
            return found, f"a stack of {size} virtual stages in dim 0, split over {axis.name!r} in another dim"
        return None

    remedy = f"shard what stages own by a composition with split_dim over {axis.name!r}, and the rest without"
    refuse(f"pipeline over {axis.name!r}: leaves do not fit", flat.problems(misfit), remedy)


def _check_shapes(parts: Parts, flat: Any) -> None:
    """Refuse a batch whose leaves cannot be cut in microbatches."""

    def misfit(leaf: Any) -> tuple[str, str] | None:
        fits = isinstance(leaf, torch.Tensor) and leaf.dim() and not len(leaf) % parts.microbatches
        return None if fits or leaf is None else (describe(leaf), f"a multiple of {parts.microbatches} rows")

    what = f"pipeline: the batch cannot be cut in {parts.microbatches} microbatches"
    remedy = "pass tensors of as many rows, or another number of microbatches"
    refuse(what, flat.problems(misfit), remedy)


def _refuse_derivatives(parts: Parts, flat: Any, batch: tuple[Any, ...]) -> None:
    """Refuse all but first derivatives of parameters by autograd, for schedules that compute no others."""
    if parts.schedule == "gpipe":
        return
    given = fs.tree_leaves((flat.leaves, batch))
    needed, remedy = f"no {{}} with schedule={parts.schedule!r}", 'take schedule="gpipe", which is differentiable so'
    expect(not _compat.transforms_active(), "pipeline", needed.format("transform"), "torch.func", remedy)
    dual = _compat.any_dual(given)
    expect(not dual, "pipeline", needed.format("forward-mode derivative"), "a tensor with a tangent", remedy)
    wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in fs.tree_leaves(batch))
    expect(not wanted, "pipeline", needed.format("gradient of the batch"), "one that requires a gradient", remedy)
