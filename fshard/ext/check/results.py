"""What a step returns: leaves, buffers and metrics on which ranks have to agree, and where they stopped to agree."""

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.fx import Node

import fshard as fs
from fshard.ext._compat import origin_of
from fshard.ext.check.graphs import shape_of
from fshard.ext.check.report import Mistake, StepProblem, frames_of
from fshard.ext.check.values import Agreement, ValueTypes, walk_back
from fshard.extend import Traced, flatten, graph_nodes, unflatten

_DIFFERENT = (Agreement.SHARD, Agreement.VARYING)
_TEXTS: Mapping[Mistake, str] = MappingProxyType(
    {
        Mistake.MISSING_SUM: (
            "this leaf is computed of a gradient, or of another value, that ranks have not reduced; use "
            "fs.value_and_grad, fs.scatter_grads, or a sum such as fs.psum_invariant."
        ),
        Mistake.BUFFER_DIFFERS: "ranks put different values into the state; use fs.pmean, or fs.sync_buffers.",
        Mistake.LOCAL_METRIC: "each rank returns a number of its own batch; return fs.pmean of it.",
        Mistake.OWN_NUMBER: "the rank's coordinate makes a value differ on which ranks have to agree; leave it out.",
    }
)


class Result(NamedTuple):
    """A tensor that a step returns.

    Attributes:
        node: Its node.
        path: Its path in the result.
        spec: Its spec if it is Sharded.
        is_state: Whether it belongs to the next state.
    """

    node: Node
    path: str
    spec: Any
    is_state: bool


def list_results(traced: Traced, state: Any) -> list[Result]:
    """List the tensors that a step returns, of which the first, or all, may be the next state."""
    nodes = graph_nodes.find_results(traced.module.graph)
    result = unflatten(traced.treedef, nodes)
    paths = flatten(result).paths
    first = result[0] if isinstance(result, tuple) and not hasattr(result, "_fields") else result
    count = len(flatten(first).leaves) if type(first) is type(state) else 0
    results = []
    for number, (node, path, spec) in enumerate(zip(nodes, paths, traced.specs, strict=True)):
        if isinstance(node, Node):
            results.append(Result(node, path, spec, number < count))
    return results


def find_dropped(nodes: Sequence[Node], results: Sequence[Result]) -> Iterator[StepProblem]:
    """Find state of which a new value is made, such as a running mean, while the step returns the old one."""
    kept = {result.node: result for result in results if result.is_state and result.node.op == "placeholder"}
    for node in nodes:
        for target in graph_nodes.find_write_targets(node):
            source: Any = target.args[0] if target.target is torch.ops.aten.clone.default else None
            if source in kept:
                text = (
                    "the step makes a new value of this leaf and returns the old one; put the new one into the state."
                )
                yield StepProblem(Mistake.BUFFER_DIFFERS, "", kept.pop(source).path, frames_of(node), text)


def find_differing(results: Sequence[Result], values: ValueTypes) -> Iterator[StepProblem]:
    """Find the results on which the ranks of an axis have to agree, and do not."""
    for result in results:
        kind, refused = _judge(result, values.facts.axis)
        if values.type_of(result.node) in refused:
            nodes, source, is_own = _find_source(result.node, values)
            if not values.blamed.isdisjoint(nodes):
                continue
            kind = Mistake.OWN_NUMBER if is_own else kind
            frames = frames_of(source)
            yield StepProblem(kind, values.facts.axis.name, result.path, frames, _TEXTS[kind])


def _judge(result: Result, axis: fs.Axis) -> tuple[Mistake, Sequence[Agreement]]:
    """Name the mistake that a result is if it has one of some types."""
    spec = result.spec
    if spec is not None:
        is_split = spec.dim_of(axis) is not None
        refused = (Agreement.VARYING,) if is_split else _DIFFERENT
        is_owned = spec.roles.get(axis) == "owned"
        return Mistake.MISSING_SUM, () if is_owned else refused
    if result.is_state:
        return Mistake.BUFFER_DIFFERS, _DIFFERENT
    is_number = math.prod(shape_of(result.node)) == 1
    return Mistake.LOCAL_METRIC, _DIFFERENT if is_number else ()


def _find_source(result: Node, values: ValueTypes) -> tuple[Sequence[Node], Node, bool]:
    """Find what a value is computed from, where it stopped to agree, and whether the number of the rank is why."""
    nodes = walk_back(result, lambda operand: values.types[operand] is values.types[result])
    for node in nodes:
        if node in values.own_numbers and not graph_nodes.is_view(node):
            # A constant has no line, but what reads it has.
            return nodes, next((each for each in (node, *node.users) if frames_of(each)), node), True
    before = [node for node in nodes if origin_of(node).phase != "update" and frames_of(node)]
    return nodes, next(iter(before), result), False
