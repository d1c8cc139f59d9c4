"""Leaves computed inside a function: the sums that their gradients need where ranks hold them whole.

A rank that holds a leaf whole may compute a new leaf from it and from gathered tensors: weight normalisation divides
the stored tensor by the norm of the gathered one. By the types of jax.shard_map the stored tensor agrees between ranks,
the gathered one varies (each rank has its own part of its gradient), and so does whatever is computed from both. JAX
inserts a `pcast` where a value that agrees meets one that varies. So does `settle`, in a graph that autograd has
recorded already: a hook on the node where the two meet sums the gradient of the value that agrees.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from fshard import _compat, comm
from fshard.collectives.linear import LOCATED, Linear, Tensors, Variance, is_tie, linear_call, variance_of
from fshard.tree import Axis, Spec

# Entries in the metadata of a node of autograd's graph. The first tells for an axis whether the value that the node
# made varies over it. The second lists for an axis the inputs whose gradients a hook of the node sums.
VARIES = "fshard varies"
SUMMED = "fshard summed"

# A node of autograd's graph, and the number of one of its outputs.
Place = tuple[Any, int]


def settle(path: str, tensor: torch.Tensor, spec: Spec) -> torch.Tensor:
    """Prepare a leaf for a gather, so that its gradient reaches what it was computed from, and is counted once.

    The gather sums the gradient of a leaf that ranks hold whole, so that all ranks have the same. Gathered tensors that
    the leaf was computed from sum their gradients too, and would count it once for each rank. So each rank goes on with
    an equal part of the gradient, and where the leaf was computed from values that agree between ranks, a hook sums the
    parts of all ranks.

    Args:
        path: The leaf's path, for the collectives of hooks.
        tensor: Its local tensor.
        spec: Its spec.

    Returns:
        The tensor, or a view of it if it was computed from gathered tensors.
    """
    if not _compat.is_differentiated(tensor):
        return tensor
    for axis in spec.scattered_axes:
        # `check_varying` looks at axes of one rank too, so that it finds on one rank what would be wrong on several.
        if (axis.size > 1 or LOCATED.get()) and spec.dim_of(axis) is None:
            tensor = _settle_over(axis, path, tensor)
    return tensor


def _settle_over(axis: Axis, path: str, tensor: torch.Tensor) -> torch.Tensor:
    if not any(_varies(place, axis) for place in _places(tensor)):
        return tensor
    (agreeing,) = linear_call(_map_to_agreeing(axis), [tensor])
    # Each torch.func transform has a graph of its own.
    for node, _ in _places(agreeing):
        (place,) = node.next_functions
        if _varies(place, axis):
            _sum_where_kinds_meet(place, axis, path)
        else:
            node.metadata.setdefault(SUMMED, {})[axis] = [0]
            node.register_hook(partial(_sum_gradients, [0], axis, path))
    return agreeing


def _places(tensor: torch.Tensor) -> list[Place]:
    """Find what made a tensor, in autograd's graph and in that of each torch.func transform."""
    return [(level.grad_fn, level.output_nr) for level in _compat.levels(tensor) if level.grad_fn is not None]


def _map_to_agreeing(axis: Axis) -> Linear:
    """Make the map from values that ranks computed alike to one that agrees, which is each of them.

    Its transpose gives each rank an equal part of a gradient. What a second derivative brings back for the parts is
    alike again, as the values are for all parameters.
    """

    def divide(tensors: Tensors) -> Tensors:
        return [tensor / axis.size for tensor in tensors]

    variance = Variance("fs.gather of a derived leaf", (axis,), operand=True, result=False)
    return Linear(list, divide, variance)


def _known_kind(place: Place, axis: Axis) -> bool | None:
    """Look up whether a value varies over an axis; None where that follows from what it was computed from."""
    node, output = place
    variance = variance_of(node)
    if axis in variance.axes:
        return variance.result_varies(axis, output)
    kind: bool | None = node.metadata.get(VARIES, {}).get(axis)
    return kind


def _note_kind(node: Any, axis: Axis, varies: bool) -> None:
    node.metadata.setdefault(VARIES, {})[axis] = varies


def _varies(place: Place, axis: Axis) -> bool:
    """Find out whether a leaf that ranks hold whole was computed from values that vary over an axis.

    Other leaves that it was computed from are whole too, and agree. This is noted, as later walks need it, and go no
    further back.
    """
    known = _known_kind(place, axis)
    if known is not None:
        return known
    kinds = _find_kinds(place, axis, leaves_vary=False)
    for node in kinds:
        if not numbered_inputs(node):
            _note_kind(node, axis, varies=False)
    node, _ = place
    _note_kind(node, axis, kinds[node])
    return kinds[node]


