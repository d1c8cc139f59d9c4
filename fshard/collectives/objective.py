"""The objective, a sum of losses over ranks: its axes, its denominator, and which leaves the losses use."""

import itertools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from fshard import _compat, comm
from fshard.collectives.sums import psum_invariant
from fshard.collectives.varying import check_not_reduced, refuse_wrong_sums
from fshard.comm.events import make_label
from fshard.errors import expect, refuse
from fshard.tree import Axis, Flat, Tree, flatten, is_sharded
from fshard.tree.checks import check_axes, check_loss, check_reduce, check_tensors, check_transforms, describe

# Axes or their names, one or several; None leaves them to the specs.
Over = Axis | str | Sequence[Axis | str] | None


def reduction_axes(flat: Flat, api_name: str, over: Over = None) -> tuple[Axis, ...]:
    """The mesh axes that losses are reduced over: those named, or those that transforms declare.

    Args:
        flat: A tree whose leaves are all Sharded, or none; None counts as neither.
        api_name: The verb that asks, for its error.
        over: The axes over which batches are split; None means those of every leaf's transform.

    Returns:
        The axes; none where no leaf is Sharded.

    Raises:
        ValueError: if `over` names no axes, transforms declare different ones, a leaf is nothing on an axis that was
            named, or only some leaves are Sharded.
    """
    check_axes(api_name, flat)
    check_transforms(api_name, flat)
    if not flat.specs:
        check_tensors(api_name, flat)
        if over:
            raise ValueError(
                f"{api_name}: reduce_over needs Sharded parameters, and these are plain tensors. Leave it out, or "
                "shard them."
            )
        return ()
    if over is None:
        # Where leaves differ, those with fewer axes are the ones to name, such as experts that were split by split_dim.
        axes = max((spec.transform.axes for spec in flat.specs), key=len)
    else:
        axes = _find_axes(flat, api_name, over)
    # Many leaves have one spec, so the specs are checked once each.
    misfits = {spec for spec in flat.specs if not _takes_part(spec, axes, over)}
    names = [getattr(axis, "name", axis) for axis in axes]
    expected = f"a transform that sums gradients over {names}, or owns pieces there"

    def misfit(leaf: Any) -> tuple[str, str] | None:
        if leaf is None or (is_sharded(leaf) and leaf.spec not in misfits):
            return None
        if not is_sharded(leaf):
            return describe(leaf), expected
        return f"one over {[axis.name for axis in leaf.spec.transform.axes]}", expected

    remedy = (
        "shard the whole tree on these axes (zero3 takes axis=, ddp keeps leaves whole, and own_dim owns pieces where "
        "split_dim would expect one batch for all ranks), or leave others out"
    )
    if misfits or len(flat.sharded) < len(flat.leaves):
        refuse(f"{api_name}: gradients of these leaves would not be summed", flat.problems(misfit), remedy)
    return axes


def _find_axes(flat: Flat, api_name: str, over: Axis | str | Sequence[Axis | str]) -> tuple[Axis, ...]:
    """Find axes by their names. What no leaf knows stays as it is, and no leaf takes part in it."""
    axis_of_name: dict[Any, Any] = {}
    for spec in flat.specs:
        axis_of_name |= {axis.name: axis for axis in spec.roles}
    several = over if isinstance(over, list | tuple) else [over]
    are_axes = all(isinstance(axis, Axis | str) for axis in several)
    expect(are_axes, api_name, "reduce_over to be axes or their names", describe(over), 'as in ("dp", "cp")')
    return tuple(dict.fromkeys(axis_of_name.get(axis, axis) for axis in several))


def _takes_part(spec: Any, axes: Sequence[Axis], over: Over) -> bool:
    """Whether the transform of a leaf sums its gradient over some axes, as far as the leaf has one."""
    if over is None:
        return set(spec.transform.axes) == set(axes)
    return spec.frozen or spec.roles.keys() >= set(axes)


def shared_axes(flat: Flat, over: Sequence[Axis]) -> tuple[Axis, ...]:
    """List the axes whose ranks run a call together: those of its reduction, and those of its leaves' transforms."""
    axes = dict.fromkeys(over)
    for spec in flat.specs:
        if spec.transform:
            axes |= dict.fromkeys(spec.transform.axes)
    return tuple(axes)


