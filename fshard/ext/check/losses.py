"""Types of a loss: where it uses a value that agrees between ranks as one that varies, or the other way round."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

import fshard as fs
from fshard.ext._compat import find_forward, list_sources
from fshard.ext.check.report import StepProblem
from fshard.extend import Misfit, Typed, find_misfits, is_trained, transforms_active, variance_of, walk_graph

# Collectives whose result varies in type, though it agrees in value.
_UNTYPED = ("psum", "all_gather")


def find_mixed_types(function: Callable[[Any], Any], flat: Any, axes: Sequence[fs.Axis]) -> Iterator[StepProblem]:
    """Run a local loss in a trace, and follow it back to the parameters over each axis.

    Args:
        function: Maps parameters to the loss, to (sum, count), or to a pair of either with an aux.
        flat: The leaves of the parameters.
        axes: The axes that the loss is reduced over: it varies over these, and agrees over others.

    Yields:
        The mistakes, as the transposes of collectives have them.
    """
    if transforms_active():
        return
    leaves = []
    ends = {}
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        if isinstance(leaf, fs.Sharded) and is_trained(leaf):
            leaf = fs.Sharded(leaf.local.detach().requires_grad_(), leaf.spec)
            ends[torch.autograd.graph.get_gradient_edge(leaf.local).node] = path, leaf.spec
        leaves.append(leaf)
    with torch.enable_grad():
        loss = function(flat.unflatten(leaves))
    while isinstance(loss, tuple):
        loss = loss[0]
    if loss.grad_fn is None:
        return
    for axis in flat.axes:
        if axis.size > 1:
            varies = partial(_varies, ends=ends, axis=axis)
            start = Typed(loss.grad_fn, loss.output_nr, axis in axes)
            for misfit in find_misfits([start], ends, axis):
                if any(_is_opaque(user, axis) for user in misfit.users):
                    continue
                path, _ = ends.get(misfit.place.node, ("", None))
                kind, node, text = _describe(misfit, path, axis, varies)
                frames = find_forward(node).frames
                yield StepProblem(kind, axis.name, path, frames, f"{text}.")


def _varies(start: Any, ends: Mapping[Any, Any], axis: fs.Axis) -> bool:
    """Whether a value varies, as the leaves and the results of collectives say that it is computed from."""

    def settle(node: Any) -> bool | None:
        """Tell whether a leaf, or the result of a collective, varies; None of nodes that pass types on."""
        if node in ends:
            return ends[node][1].dim_of(axis) is not None
        variance = variance_of(node)
        return variance.result_varies(axis, 0) if axis in variance.axes else None

    return any(map(settle, walk_graph([start], lambda node: list_sources(node) if settle(node) is None else ())))


def _is_opaque(node: Any, axis: fs.Axis) -> bool:
    """Whether a node has a backward of its own, such as a pipeline, which may hide collectives over an axis."""
    return hasattr(node, "run_backward") and axis not in variance_of(node).axes


def _describe(misfit: Misfit, path: str, axis: fs.Axis, varies: Callable[[Any], bool]) -> tuple[str, Any, str]:
    """Name the mistake of a misfit, the node whose line is to be mended, and what to do."""
    place, settled_by, users = misfit
    name = variance_of(place.node).name
    relation = "agrees" if place.varies else "varies"
    subject = f"{path or name}, which {relation} between ranks,"
    if place.varies:
        is_loss = not any(axis in variance_of(user).axes for user in users)
        if name == "psum_invariant" and is_loss:
            text = "the loss of a rank was summed over ranks already; leave this sum out, or use fs.psum for its parts"
            return "doubled sum", place.node, text
        text = f'{subject} is used as one that varies; use fs.gather, or fs.pcast(x, axis, to="varying") before'
        return "missing cast", _find_meeting(misfit, varies), text
    if variance_of(settled_by).name == "pcast":
        text = f"{subject} is cast to one that varies; leave the cast out"
        return "superfluous cast", settled_by, text
    if name in _UNTYPED:
        kind = "missing sum" if any(map(varies, list_sources(place.node))) else "doubled sum"
        text = f"{subject} in its type is used as one that agrees; use fs.{name}_invariant"
        return kind, place.node, text
    text = f"{subject} is used as one that agrees; sum what is computed from it by fs.psum_invariant"
    return "missing sum", _find_meeting(misfit, varies), text


def _find_meeting(misfit: Misfit, varies: Callable[[Any], bool]) -> Any:
    """Find the first user of a value where it meets one of the type that is expected of it, or what expects it."""
    previous = misfit.place.node
    for user in misfit.users:
        others = [source for source in list_sources(user) if source is not previous]
        if misfit.place.varies in map(varies, others):
            return user
        previous = user
    return misfit.settled_by
