"""Checks that read varying and agreeing values off the graph of a loss."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from fshard import _compat, comm
from fshard.collectives.linear import maps_of, operands
from fshard.errors import Problem, expect, refuse
from fshard.tree import Axis, Flat, Spec

Place = TypeVar("Place")


def refuse_unsummed(
    what: str,
    outputs: Sequence[torch.Tensor],
    leaves: Sequence[tuple[str, Spec, torch.Tensor]],
    sums: Callable[[Any], bool],
) -> None:
    """Refuse leaves that ranks hold whole and a loss reaches past `gather` and `pvary`, where gradients are summed.

    Args:
        what: The verb that runs, for the error.
        outputs: Where the graph of the loss begins.
        leaves: Path, spec and local tensor of each leaf that autograd found a gradient for.
        sums: Tells of a node whether it sums gradients by itself.

    Raises:
        ValueError: with the path of every leaf that some way reaches without a pvary, or a gather, over each such axis.
    """
    ends, needed = {}, {}
    for path, spec, tensor in leaves:
        axes = spec.transform.axes if spec.transform else ()
        agreeing = [axis for axis in axes if axis.size > 1 and spec.dim_of(axis) is None]
        if agreeing:
            ends[torch.autograd.graph.get_gradient_edge(tensor).node], needed[path] = path, agreeing
    if not ends:
        return

    def behind(place: tuple[Any, frozenset[Axis]]) -> list[tuple[Any, frozenset[Axis]]]:
        node, varied = place
        if node in ends or sums(node):
            return []
        varied = varied.union(_summed_over(node))
        return [(other, varied) for other in _next(node)]

    starts = [(output.grad_fn, frozenset[Axis]()) for output in outputs if output.grad_fn is not None]
    reached = ((ends[node], varied) for node, varied in walked(starts, behind) if node in ends)
    wrong = {path for path, varied in reached if not varied.issuperset(needed[path])}
    problems = [
        Problem(
            path, f"maths on a leaf that ranks of {[axis.name for axis in axes]} hold as one value", "gather or pvary"
        )
        for path, axes in needed.items()
        if path in wrong
    ]
    remedy = "gather these leaves, or hand them to each rank's own maths by fs.pvary, so that gradients are summed"
    refuse(f"{what}: gradients would stay unsummed", problems, remedy)


def walked(starts: Iterable[Place], behind: Callable[[Place], Iterable[Place]]) -> Iterator[Place]:
    """Walk through a graph, to each place once.

    Args:
        starts: Where to begin.
        behind: Lists the places that come right behind one; called after that one was yielded.

    Yields:
        The places, in no particular order.
    """
    waiting = list(starts)
    seen = set(waiting)
    while waiting:
        place = waiting.pop()
        yield place
        new = dict.fromkeys(other for other in behind(place) if other not in seen)
        seen.update(new)
        waiting.extend(new)


def check_not_reduced(loss: torch.Tensor, axes: Sequence[Axis], what: str) -> None:
    """Refuse a local loss that ranks have summed already, whose gradients would be too small by their number.

    Behind a `pvary` the sum was handed to this rank's own maths again.
    """
    starts = [] if loss.grad_fn is None else [loss.grad_fn]
    nodes = walked(starts, lambda node: _next(node) if _axis_of(node, "transpose", "pvary") is None else ())
    for axis in (_axis_of(node, "fun", "psum_invariant") for node in nodes):
        found = f"one reduced over {axis.name!r} already, by fs.objective or fs.psum_invariant" if axis else ""
        remedy = "return the loss of its batch, which is reduced for you, or sum parts of it by fs.psum"
        expect(
            axis is None or axis.size == 1 or axis not in axes, what, "the loss to be this rank's own", found, remedy
        )


def check_agrees(value: torch.Tensor, flat: Flat, axes: Sequence[Axis], what: str) -> None:
    """Refuse an objective that differs between ranks of an axis that leaves are placed on and nothing is reduced over.

    Args:
        value: The objective.
        flat: The parameters.
        axes: The axes that it was reduced over.
        what: The verb that asks, for its error.

    Raises:
        ValueError: on every rank, with the values of all.
    """
    placed = dict.fromkeys(axis for spec in flat.specs for axis in spec.axes)
    others = [axis for axis in placed if axis.size > 1 and axis not in axes]
    if not others or _compat.is_transformed(value) or _compat.is_tracing():
        return
    for axis in others:
        (rows,) = comm.all_gather([value.detach()], axis, comm.Verb.AGREE)
        tolerance = torch.finfo(value.dtype).eps ** 0.5 * rows.abs().amax()
        if (rows - rows[0]).abs().amax() > tolerance:
            found = ", ".join(f"{number:.6g}" for number in rows.tolist())
            raise ValueError(
                f"{what}: expected a loss that agrees between ranks of {axis.name!r}, over which it is not reduced, "
                f"got {found}; sum partial results by fs.psum_invariant before they are used, or name the axis in "
                "reduce_over if its ranks have batches of their own"
            )


def _next(node: Any) -> Iterator[Any]:
    return (behind for behind, _ in operands(node) if behind is not None)


def _summed_over(node: Any) -> Sequence[Axis]:
    """The axes over which a node's backward sums: that of a pvary, or those of a gather under torch.func."""
    axis = _axis_of(node, "transpose", "pvary")
    return _keywords(node, "transpose").get("summed_over", ()) if axis is None else (axis,)


def _axis_of(node: Any, side: str, label: str) -> Axis | None:
    """The axis of a collective in a graph, by the label of the map on one side of its linear call."""
    keywords = _keywords(node, side)
    return keywords["axis"] if keywords.get("label") == label else None


def _keywords(node: Any, side: str) -> dict[str, Any]:
    """The keywords of the map on one side of a linear call; none where a node has no such map."""
    return getattr(getattr(maps_of(node), side, None), "keywords", {})