Loss = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def objective(loss: Loss, like: Tree, reduce: str = "mean", *, reduce_over: Over = None) -> torch.Tensor:
    """Reduce a local loss over ranks to the objective, which is equal on all of them.

    `value_and_grad` calls it for you; code under torch.func calls it itself.

    Args:
        loss: This rank's scalar loss; for "weighted" the pair (sum, count).
        like: Parameters, whose specs tell the ranks; of plain tensors alone, this rank by itself.
        reduce: "mean" over ranks, "sum" over ranks, or "weighted": sum of sums divided by the sum of counts.
        reduce_over: As for `value_and_grad`.

    Returns:
        The objective, a scalar equal on every rank and differentiable.

    Raises:
        ValueError: if `reduce` is another word, `loss` is not what it asks for, a leaf of `like` is no tensor, or
            the gradient of a leaf of `like` would not be summed over ranks as it should.

    >>> import torch, fshard as fs
    >>> def program():
    ...     mesh = fs.init_mesh({"shard": -1}, device="cpu")
    ...     params = fs.shard({"w": torch.ones(2)}, fs.zero3(mesh))
    ...     total, count = [(6.0, 1.0), (2.0, 3.0)][fs.axis_index(fs.axis_of(mesh))]
    ...     loss = torch.tensor(total), torch.tensor(count)
    ...     return fs.objective(loss, like=params, reduce="weighted").item()
    >>> fs.testing.spmd(program, world=2)  # (6 + 2) / (1 + 3)
    [2.0, 2.0]
    """
    check_reduce(reduce, "objective")
    check_loss(loss, reduce, "objective")
    params = flatten(like)
    axes = reduction_axes(params, "objective", reduce_over)
    value, count = loss if isinstance(loss, tuple) else (loss, None)
    sharded = [(path, leaf.spec, leaf.local) for path, leaf in params.named_leaves if is_sharded(leaf)]
    check_not_reduced(value, axes, "objective")
    refuse_wrong_sums("objective", value, sharded)
    compared = describe_reduce_over(axes, reduce_over)
    comm.check_same_call("objective", shared_axes(params, axes), params, reduce=reduce, **compared)
    with annotate_dtype(value.dtype):
        return divide(sum_over(widen(value), axes), denominator(count, axes, reduce)).to(value.dtype)


def describe_reduce_over(axes: Sequence[Axis], over: Over) -> dict[str, Any]:
    """Name the axes of a reduction for the comparison of ranks, where the caller chose them."""
    if over is None:
        return {}
    return {"reduce_over": [axis.name for axis in axes]}


def widen(values: torch.Tensor) -> torch.Tensor:
    """Cast values of half precision to float32, such as losses that are added up over microbatches and ranks.

    In bfloat16, 256 + 1 is 256, and in float16 the sum of two scaled losses may be infinite.
    """
    return values.float() if values.dtype.itemsize < 4 else values


def annotate_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    """Let sums of losses that `widen` casts name the dtype, so that ranks whose losses differ in it are told."""
    return comm.annotate_collectives([f"a loss of {dtype}"]) if dtype.itemsize < 4 else nullcontext()


def sum_over(tree: Tree, axes: Sequence[Axis]) -> Tree:
    """Sum over several mesh axes into values that agree between all their ranks."""
    for axis in axes:
        tree = psum_invariant(tree, axis)
    return tree


# For each call that differentiates, which leaves are used.
Usage = tuple[tuple[bool, ...], ...]


class TracedUsage:
    """Which leaves one trace uses, in each of its calls that differentiate.

    Attributes:
        used: What this rank's losses used.
        axes: The axes of the calls.
        texts: For each call the paths of leaves, and whether some rank uses them, as far as that is known.
    """

    def __init__(self, agreed: Usage = ()) -> None:
        """Begin before the first call.

        Args:
            agreed: What the traces of all ranks use, once they have asked each other.
        """
        self.used: Usage = ()
        self.axes: tuple[Axis, ...] = ()
        self.texts: tuple[str, ...] = ()
        self._agreed = agreed

    def record(self, paths: Sequence[str], used: Sequence[bool], axes: Sequence[Axis]) -> Sequence[bool]:
        """Record what the next call uses on this rank, and return what some rank uses, as far as that is known."""
        some_rank_uses = self._agreed[len(self.used)] if self._agreed else used
        lines = [
            f"{path} {'used' if is_used else 'unused'}" for path, is_used in zip(paths, some_rank_uses, strict=True)
        ]
        self.used = (*self.used, tuple(used))
        self.axes = (*self.axes, *axes)
        self.texts = (*self.texts, "\n".join(lines))
        return some_rank_uses


