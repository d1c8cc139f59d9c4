"""Which values vary between ranks, as far as autograd's graph tells: mistakes with psum_invariant and pvary."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from fshard import _compat, comm
from fshard.collectives import maps_of, operands
from fshard.tree import Axis, Flat, is_sharded


def reduced_over(loss: torch.Tensor, axes: Sequence[Axis]) -> Axis | None:
    """Find an axis that a loss has been summed over already, by `objective` or `psum_invariant`.

    Args:
        loss: A scalar.
        axes: The axes that it will be summed over.

    Returns:
        The first such axis; None where there is none, or it was handed to this rank's own maths again by `pvary`.
    """
    nodes = [loss.grad_fn] if loss.grad_fn is not None else []
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        axis = _axis_of(node, "fun", "psum_invariant")
        if axis is not None and axis in axes:
            return axis
        if _axis_of(node, "transpose", "pvary") is None:
            new = set(_next(node)) - seen
            seen |= new
            nodes.extend(new)
    return None


def used_without_pvary(
    outputs: Sequence[torch.Tensor],
    leaves: Sequence[tuple[torch.Tensor, Iterable[Axis]]],
    sums: Callable[[Any], bool],
) -> list[bool]:
    """Find leaves that a graph comes to by a way that does not lead through `pvary` or a gather of its own.

    Args:
        outputs: Where the graph begins.
        leaves: Tensors that require a gradient, each with the axes between whose ranks it agrees.
        sums: Tells of a node whether it sums gradients by itself.

    Returns:
        For each leaf whether some way to it lacks a pvary, or a gather, over one of its axes.
    """
    ends = {
        torch.autograd.graph.get_gradient_edge(leaf).node: (i, frozenset(axes)) for i, (leaf, axes) in enumerate(leaves)
    }
    found = [False] * len(leaves)
    waiting = [(output.grad_fn, frozenset[Axis]()) for output in outputs if output.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node, varied = waiting.pop()
        if node in ends:
            i, needed = ends[node]
            found[i] = found[i] or not needed <= varied
            continue
        if sums(node):
            continue
        varied = varied | _summed_over(node)
        new = [(behind, varied) for behind in _next(node) if (behind, varied) not in seen]
        seen.update(new)
        waiting.extend(new)
    return found


def check_not_reduced(loss: torch.Tensor, axes: Sequence[Axis], what: str) -> None:
    """Refuse a local loss that ranks have summed already, whose gradients would be too small by their number."""
    axis = reduced_over(loss, [axis for axis in axes if axis.size > 1])
    if axis is not None:
        raise ValueError(
            f"{what}: expected the loss to be this rank's own, got one reduced over {axis.name!r} already, by "
            "fs.objective or fs.psum_invariant; return the loss of its batch, which is reduced for you, or sum "
            "parts of it by fs.psum"
        )


def check_agrees(value: torch.Tensor, flat: Flat, axes: Sequence[Axis], what: str) -> None:
    """Refuse an objective that differs between ranks of an axis over which leaves are split and nothing is reduced.

    Args:
        value: The objective.
        flat: The parameters.
        axes: The axes that it was reduced over.
        what: The verb that asks, for its error.

    Raises:
        ValueError: on every rank, with the values of all.
    """
    # By identity: leaves share their axes, which are slow to hash.
    placed = {id(axis): axis for leaf in flat.leaves if is_sharded(leaf) for axis in leaf.spec.axes}
    others = [axis for axis in dict.fromkeys(placed.values()) if axis.size > 1 and axis not in axes]
    if not others or _compat.is_transformed(value) or _compat.is_tracing():
        return
    for axis in others:
        (rows,) = comm.all_gather([value.detach()], axis, comm.Verb.AGREE)
        tolerance = torch.finfo(value.dtype).eps ** 0.5 * rows.abs().amax()
        if (rows - rows[0]).abs().amax() > tolerance:
            found = ", ".join(f"{number:.6g}" for number in rows.tolist())
            raise ValueError(
                f"{what}: expected a loss that agrees between ranks of {axis.name!r}, over which leaves stay split, "
                f"got {found}; sum partial results by fs.psum_invariant before they are used"
            )


def _next(node: Any) -> Iterator[Any]:
    return (behind for behind, _ in operands(node) if behind is not None)


def _summed_over(node: Any) -> frozenset[Axis]:
    """The axes over which a node's backward sums: that of a pvary, or those of a gather under torch.func."""
    if (axis := _axis_of(node, "transpose", "pvary")) is not None:
        return frozenset([axis])
    scatter = _partial(node, "transpose")
    if scatter is None or "specs" not in scatter.keywords:
        return frozenset()
    transform: Any = getattr(scatter.func, "__self__", None)
    return frozenset(transform.axes) if scatter.func == getattr(transform, "scatter", None) else frozenset()


def _axis_of(node: Any, side: str, label: str) -> Axis | None:
    """The axis of a collective in a graph, by the label of the map on one side of its linear call."""
    found = _partial(node, side)
    return found.keywords["axis"] if found is not None and found.keywords.get("label") == label else None


def _partial(node: Any, side: str) -> partial[Any] | None:
    """The map on one side of a linear call; None where a node is none, or its map was not made by `partial`."""
    found = getattr(maps_of(node), side, None)
    return found if isinstance(found, partial) else None
