"""Checks that read varying and agreeing values off the graph of a loss."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch

from fshard import _compat, comm
from fshard.collectives.derived import numbered_inputs, sums_input
from fshard.collectives.linear import is_tie, variance_of
from fshard.errors import Problem, refuse
from fshard.rounding import half_the_digits
from fshard.tree import Axis, Spec

T = TypeVar("T")

# Better advice than what follows from the types of a collective.
ADVICE = MappingProxyType(
    {
        "psum": "use fs.psum_invariant, whose sum agrees",
        "all_gather": "use fs.all_gather_invariant, whose result agrees",
        "fs.gather": "use leaf.local of a leaf that ranks hold whole, or fs.psum_invariant of equal parts",
    }
)
# Collectives whose results agree between ranks, and what a loss of each rank is to use instead.
AGREEING: Mapping[str, str] = MappingProxyType(
    {
        "psum_invariant": "Return the loss of this rank's batch; it is reduced for you. To sum parts use fs.psum. Pass "
        'a term that is summed, as by fs.global_norm or a value_and_grad, to fs.pcast(x, axis, to="varying").',
        "all_gather_invariant": "Use fs.all_gather.",
        "broadcast": 'Use fs.pcast(x, axis, to="varying") on it before each rank computes with it.',
    }
)
# By whether a value varies.
KINDS = ("agrees", "varies")


class Typed(NamedTuple):
    """An output of a node of autograd's graph, and whether its users expect it to vary."""

    node: Any
    output: int
    varies: bool


class Misfit(NamedTuple):
    """A leaf, or a result of a collective, that is used as if it varied, or as if it agreed, and does not.

    Attributes:
        place: Where it is in the graph, and whether its users expect it to vary.
        settled_by: The node that settles what is expected: where the graph begins, or a collective.
        users: The nodes from the one that uses it to the beginning of the graph.
    """

    place: Typed
    settled_by: Any
    users: list[Any]


def find_misfits(starts: Iterable[Typed], leaves: Mapping[Any, tuple[str, Spec]], axis: Axis) -> Iterator[Misfit]:
    """Follow values back to leaves, and find each step that mixes values that vary over an axis and that agree.

    Args:
        starts: The values.
        leaves: Path and spec of each leaf, by the node where its gradient arrives.
        axis: The axis.

    Yields:
        Each leaf, and each result of a collective, that is used as what it is not.
    """
    first_places = list(starts)
    settled_by = {start: start.node for start in first_places}
    used_by = {}

    def behind(place: Typed) -> list[Typed]:
        if place.node in leaves:
            return []
        inputs = _inputs(place, axis)
        is_collective = axis in variance_of(place.node).axes
        for each in inputs:
            is_settled_here = is_collective or each.varies is not place.varies
            if each not in settled_by:
                settled_by[each] = place.node if is_settled_here else settled_by[place]
                used_by[each] = place
        return inputs

    for place in walk_graph(first_places, behind):
        variance = variance_of(place.node)
        if place.node in leaves:
            varies = leaves[place.node][1].dim_of(axis) is not None
        elif axis in variance.axes:
            varies = variance.result_varies(axis, place.output)
        else:
            continue
        if varies is not place.varies:
            users = []
            user = used_by.get(place)
            while user is not None:
                users.append(user.node)
                user = used_by.get(user)
            yield Misfit(place, settled_by[place], users)


def _describe_misfit(misfit: Misfit, leaves: Mapping[Any, tuple[str, Spec]], axis: Axis) -> Problem:
    """Describe a leaf, or a result of a collective, that is used as what it is not."""
    place = misfit.place
    cast = "fs.pcast first" if place.varies else "fs.psum_invariant"
    if place.node in leaves:
        path, _ = leaves[place.node]
        remedy = f"apply fs.gather or {cast}" if place.varies else f"apply {cast}"
        got = f"a leaf that is {'replicated' if place.varies else 'split'} over {axis.name!r}"
    else:
        path = "a leaf that the function computes"
        name = variance_of(place.node).name
        remedy = ADVICE.get(name, f"apply {cast}" if place.varies else f"apply {cast} to a value computed from it")
        got = f"{name} over {axis.name!r}, whose result {KINDS[not place.varies]}"
    return Problem(path, got, f"a value that {KINDS[place.varies]} between ranks ({remedy})")