def agree_on_usage(usage: TracedUsage) -> Usage:
    """Ask all ranks which leaves their traces use.

    Args:
        usage: What this rank's trace does.

    Returns:
        What some rank uses, the same on every rank.
    """
    flags = list(itertools.chain.from_iterable(usage.used))
    axes = tuple(dict.fromkeys(usage.axes))
    label = comm.Label(comm.Verb.AGREE)
    joint_flags = iter(comm.join_flags(flags, axes, label))
    agreed: Usage = ()
    for used_in_call in usage.used:
        agreed += (tuple(itertools.islice(joint_flags, len(used_in_call))),)
    return agreed


def reduce_loss_and_usage(
    loss: torch.Tensor,
    paths: Sequence[str],
    used: Sequence[bool],
    loss_axes: Sequence[Axis],
    shared_axes: Sequence[Axis],
) -> tuple[torch.Tensor, Sequence[bool]]:
    """Sum a loss over ranks, and find out which leaves any of them used, on a processor in the same message.

    Args:
        loss: This rank's loss, a scalar outside of any graph.
        paths: The leaves' paths, for a trace.
        used: For each leaf whether this rank used it.
        loss_axes: The mesh axes that the loss is summed over.
        shared_axes: All mesh axes whose ranks take part in the call. Ranks of axes that are not in `loss_axes` have
            equal losses.

    Returns:
        The sum, and for each leaf whether any rank used it.
    """
    label = make_label(comm.Verb.OBJECTIVE)
    axes = [axis for axis in shared_axes if axis.size > 1]
    summed_axes = [axis for axis in axes if axis in loss_axes]
    if _compat.is_tracing():
        usage = _compat.trace_notes().get("usage")
        # Ranks compare what calls in a trace use once, after the trace.
        some_rank_uses = used if usage is None else usage.record(paths, used, shared_axes)
        return _sum_loss(loss, summed_axes, label), some_rank_uses
    # The host reads the flags. On an accelerator it would have to wait for all work that was queued before them.
    if not loss.is_cpu and all(map(comm.supports_cpu_messages, axes)):
        loss = _sum_loss(loss, summed_axes, label)
        return loss, comm.join_flags(used, axes, label)
    # In the dtype of the loss, so that both can travel in one buffer. The copy does not block the host, as one from
    # pageable memory would; later work on the same stream sees it.
    flags = torch.tensor(used, dtype=loss.dtype, device="cpu", pin_memory=not loss.is_cpu)
    flags = flags.to(loss.device, non_blocking=True)
    for axis in axes:
        if axis in summed_axes:
            loss, flags = comm.all_reduce([loss, flags], axis, label)
        else:
            (flags,) = comm.all_reduce([flags], axis, label)
    return loss, [number > 0 for number in flags.tolist()]


def _sum_loss(loss: torch.Tensor, axes: Sequence[Axis], label: comm.Label) -> torch.Tensor:
    for axis in axes:
        (loss,) = comm.all_reduce([loss], axis, label)
    return loss


def denominator(count: Any, axes: Sequence[Axis], reduce: str) -> Any:
    """Compute the divisor of summed losses and gradients: 1, the number of ranks, or the sum of counts."""
    if reduce == "weighted":
        # In one dtype whatever a rank counts in, and a wide one; the count is no part of the graph.
        return sum_over(count.detach().to(torch.float64), axes)
    return math.prod(axis.size for axis in axes) if reduce == "mean" else 1


def divide(value: torch.Tensor, divisor: Any) -> torch.Tensor:
    """Divide a sum by its denominator, in the dtype of the sum. Dividing by the int 1 returns the sum itself."""
    if isinstance(divisor, int) and divisor == 1:
        return value
    return (value / _compat.place_divisor(divisor, value)).to(value.dtype)
