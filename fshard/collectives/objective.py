"""The objective, a sum of losses over ranks: its axes, its denominator, and what ranks tell each other with it."""

import json
import math
from collections.abc import Sequence
from typing import Any

import torch

from fshard import _compat, comm
from fshard.collectives.sums import psum_invariant
from fshard.errors import expect
from fshard.tree import Axis, Flat, Tree, flatten, is_sharded, is_trained
from fshard.tree.checks import (
    check_axes,
    check_leaves,
    check_loss,
    check_reduce,
    check_tensors,
    check_transforms,
    describe,
)

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
    first = next(path for path, leaf in zip(flat.paths, flat.leaves, strict=True) if is_sharded(leaf))

    def plain(leaf: Any) -> tuple[str, str] | None:
        return None if is_sharded(leaf) or leaf is None else (describe(leaf), f"a Sharded leaf, as {first} is")

    remedy = "shard the whole tree (fs.ddp keeps leaves whole), or keep other leaves out of the parameters"
    check_leaves(f"{what}: plain leaves among Sharded ones", flat, plain, remedy)
    if over is not None:
        return _named(over, flat, what)
    needed, *others = [spec.transform.axes for spec in flat.specs if spec.transform is not None]
    names = [axis.name for axis in needed]

    def differs(leaf: Any) -> tuple[str, str] | None:
        axes = leaf.spec.transform.axes if is_sharded(leaf) else needed
        pair = f"axes {[axis.name for axis in axes]}", f"{names} of one mesh, as for {first}"
        return None if set(axes) == set(needed) else pair

    if any(set(axes) != set(needed) for axes in others):
        check_leaves(f"{what}: leaves are reduced over different axes", flat, differs, "shard the tree on one mesh")
    return needed


def _named(over: Over, flat: Flat, what: str) -> tuple[Axis, ...]:
    """The axes that a caller names, each of which every leaf must account for."""
    known: dict[Any, Axis] = {axis.name: axis for spec in flat.specs for axis in spec.roles}
    given: Any = [over] if isinstance(over, Axis | str) else over
    axes = tuple(dict.fromkeys(known.get(one, one) for one in given))

    def unfit(leaf: Any) -> tuple[str, str] | None:
        missing = [getattr(axis, "name", axis) for axis in axes if is_trained(leaf) and axis not in leaf.spec.roles]
        if not missing:
            return None
        roles = ", ".join(f"{role} over {axis.name!r}" for axis, role in leaf.spec.roles.items()) or "no roles"
        return roles, f"a transform that sums gradients over {missing}, or owns pieces there"

    remedy = "shard these leaves on all axes of reduce_over, such as by zero3(mesh, axis=(...)), or name fewer axes"
    check_leaves(f"{what}: gradients would stay unsummed", flat, unfit, remedy)
    return axes


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
        ValueError: if `reduce` is another word, `loss` is not what it asks for, or a leaf of `like` is no tensor.

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
        axes: The axes of each call.
    """

    def __init__(self, agreed: Used = ()) -> None:
        """Nothing is traced yet; `agreed` says what the traces of all ranks use, once they have asked each other."""
        self.used: Used = ()
        self.axes: list[Sequence[Axis]] = []
        self._agreed = agreed

    def take(self, used: list[bool], axes: Sequence[Axis]) -> list[bool]:
        """Note what the next call used on this rank, and return what some rank uses, as far as that is known."""
        agreed = self._agreed[len(self.used)] if self._agreed else used
        self.used, self.axes = (*self.used, tuple(used)), [*self.axes, axes]
        return list(agreed)


def agreed_uses(uses: Uses) -> Used:
    """Ask all ranks which leaves their traces use.

    Args:
        uses: What this rank's trace does.

    Returns:
        What some rank uses, the same on every rank.
    """
    used = uses.used
    for axis in dict.fromkeys(axis for axes in uses.axes for axis in axes if axis.size > 1):
        rows = comm.everyone(used, [axis], comm.Verb.AGREE)
        if len({tuple(map(len, row)) for row in rows}) > 1:
            found = ", ".join(str([len(call) for call in row]) for row in rows)
            raise ValueError(
                f"jit: ranks of {axis.name!r} differentiate losses of several numbers of leaves: expected the same "
                f"numbers, got {found}; make the same calls of value_and_grad on every rank"
            )
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
    if _compat.is_tracing():
        uses = _compat.trace_notes().get("uses")
        used = used if uses is None else dict(zip(used, uses.take(list(used.values()), shared), strict=True))
        said = [f"{path} {'used' if yes else 'unused'}" for path, yes in used.items()]
        comm.ops.told(json.dumps({"leaves": "\n".join(said)}))
        for axis in asked:
            (value,) = comm.all_reduce([value], axis, label) if axis in axes else [value]
        return value, used
    # Between processors where they can, or the host would wait for its accelerator; in the dtype of the loss, so
    # that both can travel in one buffer.
    device = torch.device("cpu") if all(map(comm.serves_host, asked)) else value.device
    facts = torch.tensor(list(used.values()), dtype=value.dtype, device=device)
    for axis in asked:
        if axis in axes and device == value.device:
            value, facts = comm.all_reduce([value, facts], axis, label)
        else:
            # The loss agrees over other axes.
            (value,) = comm.all_reduce([value], axis, label) if axis in axes else [value]
            (facts,) = comm.all_reduce([facts], axis, label)
    return value, {path: number > 0 for path, number in zip(used, facts.tolist(), strict=True)} if asked else used


def denominator(count: Any, axes: Sequence[Axis], reduce: str) -> Any:
    """Compute the divisor of summed losses and gradients: 1, the number of ranks, or the sum of counts."""
    if reduce == "weighted":
        # In one dtype whatever a rank counts in, and a wide one; the count is no part of the graph.
        return total(count.detach().to(torch.float64), axes)
    return math.prod(axis.size for axis in axes) if reduce == "mean" else 1


def divided(value: torch.Tensor, divisor: Any) -> torch.Tensor:
    """Divide a sum by its denominator, in the sum's dtype; nothing is computed where that is the number one."""
    return value if isinstance(divisor, int) and divisor == 1 else (value / divisor).to(value.dtype)
