"""The objective, a sum of losses over ranks: its axes, its denominator, and what ranks tell each other with it."""

import json
import math
from collections.abc import Sequence
from typing import Any

import torch

from fshard import _compat, comm
from fshard.collectives.sums import psum_invariant
from fshard.collectives.varying import refuse_wrong_sums
from fshard.errors import Problem, expect, refuse
from fshard.tree import Axis, Flat, Tree, flatten, is_sharded
from fshard.tree.checks import check_axes, check_loss, check_reduce, check_tensors, check_transforms, describe

# Axes or their names, one or several; None leaves them to the specs.
Over = Axis | str | Sequence[Axis | str] | None


def reduction_axes(flat: Flat, what: str, over: Over = None) -> tuple[Axis, ...]:
    """The mesh axes that losses are reduced over: those named, or those that transforms declare.

    Args:
        flat: A tree whose leaves are all Sharded, or none; None counts as neither.
        what: The verb that asks, for its error.
        over: The axes over which batches are split; None means those of every leaf's transform.

    Returns:
        The axes; none where no leaf is Sharded.

    Raises:
        ValueError: if transforms declare different axes, a leaf is nothing on an axis that was named, or only some
            leaves are Sharded.
    """
    check_axes(what, flat)
    check_transforms(what, flat)
    if not flat.specs:
        check_tensors(what, flat)
        expect(not over, what, "reduce_over with Sharded leaves, whose specs have axes", "it with plain tensors alone")
        return ()
    known: dict[Any, Axis] = {axis.name: axis for spec in flat.specs for axis in spec.roles}
    first: Any = flat.specs[0].transform
    given: Any = [over] if isinstance(over, Axis | str) else first.axes if over is None else over
    axes = tuple(dict.fromkeys(known.get(one, one) for one in given))
    names = [getattr(axis, "name", axis) for axis in axes]
    needed = f"a transform that sums gradients over {names}, or owns pieces there"

    def takes_part(spec: Any) -> bool:
        if over is None:
            return {*spec.transform.axes} == {*axes}
        return spec.frozen or spec.roles.keys() >= {*axes}

    misfits = {spec for spec in flat.specs if not takes_part(spec)}
    problems = [
        Problem(path, _roles(leaf), needed)
        for path, leaf in zip(flat.paths, flat.leaves, strict=True)
        if leaf is not None and not (is_sharded(leaf) and (not misfits or leaf.spec not in misfits))
    ]
    remedy = "shard the whole tree on these axes (zero3 takes axis=, and ddp keeps leaves whole), or leave others out"
    refuse(f"{what}: gradients would stay unsummed", problems, remedy)
    return axes


def _roles(leaf: Any) -> str:
    return f"one over {[axis.name for axis in leaf.spec.roles]}" if is_sharded(leaf) else describe(leaf)


def shared_axes(flat: Flat, over: Sequence[Axis]) -> tuple[Axis, ...]:
    """List the axes whose ranks run a call together: those of its reduction, and those of its leaves' transforms."""
    inner = (axis for spec in flat.specs if spec.transform for axis in spec.transform.axes)
    return tuple(dict.fromkeys((*over, *inner)))


