"""Checks that read varying and agreeing values off the graph of a loss."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from fshard import _compat, comm
from fshard.collectives.linear import variance_of
from fshard.errors import Problem, expect, refuse
from fshard.rounding import half_the_digits
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
    whole: dict[Axis, list[tuple[str, Any]]] = {}
    for path, spec, tensor in leaves:
        for axis in spec.transform.axes if spec.transform else ():
            if axis.size > 1 and spec.dim_of(axis) is None:
                node = torch.autograd.graph.get_gradient_edge(tensor).node
                whole.setdefault(axis, []).append((path, node))
    problems = []
    for axis, ends in whole.items():
        found = set(_reached(outputs, axis, sums))
        got = f"maths on a leaf that ranks of {axis.name!r} hold whole"
        problems += [Problem(path, got, "gather or pvary") for path, node in ends if node in found]
    remedy = "gather these leaves, or hand them to each rank's own maths by fs.pvary, so that gradients are summed"
    refuse(f"{what}: gradients would stay unsummed", problems, remedy)


def _reached(outputs: Sequence[torch.Tensor], axis: Axis, sums: Callable[[Any], bool]) -> Iterator[Any]:
    """Walk through the graph of outputs, no further than nodes whose backward sums over an axis."""

    def behind(node: Any) -> Sequence[Any]:
        found = variance_of(node)
        summed = axis in found.axes and found.result and not found.operand
        if summed or sums(node):
            return ()
        # The last edge of a tie is its token.
        edges = node.next_functions[:-1] if hasattr(node, "passed") else node.next_functions
        return [other for other, _ in edges if other is not None]

    return walked({output.grad_fn for output in outputs if output.grad_fn is not None}, behind)


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
    for axis in axes:
        found = map(variance_of, _reached([loss], axis, lambda node: False))
        reduced = any(one.name == "psum_invariant" and axis in one.axes for one in found)
        got = f"one reduced over {axis.name!r} already, by fs.objective or fs.psum_invariant"
        remedy = "return the loss of its batch, which is reduced for you, or sum parts of it by fs.psum"
        expect(axis.size == 1 or not reduced, what, "the loss to be this rank's own", got, remedy)


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
    known = not _compat.is_transformed(value) and not _compat.is_tracing()
    for axis in flat.axes if known else ():
        if axis.size == 1 or axis in axes:
            continue
        (rows,) = comm.all_gather([value.detach()], axis, comm.Verb.AGREE)
        tolerance = half_the_digits(value.dtype) * rows.abs().amax()
        needed = f"a loss that agrees between ranks of {axis.name!r}, over which it is not reduced"
        remedy = (
            "sum partial results by fs.psum_invariant, or name the axis in reduce_over if its ranks have own batches"
        )
        # NaN agrees with any loss.
        expect(not (rows - rows[0]).abs().amax() > tolerance, what, needed, f"{rows.tolist()}", remedy)
