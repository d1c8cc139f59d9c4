"""The operators of a graph as JSON: written from a torch.fx.Graph, and read into one.

torch.fx makes Python text of a graph. None of the text comes from a file: torch compares arguments and their names with
the schema of their operator, names of nodes are made here, and a value is a number, an entry of a table, or a text that
is quoted.
"""

import json
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

import fshard as fs
from fshard.ext import _compat
from fshard.ext.saved_graph.operators import COLLECTIVES, ON_NUMBERS, find_operator
from fshard.ext.saved_graph.source import Source
from fshard.extend import describe

JSON = Any
# The name that a file has for `operator.getitem`.
GETITEM = "getitem"
# Torch's own values among the arguments of operators, which a file has by their names.
_CONSTANT_TYPES = (torch.dtype, torch.layout, torch.memory_format)
_CONSTANTS: Mapping[Any, Any] = MappingProxyType(
    {str(value): value for value in vars(torch).values() if isinstance(value, _CONSTANT_TYPES)}
)
# torch.fx takes a line of its text with this in it for a comment of its own, and leaves it out.
_FX_COMMENT = "# COUNTER: "


def write_nodes(graph: Graph, axes: Sequence[fs.Axis]) -> dict[str, JSON]:
    """Write a graph down.

    Args:
        graph: The graph of a jitted function.
        axes: The axes of its arguments. A file names the axis of a collective by its place here, because process groups
            have other names in each process.

    Returns:
        "nodes", each with the name of its operator, arguments and keywords, and "outputs". Nodes are numbered, the
        inputs first. What JSON has no form for is an object of one entry, such as {"node": 3}.

    Raises:
        ValueError: if JSON has no form for a node.
    """
    inputs = graph.find_nodes(op="placeholder")
    calls = [node for node in graph.nodes if node.op == "call_function"]
    numbers = {node: number for number, node in enumerate([*inputs, *calls])}
    names = {function: name for name, function in ON_NUMBERS.items()}
    names[operator.getitem] = GETITEM
    nodes = []
    for node in calls:
        name = names.get(node.target, str(node.target))
        args = _name_axis(node.args, axes) if name in COLLECTIVES else node.args
        nodes.append([name, args, node.kwargs])
    (outputs,) = graph.output_node().args
    text = json.dumps({"nodes": nodes, "outputs": outputs}, default=partial(_write_value, numbers))
    return json.loads(text)


def _name_axis(args: Sequence[Any], axes: Sequence[fs.Axis]) -> list[Any]:
    """Replace the axis of a collective by its place among those of the arguments."""
    *others, name, size, group, label = args
    for place, axis in enumerate(axes):
        if (axis.name, axis.size, axis.group_name) == (name, size, group):
            return [*others, place, label]
    raise ValueError(
        f"save_graph: the graph has a collective over {name!r}, and no argument is sharded over that axis. Shard one "
        "over it, because a file cannot name a process group of its own."
    )


def _write_value(numbers: Mapping[Node, int], value: Any) -> JSON:
    """Write a value that JSON has no form for."""
    if isinstance(value, Node) and value in numbers:
        return {"node": numbers[value]}
    if isinstance(value, Node):
        raise ValueError(f"save_graph: a file holds operators on tensors, not {value.op} {value.target}.")
    if isinstance(value, _CONSTANT_TYPES):
        return {"torch": str(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    raise ValueError(f"save_graph: a file holds numbers and texts, and the graph has {describe(value)}.")


class GraphReader:
    """Reads what `write_nodes` wrote, and refuses everything else."""

    def __init__(self, inputs: int, axes: Sequence[fs.Axis]) -> None:
        """Begin a graph.

        Args:
            inputs: How many inputs it has.
            axes: The axes of the arguments.
        """
        self._graph = Graph()
        self._axes = axes
        # By their numbers.
        self._nodes: dict[int, Node] = {}
        # For each node a value of the type of its result, which shows torch what the operators that take it are given.
        self._examples: dict[Node, Any] = {}
        self._tensor = torch.empty(0)
        for number in range(inputs):
            self._append(self._graph.placeholder(f"input_{number}"), self._tensor)

    def read(self, source: Source, nodes: list[JSON], outputs: list[JSON]) -> Graph:
        """Read a graph.

        Args:
            source: Where it is read from.
            nodes: A list of its operators.
            outputs: A list of its results.

        Raises:
            ValueError: if some part of it is not as `write_nodes` writes it; the error names the part.
        """
        for call in nodes:
            with source.reading(f"node {len(self._nodes)}"):
                self._read_call(*call)
        with source.reading("outputs"):
            results = self._read_value(outputs)
            for result in results:
                if result is not None and self._examples[result] is not self._tensor:
                    raise ValueError(f"{result} is no tensor")
        self._graph.output(results)
        return self._graph

    def _append(self, node: Node, example: Any) -> None:
        self._nodes[len(self._nodes)] = node
        self._examples[node] = example

    def _read_call(self, name: str, args: list[JSON], kwargs: dict[str, JSON]) -> None:
        values = self._read_value(args)
        keywords = {keyword: self._read_value(value) for keyword, value in kwargs.items()}
        if name in COLLECTIVES:
            *values, place, label = values
            _check_label(label)
            axis = self._axes[place]
            values = [*values, axis.name, axis.size, axis.group_name, label]
        if name in ON_NUMBERS and not any(isinstance(value, Node) for value in values):
            raise ValueError("one of the numbers must be known only as the graph runs: others may take for ever")
        if name == GETITEM and not keywords:
            node, index = values
            result = self._examples[node][operator.index(index)]
            self._append(self._graph.call_function(operator.getitem, (node, index)), result)
            return
        callee = find_operator(name)
        if callee is None:
            raise ValueError(f"{name:.80} is no operator of torch on tensors, or of fshard")
        examples, examples_of_keywords = map_arg((values, keywords), self._examples.__getitem__)
        kinds = _compat.check_call(callee.schema, examples, examples_of_keywords)
        node = self._graph.call_function(callee.function, tuple(values), keywords)
        results = [self._make_example(kind) for kind in kinds]
        self._append(node, results[0] if len(results) == 1 else tuple(results))

    def _make_example(self, kind: str) -> Any:
        """Make an example of a result, by its type as schemas spell it."""
        if kind in ("int", "number"):
            return 1
        if kind == "List[Tensor]":
            # Its length is known only as the graph runs.
            return defaultdict(lambda: self._tensor)
        return self._tensor

    def _read_value(self, value: JSON) -> Any:
        """Read an argument of an operator, or several."""
        if type(value) is list:
            return [self._read_value(entry) for entry in value]
        if type(value) is str and _FX_COMMENT in value:
            raise ValueError(f"{_FX_COMMENT!r} must not be in a text")
        if type(value) is not dict:
            return value
        ((form, content),) = value.items()
        if form == "device":
            return torch.device(content)
        return {"node": self._nodes, "torch": _CONSTANTS}[form][content]


def _check_label(text: str) -> None:
    """Refuse the text of an `fs.comm.Label` that cannot be read, as it is only while the graph runs."""
    verb, units, leaves, parts = json.loads(text)
    " ".join((verb, *units, *leaves, parts))