def _inputs(place: Typed, axis: Axis) -> list[Typed]:
    """List the values that a value was computed from, as its node takes them."""
    node = place.node
    variance = variance_of(node)
    communicates = axis in variance.axes
    takes_leaves = not (isinstance(variance.operand, bool) and isinstance(variance.result, bool))
    # Of a gather, its transpose, and of what ties a collective to others, output i comes from input i.
    is_one_to_one = takes_leaves or is_tie(node)
    inputs = []
    for number, (other, output) in enumerate(node.next_functions):
        if other is None or (is_one_to_one and number != place.output):
            continue
        varies = variance.operand_varies(axis, number) if communicates else place.varies
        if sums_input(node, number, axis):
            varies = False
        inputs.append(Typed(other, output, varies))
    return inputs


# Path, spec and local tensor.
Leaf = tuple[str, Spec, torch.Tensor]
Leaves = Sequence[Leaf]


def refuse_wrong_sums(api_name: str, loss: torch.Tensor, leaves: Leaves) -> None:
    """Refuse a loss in whose graph gradients of leaves would not be summed over ranks as they should.

    Args:
        api_name: The verb that runs, for the error.
        loss: The loss, in the graph of autograd or of the innermost torch.func transform.
        leaves: Path, spec and local tensor of each leaf; those that are no part of this graph are passed over.

    Raises:
        ValueError: as `refuse_unsummed` and `refuse_mixed` do.
    """
    # Those that take a gradient which is summed over ranks.
    in_graph = [leaf for leaf in leaves if leaf[2].requires_grad and any(axis.size > 1 for axis in leaf[1].axes)]
    if loss.grad_fn is None or not in_graph:
        return
    refuse_unsummed(api_name, [loss], in_graph)
    # What made a leaf that the caller computed is checked as that of any other.
    first_leaves = [leaf for leaf in in_graph if leaf[2].grad_fn is None]
    ends = {node for *_, node in _with_nodes(first_leaves)}
    derived = []
    for node in walk_graph([loss.grad_fn], _nodes_behind):
        operand = variance_of(node).operand
        if isinstance(operand, bool):
            continue
        # The engine runs a separate backward behind its gathers, and checks that part there.
        for spec, place in zip(operand, node.next_functions, strict=False):
            if place[0] is not None and place[0] not in ends:
                derived.append((spec, place))
    refuse_mixed(api_name, derived, first_leaves)


def _nodes_behind(node: Any) -> list[Any]:
    return [other for _, (other, _) in numbered_inputs(node)]


def _with_nodes(leaves: Leaves) -> list[tuple[str, Spec, Any]]:
    """List path and spec of leaves with the node where the gradient of each arrives."""
    return [(path, spec, torch.autograd.graph.get_gradient_edge(tensor).node) for path, spec, tensor in leaves]


def refuse_mixed(api_name: str, derived: Sequence[tuple[Spec, tuple[Any, int]]], leaves: Leaves) -> None:
    """Refuse leaves that a function computes by mixing values that vary and values that agree.

    Args:
        api_name: The verb that runs, for the error.
        derived: The spec of each leaf that the function computed, with the node that made it and the node's output.
        leaves: Path, spec and local tensor of each leaf of the caller's.

    Raises:
        ValueError: with every leaf, and every result of a collective, that is used as what it is not.
    """
    starts_over: dict[Axis, list[Typed]] = {}
    for spec, (node, output) in derived:
        for axis in spec.scattered_axes:
            if axis.size > 1:
                is_split = spec.dim_of(axis) is not None
                starts_over.setdefault(axis, []).append(Typed(node, output, varies=is_split))
    if not starts_over:
        # Finding the node of a leaf takes microseconds, and most functions compute no leaves.
        return
    ends = {node: (path, spec) for path, spec, node in _with_nodes(leaves)}
    problems = []
    for axis, starts in starts_over.items():
        problems += [_describe_misfit(misfit, ends, axis) for misfit in find_misfits(starts, ends, axis)]
    remedy = "read the docstrings of psum_invariant and pcast. fs.check shows the lines of your program"
    refuse(f"{api_name}: gradients of leaves that the function computes would be wrong", problems, remedy)