def _find_kinds(start: Place, axis: Axis, *, leaves_vary: bool) -> dict[Any, bool]:
    """Find out which nodes make values that vary over an axis: those that use such a value.

    Args:
        start: A value.
        axis: The axis.
        leaves_vary: Whether tensors that no node made vary, unless it is known of them.

    Returns:
        The kind of each node that the value was computed by, up to values whose kinds are known.
    """
    kinds: dict[Any, bool] = {}
    first, _ = start
    waiting = [] if axis in variance_of(first).axes else [first]
    while waiting:
        node = waiting[-1]
        inputs = [place for _, place in numbered_inputs(node)]
        unknown = _nodes_of_unknown_kind(inputs, axis, kinds)
        if unknown:
            waiting += unknown
            continue
        kinds[node] = any(_kind_of(place, axis, kinds) for place in inputs) if inputs else leaves_vary
        waiting.pop()
    return kinds


def _nodes_of_unknown_kind(places: Sequence[Place], axis: Axis, kinds: dict[Any, bool]) -> list[Any]:
    nodes = []
    for place in places:
        node, _ = place
        if node not in kinds and _known_kind(place, axis) is None:
            nodes.append(node)
    return nodes


def _kind_of(place: Place, axis: Axis, kinds: dict[Any, bool]) -> bool:
    known = _known_kind(place, axis)
    node, _ = place
    return kinds[node] if known is None else known


def numbered_inputs(node: Any) -> list[tuple[int, Place]]:
    """List what made the inputs of a node, by their numbers, but for the token that ties a collective to others."""
    edges = node.next_functions[:-1] if is_tie(node) else node.next_functions
    return [(number, place) for number, place in enumerate(edges) if place[0] is not None]


def sums_input(node: Any, number: int, axis: Axis) -> bool:
    """Tell whether a hook of a node sums the gradient of an input over an axis.

    Args:
        node: A node of autograd's graph.
        number: The number of the input.
        axis: The axis.
    """
    return number in node.metadata.get(SUMMED, {}).get(axis, ())


def _sum_where_kinds_meet(place: Place, axis: Axis, path: str) -> None:
    """Sum gradients over an axis where a value that varies was computed from values that agree.

    Args:
        place: The value that varies.
        axis: The axis.
        path: The path of the derived leaf.
    """
    # Leaves that agree are known by now.
    kinds = _find_kinds(place, axis, leaves_vary=True)
    for node, varies in kinds.items():
        if not varies:
            continue
        summed = node.metadata.setdefault(SUMMED, {})
        if axis not in summed:
            inputs = numbered_inputs(node)
            summed[axis] = [number for number, place in inputs if not _kind_of(place, axis, kinds)]
            node.register_hook(partial(_sum_gradients, summed[axis], axis, path))


def _sum_gradients(numbers: Sequence[int], axis: Axis, path: str, gradients: Sequence[Any], _: Any) -> Sequence[Any]:
    """Replace gradients of inputs that agree by their sums over ranks, when a node whose value varies has run."""
    for gradient in gradients:
        if gradient is not None:
            _settle_gradient(gradient, axis, path)
    chosen = [number for number in numbers if gradients[number] is not None]
    with comm.annotate_collectives((), [path]):
        sums = linear_call(_map_to_sum(axis), [gradients[number] for number in chosen])
    replaced = list(gradients)
    for number, total in zip(chosen, sums, strict=True):
        replaced[number] = total
    return tuple(replaced)


def _map_to_sum(axis: Axis) -> Linear:
    """Make the map from each rank's part of a gradient to their sum, which agrees."""
    run = partial(comm.all_reduce, axis=axis, label="pcast")
    return Linear(run, list, Variance("psum_invariant", (axis,), operand=True, result=False))


def _settle_gradient(gradient: torch.Tensor, axis: Axis, path: str) -> None:
    """Prepare the graph of a gradient for second derivatives, as `settle` does with the graph of a leaf.

    The gradient is each rank's own part, and formulas of derivatives compute it from values that agree, too.
    """
    for place in _places(gradient):
        node, output = place
        varies = _known_kind(place, axis)
        if varies is None:
            varies = _find_kinds(place, axis, leaves_vary=True)[node]
        if varies:
            _sum_where_kinds_meet(place, axis, path)
        else:
            # Whatever uses the gradient takes it as one that varies.
            _note_kind(node, axis, varies=True)
            node.register_prehook(partial(_sum_arriving, output, axis, path))


def _sum_arriving(number: int, axis: Axis, path: str, gradients: Sequence[Any]) -> Sequence[Any]:
    """Replace the gradient that arrives for an output of a node by its sum over ranks."""
    if gradients[number] is None:
        return gradients
    _settle_gradient(gradients[number], axis, path)
    with comm.annotate_collectives((), [path]):
        (total,) = linear_call(_map_to_sum(axis), [gradients[number]])
    replaced = list(gradients)
    replaced[number] = total
    return tuple(replaced)
