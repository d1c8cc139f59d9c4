"""Leaves computed inside a function: the sums that their gradients need if ranks hold them whole.

A rank that holds a leaf whole may compute a new leaf from it and from gathered tensors: weight normalisation divides
the stored tensor by the norm of the gathered one. By the types of jax.shard_map the stored tensor agrees between ranks,
the gathered one varies (each rank has its own part of its gradient), and so does whatever is computed from both. JAX
inserts a `pcast` where a value that agrees meets one that varies. So does `make_derived_leaf_agree`, in a graph that
autograd has recorded already: a hook on the node where the two meet sums the gradient of the value that agrees.

An example, on two ranks. Each holds `w` whole, and `v` is a leaf that is split between them:

    norm = fs.gather(v).norm()
    leaf = w / norm
    full = fs.gather(leaf)

    w, agrees  ------------------------+
                                       +-- Div, varies -- _map_to_agreeing -- gather of leaf
    v -- gather of v, varies -- Norm --+

The cotangent `t` of `full` is summed over ranks by the gather of leaf, so both ranks have all of it. From there on:

- `_map_to_agreeing` gives each rank an equal part, t / 2.
- Div gives t / 2 / norm to `w`, on each rank. `w` agrees and meets a value that varies here, so a hook on Div sums the
  parts over ranks: t / norm, which is the gradient of `w`, the same on every rank.
- Div gives the cotangent of `norm` no hook, because `norm` varies. The parts of both ranks are added once, by the
  transpose of the gather of v, which is a reduce-scatter.

A second derivative goes through the graph of these gradients. Its formulas use `w` and `norm` again, so there are new
nodes where a value that agrees meets one that varies. Before a hook sums a gradient, `_prepare_gradient` puts hooks on
those nodes too; when these run, they do the same with the gradients that they sum.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from fshard import _compat, comm
from fshard.collectives.linear import Linear, Tensors, Variance, is_tie, linear_call, variance_of
from fshard.tree import Axis, Spec

# Entries in the metadata of a node of autograd's graph. The first tells for an axis whether the value that the node
# made varies over it. The second lists for an axis the inputs whose gradients a hook of the node sums.
VARIES = "fshard varies"
SUMMED = "fshard summed"

# A node of autograd's graph, and the number of one of its outputs.
NodeOutput = tuple[Any, int]


def make_derived_leaf_agree(path: str, tensor: torch.Tensor, spec: Spec) -> torch.Tensor:
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
        if axis.size > 1 and spec.dim_of(axis) is None:
            tensor = _make_leaf_agree_over(axis, path, tensor)
    return tensor


def _make_leaf_agree_over(axis: Axis, path: str, tensor: torch.Tensor) -> torch.Tensor:
    if not any(_varies(output, axis) for output in _node_outputs(tensor)):
        return tensor
    (agreeing,) = linear_call(_map_to_agreeing(axis), [tensor])
    # Each torch.func transform has a graph of its own.
    for node, _ in _node_outputs(agreeing):
        (made_by,) = node.next_functions
        if _varies(made_by, axis):
            _sum_where_they_meet(made_by, axis, path)
        else:
            node.metadata.setdefault(SUMMED, {})[axis] = [0]
            node.register_hook(partial(_sum_gradients, [0], axis, path))
    return agreeing


def _node_outputs(tensor: torch.Tensor) -> list[NodeOutput]:
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


def _recorded_varies(node_output: NodeOutput, axis: Axis) -> bool | None:
    """Look up whether a value varies over an axis; None if that follows from what it was computed from."""
    node, number = node_output
    variance = variance_of(node)
    if axis in variance.axes:
        return variance.result_varies(axis, number)
    return node.metadata.get(VARIES, {}).get(axis)


def _record_varies(node: Any, axis: Axis, varies: bool) -> None:
    node.metadata.setdefault(VARIES, {})[axis] = varies


def _varies(node_output: NodeOutput, axis: Axis) -> bool:
    """Find out whether a leaf that ranks hold whole was computed from values that vary over an axis.

    The other leaves it depends on are replicated and agree. Record this, because later walks need it and stop here.
    """
    recorded = _recorded_varies(node_output, axis)
    if recorded is not None:
        return recorded
    varying = _find_varying(node_output, axis, leaves_vary=False)
    for node in varying:
        if not numbered_inputs(node):
            _record_varies(node, axis, varies=False)
    node, _ = node_output
    _record_varies(node, axis, varies=varying[node])
    return varying[node]


def _find_varying(start: NodeOutput, axis: Axis, *, leaves_vary: bool) -> dict[Any, bool]:
    """Find out which nodes make values that vary over an axis: those that use such a value.

    Args:
        start: A value.
        axis: The axis.
        leaves_vary: Whether tensors that no node made vary, unless it is recorded of them.

    Returns:
        For each node that the value was computed by, whether what it makes varies. Nodes of which that is recorded are
        left out, and so is what is behind them.
    """
    varying: dict[Any, bool] = {}
    first, _ = start
    waiting = [] if axis in variance_of(first).axes else [first]
    while waiting:
        node = waiting[-1]
        inputs = {source: _varies_in(varying, source, axis) for _, source in numbered_inputs(node)}
        unvisited = [source for (source, _), varies in inputs.items() if varies is None]
        if unvisited:
            waiting += unvisited
            continue
        varying[node] = any(inputs.values()) if inputs else leaves_vary
        waiting.pop()
    return varying


def _varies_in(varying: dict[Any, bool], node_output: NodeOutput, axis: Axis) -> bool | None:
    """Look up whether a value varies over an axis; None if it is neither recorded nor found out yet."""
    recorded = _recorded_varies(node_output, axis)
    node, _ = node_output
    return varying.get(node) if recorded is None else recorded


def numbered_inputs(node: Any) -> list[tuple[int, NodeOutput]]:
    """List what made the inputs of a node, by their numbers.

    The token that ties a collective to others is left out, and leaves whose use a node checks by itself.
    """
    edges = node.next_functions[:-1] if is_tie(node) else node.next_functions
    checked_later = getattr(node, "inputs_checked_later", ())
    inputs = []
    for number, (source, output) in enumerate(edges):
        if source is not None and number not in checked_later:
            inputs.append((number, (source, output)))
    return inputs


def sums_input(node: Any, number: int, axis: Axis) -> bool:
    """Tell whether a hook of a node sums the gradient of an input over an axis.

    Args:
        node: A node of autograd's graph.
        number: The number of the input.
        axis: The axis.
    """
    return number in node.metadata.get(SUMMED, {}).get(axis, ())


def _sum_where_they_meet(node_output: NodeOutput, axis: Axis, path: str) -> None:
    """Sum gradients over an axis where a value that varies was computed from values that agree.

    Args:
        node_output: The value that varies.
        axis: The axis.
        path: The path of the derived leaf.
    """
    # Leaves that agree have been recorded by now.
    varying = _find_varying(node_output, axis, leaves_vary=True)
    for node, varies in varying.items():
        if not varies:
            continue
        summed = node.metadata.setdefault(SUMMED, {})
        if axis not in summed:
            inputs = numbered_inputs(node)
            summed[axis] = [number for number, source in inputs if not _varies_in(varying, source, axis)]
            node.register_hook(partial(_sum_gradients, summed[axis], axis, path))


def _sum_gradients(numbers: Sequence[int], axis: Axis, path: str, gradients: Sequence[Any], _: Any) -> Sequence[Any]:
    """Replace gradients of inputs that agree by their sums over ranks, when a node whose value varies has run."""
    for gradient in gradients:
        if gradient is not None:
            _prepare_gradient(gradient, axis, path)
    replaced = list(gradients)
    chosen = [number for number in numbers if gradients[number] is not None]
    with comm.annotate_collectives((), [path]):
        sums = linear_call(_map_to_sum(axis), [gradients[number] for number in chosen])
    for number, total in zip(chosen, sums, strict=True):
        replaced[number] = total
    return tuple(replaced)


def _map_to_sum(axis: Axis) -> Linear:
    """Make the map from each rank's part of a gradient to their sum, which agrees.

    This is no transpose of `_map_to_agreeing`, whose values are the same on every rank before. It is `psum_invariant`,
    and has its name for the checks that read graphs: the transpose hands each rank the whole cotangent, because each
    part is counted once in the sum. The message is labelled as that of the `pcast` which the hook stands for.
    """
    run = partial(comm.all_reduce, axis=axis, label="pcast")
    return Linear(run, list, Variance("psum_invariant", (axis,), operand=True, result=False))


def _prepare_gradient(gradient: torch.Tensor, axis: Axis, path: str) -> None:
    """Prepare the graph of a gradient for second derivatives, as that of a leaf is prepared.

    The gradient is each rank's own part, and formulas of derivatives compute it from values that agree, too.
    """
    for node_output in _node_outputs(gradient):
        node, number = node_output
        varies = _recorded_varies(node_output, axis)
        if varies is None:
            varies = _find_varying(node_output, axis, leaves_vary=True)[node]
        if varies:
            _sum_where_they_meet(node_output, axis, path)
        else:
            # Code that uses this gradient treats it as varying.
            _record_varies(node, axis, varies=True)
            node.register_prehook(partial(_sum_arriving, number, axis, path))


def _sum_arriving(number: int, axis: Axis, path: str, gradients: Sequence[Any]) -> Sequence[Any]:
    """Replace the gradient that arrives for an output of a node by its sum over ranks."""
    replaced = list(gradients)
    (replaced[number],) = _sum_gradients([0], axis, path, [gradients[number]], None)
    return tuple(replaced)
