"""What a step returns: leaves, buffers and metrics on which ranks have to agree, and where they stopped to agree."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch.fx import Node

from fshard.ext._compat import frames_of, origin_of
from fshard.ext.check.graphs import is_number, name_of
from fshard.ext.check.report import StepProblem
from fshard.ext.check.values import Agreement, ValueTypes, walk_back
from fshard.extend import Traced, flatten, graph_nodes, unflatten

# Kinds of problems with a result, and what is wrong.
_NOT_REDUCED = (
    "missing sum",
    "this leaf is computed of a gradient, or of another value, that ranks have not reduced; use fs.value_and_grad, "
    "fs.scatter_grads, or a sum such as fs.psum_invariant.",
)
_OTHER_BUFFER = "buffer differs", "ranks put different values into the state; use fs.pmean, or fs.sync_buffers."
_LOCAL_METRIC = "local metric", "each rank returns a number of its own batch; return fs.pmean of it."
_NUMBERED = (
    "rank's own number",
    "the rank's coordinate makes a value differ on which ranks have to agree; leave it out.",
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
    first = result[0] if type(result) is tuple else result
    count = len(flatten(first).leaves) if type(first) is type(state) else 0
    results = []
    for number, (node, path, spec) in enumerate(zip(nodes, paths, traced.specs, strict=True)):
        if isinstance(node, Node):
            results.append(Result(node, path, spec, number < count))
    return results


def find_dropped(results: Sequence[Result]) -> Iterator[StepProblem]:
    """Find state of which a new value is made, such as a running mean, while the step returns the old one."""
    for result in results:
        if not result.is_state or result.node.op != "placeholder":
            continue
        writers = []
        for copy in result.node.users:
            if name_of(copy) == "clone":
                writers += [user for user in copy.users if copy in graph_nodes.find_write_targets(user)]
        if writers:
            text = "the step makes a new value of this leaf and returns the old one; put the new one into the state."
            yield StepProblem("buffer differs", "", result.path, frames_of(writers[0]), text)


def find_differing(results: Sequence[Result], values: ValueTypes) -> Iterator[StepProblem]:
    """Find the results on which the ranks of an axis have to agree, and do not."""
    axis = values.axis
    # Where ranks share a batch, or terms of a sum are refused, terms that are returned are no problem of their own.
    are_terms_known = not values.varies or any(each.kind == "missing sum" for each in values.problems)
    for result in results:
        problem = _OTHER_BUFFER if result.is_state else _LOCAL_METRIC
        is_compared = result.is_state or is_number(result.node)
        may_be_part = False
        if result.spec is not None:
            problem = _NOT_REDUCED
            role = result.spec.roles.get(axis)
            is_compared = role != "owned"
            may_be_part = role == "gathered"
        agreement = values.type_of(result.node)
        is_part = agreement is Agreement.SHARD or (agreement is Agreement.TERM and not are_terms_known)
        differs = agreement >= Agreement.VARYING or (is_part and not may_be_part)
        if is_compared and differs:
            kind, text = _NUMBERED if agreement is Agreement.NUMBERED else problem
            frames = frames_of(_find_source(result.node, values))
            yield StepProblem(kind, axis.name, result.path, frames, text)


def _find_source(result: Node, values: ValueTypes) -> Node:
    """Find where a value stopped to agree, or which operator took the number of the rank."""
    agreement = values.types[result]
    nodes = walk_back(result, lambda operand: values.types[operand] is agreement)
    # A constant has no line, but what reads it has.
    nodes = [node for node in nodes if origin_of(node).phase != "update" and frames_of(node)] or nodes
    return min(nodes) if agreement is Agreement.NUMBERED else nodes[0]