Loss = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def objective(loss: Loss, like: Tree, reduce: str = "mean", *, reduce_over: Over = None) -> torch.Tensor:
    """Close a local loss into the objective that agrees between ranks.

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
    pairs = zip(params.paths, params.leaves, strict=True)
    sharded = [(path, leaf.spec, leaf.local) for path, leaf in pairs if is_sharded(leaf)]
    refuse_wrong_sums("objective", value, sharded)
    comm.same_call("objective", shared_axes(params, axes), params, reduce=reduce, **named(axes, reduce_over))
    return divided(total(value, axes), denominator(count, axes, reduce))


def named(axes: Sequence[Axis], over: Over) -> dict[str, Any]:
    """Name the axes of a reduction for the comparison of ranks, where the caller chose them."""
    return {} if over is None else {"reduce_over": [axis.name for axis in axes]}


def total(tree: Tree, axes: Sequence[Axis]) -> Tree:
    """Sum over several mesh axes into values that agree between all their ranks."""
    for axis in axes:
        tree = psum_invariant(tree, axis)
    return tree


# For each call that differentiates, which leaves are used.
Used = tuple[tuple[bool, ...], ...]


class Uses:
    """Which leaves one trace uses, in each of its calls that differentiate.

    Attributes:
        used: What this rank's losses used.
        axes: The axes of the calls.
    """

    def __init__(self, agreed: Used = ()) -> None:
        """Nothing is traced yet; `agreed` says what the traces of all ranks use, once they have asked each other."""
        self.used: Used = ()
        self.axes: tuple[Axis, ...] = ()
        self._agreed = agreed

    def take(self, used: list[bool], axes: Sequence[Axis]) -> list[bool]:
        """Note what the next call used on this rank, and return what some rank uses, as far as that is known."""
        agreed = self._agreed[len(self.used)] if self._agreed else used
        self.used, self.axes = (*self.used, tuple(used)), (*self.axes, *axes)
        return list(agreed)


def agreed_uses(uses: Uses) -> Used:
    """Ask all ranks which leaves their traces use.

    Args:
        uses: What this rank's trace does.

    Returns:
        What some rank uses, the same on every rank.
    """
    used = uses.used
    for axis in dict.fromkeys(axis for axis in uses.axes if axis.size > 1):
        rows = comm.everyone(used, [axis], comm.Verb.AGREE)
        used = tuple(tuple(map(any, zip(*calls, strict=True))) for calls in zip(*rows, strict=True))
    return used


def closed(
    value: torch.Tensor, used: dict[str, bool], axes: Sequence[Axis], shared: Sequence[Axis]
) -> tuple[torch.Tensor, dict[str, bool]]:
    """Sum a loss over ranks, and hear with it which leaves any of them used.

    Args:
        value: This rank's loss, outside of any graph.
        used: Whether this rank used a leaf, by its path.
        axes: The mesh axes that the loss is summed over.
        shared: These, and others whose ranks take part in the call.

    Returns:
        The sum, and for each leaf whether some rank used it.
    """
    asked = [axis for axis in shared if axis.size > 1]
    label = comm.Label(comm.Verb.OBJECTIVE)
    # Between processors where they can, or the host would wait for its accelerator; in the dtype of the loss, so
    # that both can travel in one buffer.
    device = torch.device("cpu") if all(map(comm.serves_host, asked)) else value.device
    if _compat.is_tracing():
        uses, facts = _compat.trace_notes().get("uses"), []
        used = used if uses is None else dict(zip(used, uses.take(list(used.values()), shared), strict=True))
        said = [f"{path} {'used' if yes else 'unused'}" for path, yes in used.items()]
        comm.ops.told(json.dumps({"leaves": "\n".join(said)}))
    else:
        # The host waits for no copy to the device: all that reads it follows on the same stream.
        facts = [torch.tensor([*used.values()], dtype=value.dtype, device="cpu").to(device, non_blocking=True)]
    for axis in asked:
        # The loss agrees over other axes.
        own = [value] if axis in axes else []
        messages = [[*own, *facts]] if device == value.device else [own, facts]
        sums = [tensor for message in messages for tensor in comm.all_reduce(message, axis, label)]
        value, facts = (sums[0], sums[1:]) if own else (value, sums)
    for fact in facts:
        used = {path: number > 0 for path, number in zip(used, fact.tolist(), strict=True)}
    return value, used


def denominator(count: Any, axes: Sequence[Axis], reduce: str) -> Any:
    """Compute the divisor of summed losses and gradients: 1, the number of ranks, or the sum of counts."""
    if reduce == "weighted":
        # In one dtype whatever a rank counts in, and a wide one; the count is no part of the graph.
        return total(count.detach().to(torch.float64), axes)
    return math.prod(axis.size for axis in axes) if reduce == "mean" else 1


def divided(value: torch.Tensor, divisor: Any) -> torch.Tensor:
    """Divide a sum by its denominator, in the sum's dtype; nothing is computed where that is the number one."""
    return value if isinstance(divisor, int) and divisor == 1 else (value / divisor).to(value.dtype)