def refuse_unsummed(api_name: str, outputs: Sequence[torch.Tensor], leaves: Leaves) -> None:
    """Refuse leaves that ranks hold whole and a loss reaches past `gather` and `pcast`, where gradients are summed.

    Args:
        api_name: The verb that runs, for the error.
        outputs: Where the graph of the loss begins.
        leaves: Path, spec and local tensor of each leaf that autograd found a gradient for.

    Raises:
        ValueError: with the path of every leaf that some way reaches without a pcast, or a gather, over each such axis.
    """
    whole: dict[Axis, list[tuple[str, Any]]] = {}
    for path, spec, node in _with_nodes(leaves):
        for axis in spec.transform.axes if spec.transform else ():
            if axis.size > 1 and spec.dim_of(axis) is None:
                whole.setdefault(axis, []).append((path, node))
    problems = []
    for axis, ends in whole.items():
        reached = set(_reach(outputs, axis))
        got = f"math on a leaf that is replicated over {axis.name!r}"
        for path, node in ends:
            if node in reached:
                problems.append(Problem(path, got, "gather or pcast"))
    remedy = "use fs.gather, or fs.pcast before math on each rank"
    refuse(f"{api_name}: gradients of these leaves would not be summed", problems, remedy)


def _reach(outputs: Sequence[torch.Tensor], axis: Axis) -> Iterator[Any]:
    """Walk through the graph of outputs, no further than nodes whose backward sums over an axis."""

    def behind(node: Any) -> Sequence[Any]:
        variance = variance_of(node)
        # A gather sums the gradients of leaves that are whole, and scatters those of leaves that are split.
        from_agreeing = not isinstance(variance.operand, bool) or not variance.operand
        if axis in variance.axes and variance.result is True and from_agreeing:
            return ()
        return _nodes_behind(node)

    return walk_graph({output.grad_fn for output in outputs if output.grad_fn is not None}, behind)


def walk_graph(starts: Iterable[T], behind: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """Walk through a graph, to each place once.

    Args:
        starts: Where to begin.
        behind: Lists the places that come right behind one; called after that one was yielded.

    Yields:
        The places, the nearest first.
    """
    places = list(starts)
    seen = set(places)
    # The list grows while it is walked along.
    for place in places:
        yield place
        for other in behind(place):
            if other not in seen:
                seen.add(other)
                places.append(other)


def collectives_of(loss: torch.Tensor, axis: Axis) -> set[str]:
    """Name the collectives over an axis that a loss depends on."""
    variances = map(variance_of, _reach([loss], axis))
    return {variance.name for variance in variances if axis in variance.axes}


def check_not_reduced(loss: torch.Tensor, axes: Sequence[Axis], api_name: str) -> None:
    """Refuse a local loss that agrees between ranks, or has a part that does: its gradients would be too small.

    A result that a `pcast` has cast is used for math on each rank again, and is not meant.
    """
    for axis in axes:
        if axis.size == 1:
            continue
        names = collectives_of(loss, axis)
        for name, remedy in AGREEING.items():
            if name in names:
                raise ValueError(
                    f"{api_name}: the loss uses the result of fs.{name} over {axis.name!r}, which agrees between "
                    f"ranks, so gradients would be too small. {remedy}"
                )


def check_agrees(value: torch.Tensor, axis: Axis, api_name: str, *, is_common: bool) -> None:
    """Refuse an objective that differs between ranks of an axis that it should have been reduced over.

    Args:
        value: The objective.
        axis: One of several ranks that leaves are placed on, or the function communicates over, and nothing is reduced
            over.
        api_name: The verb that asks, for its error.
        is_common: Whether this rank computes its loss with the others. If one does not, nothing is refused.

    Raises:
        ValueError: on every rank, with the values of all.
    """
    if _compat.is_transformed(value) or _compat.is_tracing():
        # Its value is not known.
        return
    # NaN agrees with any loss.
    (rows,) = comm.all_gather([value.detach() * (1 if is_common else torch.nan)], axis, comm.Verb.AGREE)
    tolerance = half_the_digits(value.dtype) * rows.abs().amax()
    if (rows - rows[0]).abs().amax() > tolerance:
        raise ValueError(
            f"{api_name}: the loss differs between ranks of {axis.name!r} ({rows.tolist()}), and it is not reduced "
            "over that axis. Sum partial results with fs.psum_invariant, or add the axis to reduce_over if its "
            "ranks have different batches."
        )
