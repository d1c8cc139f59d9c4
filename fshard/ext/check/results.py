"""What a step returns: leaves, buffers and metrics on which ranks have to agree, and where they stopped to agree."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch.fx import Node

import fshard as fs
from fshard.ext._compat import origin_of
from fshard.ext.check.report import Mistake, StepProblem, frames_of
from fshard.ext.check.values import Agreement, AxisFacts, ValueTypes, walk_back
from fshard.extend import Traced, flatten, graph_nodes, unflatten

_DIFFERENT = (Agreement.SHARD, Agreement.OWN, Agreement.VARYING)
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


def find_differing(results: list[Result], values: ValueTypes, axis: fs.Axis, facts: AxisFacts) -> Iterator[StepProblem]:
    """Find the results on which the ranks of an axis have to agree, and do not."""
    for result in results:
        agreement = values.type_of(result.node)
        kind = _judge(result, agreement, axis)
        if kind is not None:
            source, is_constant = _find_source(result.node, values.types, facts)
            kind = Mistake.OWN_NUMBER if is_constant else kind
            yield StepProblem(kind, axis.name, result.path, frames_of(source), _TEXTS[kind])


def _judge(result: Result, agreement: Agreement, axis: fs.Axis) -> Mistake | None:
    """Name the mistake if a result is not of a type that its place allows."""
    spec = result.spec
    if spec is None:
        must_agree = result.is_state or result.node.meta["val"].numel() == 1
        kind = Mistake.BUFFER_DIFFERS if result.is_state else Mistake.LOCAL_METRIC
        return kind if must_agree and agreement in _DIFFERENT else None
    is_split = spec.dim_of(axis) is not None
    refused = (Agreement.VARYING,) if is_split else _DIFFERENT
    is_placed = axis in spec.axes and spec.roles.get(axis) != "owned"
    return Mistake.MISSING_SUM if is_placed and agreement in refused else None


def _find_source(result: Node, types: Mapping[Node, Agreement], facts: AxisFacts) -> tuple[Node, bool]:
    """Find the node where a value stopped to agree, and whether the number of the rank is the reason."""
    nodes = walk_back(result, lambda operand: types[operand] is types[result])
    for node in nodes:
        if node in facts.rank_constants and not graph_nodes.is_view(node):
            # A constant has no line, but what reads it has.
            return next((each for each in node.users if frames_of(each)), node), True
    before = [node for node in nodes if origin_of(node).phase != "update" and frames_of(node)]
    return next(iter(before), result), False
