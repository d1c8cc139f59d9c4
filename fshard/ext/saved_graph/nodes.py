"""The operators of a graph as JSON: written from a torch.fx.Graph, and read into one by the schemas of the operators.

torch.fx makes Python text of a graph. None of the text comes from a file: names of arguments are those of schemas,
names of nodes are made here, and a value is a number, an entry of a table, or a text that is quoted.
"""

import json
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch.fx import Graph, Node

import fshard as fs
from fshard.ext.saved_graph.forms import Source, has_form
from fshard.ext.saved_graph.operators import COLLECTIVES, KINDS, NUMBERS, ON_NUMBERS, find_operator
from fshard.extend import describe

JSON = Any
# The name that a file has for `operator.getitem`.
GETITEM = "getitem"
# Torch's own values among the arguments of operators.
_CONSTANT_TYPES = (torch.dtype, torch.layout, torch.memory_format)
# The texts that torch's operators take: ways to round, to approximate, to reduce, to search and to factorize.
_WORDS = """
    trunc floor none tanh
    sum prod mean amax amin max min add multiply
    left right L U r reduced complete
    gels gelsy gelsd gelss gesvd gesvdj gesvda
"""
# Arguments with texts of any content: those that only errors show, and those that say what a collective is for.
_ANY_TEXT = ("assert_msg", "api_name", "axis", "group", "label")
# torch.fx takes a line of its text with this in it for a comment of its own, and leaves it out.
_FX_COMMENT = "# COUNTER: "
# An `fs.comm.Label`: who asks, for which units and leaves, and of what.
_LABEL = (str, [str], [str], str)


def _list_constants() -> Iterator[tuple[tuple[str, str], Any]]:
    """List the values that JSON has no form for, each by its form in a file and its name."""
    for value in vars(torch).values():
        if isinstance(value, _CONSTANT_TYPES):
            yield ("torch", str(value).removeprefix("torch.")), value
    for number in (math.inf, -math.inf, math.nan):
        yield ("float", str(number)), number


_CONSTANTS: Mapping[tuple[str, str], Any] = MappingProxyType(dict(_list_constants()))


def write_nodes(graph: Graph, axes: Sequence[fs.Axis]) -> dict[str, JSON]:
    """Write a graph down.

    Args:
        graph: The graph of a jitted function.
        axes: The axes of its arguments. A file names the axis of a collective by its place here, because process groups
            have other names in each process.

    Returns:
        "nodes", each with the name of its operator, arguments and keywords, and "outputs". Nodes are numbered, the
        inputs first.

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
        target = names.get(node.target, str(node.target))
        args = [_write_value(value, numbers) for value in node.args]
        kwargs = {name: _write_value(value, numbers) for name, value in node.kwargs.items()}
        if _is_collective(target):
            *args, _, _, _, label = args
            kwargs = {"axis": _find_place_of_axis(node, axes), "label": json.loads(label)}
        nodes.append([target, args, kwargs])
    (outputs,) = graph.output_node().args
    return {"nodes": nodes, "outputs": _write_value(outputs, numbers)}


def _write_value(value: Any, numbers: Mapping[Node, int]) -> JSON:
    """Write an argument of an operator, or several."""
    if isinstance(value, Node):
        if value not in numbers:
            raise ValueError(f"save_graph: a file holds operators on tensors, not {value.op} {value.target}.")
        return {"node": numbers[value]}
    if isinstance(value, list | tuple):
        return [_write_value(entry, numbers) for entry in value]
    if isinstance(value, _CONSTANT_TYPES):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"save_graph: a file holds numbers and texts, and the graph has {describe(value)}.")


def _is_collective(target: str) -> bool:
    namespace, _, rest = target.partition(".")
    return namespace == "fshard" and rest.removesuffix(".default") in COLLECTIVES


def _find_place_of_axis(node: Node, axes: Sequence[fs.Axis]) -> int:
    """Find the place of a collective's axis among those of the arguments."""
    *_, name, size, group, _ = node.args
    for place, axis in enumerate(axes):
        if (axis.name, axis.size, axis.group_name) == (name, size, group):
            return place
    raise ValueError(
        f"save_graph: the graph has a collective over {name!r}, and no argument is sharded over that axis. Shard one "
        "over it, because a file cannot name a process group of its own."
    )


def with_groups(graph: Graph, names: Sequence[str]) -> Graph:
    """Copy a graph that was read, with the names that the axes' process groups have in this process."""
    copy = Graph()
    copy.output(copy.graph_copy(graph, {}))
    for node in copy.nodes:
        if _is_collective(str(node.target)):
            *args, place, label = node.args
            node.args = (*args, names[int(place)], label)
    return copy


class NodeReader:
    """Reads what `write_nodes` wrote, and refuses everything else.

    Attributes:
        graph: What has been read so far.
        nodes: The nodes by their numbers.
        results: For each node "Tensor", "number" or "List[Tensor]", or for several results a tuple of such.
        part: The part that is read, for errors.
    """

    def __init__(self, source: Source, axes: Sequence[tuple[str, int]]) -> None:
        """Begin an empty graph.

        Args:
            source: Where it is read from.
            axes: Names and sizes of the arguments' axes.
        """
        self.graph = Graph()
        self.nodes: list[Node] = []
        self.results: dict[Node, str | tuple[str, ...]] = {}
        self.part = ""
        self._source = source
        self._axes = axes

    def read(self, inputs: int, nodes: list[JSON], outputs: list[JSON]) -> Graph:
        """Read a graph, with the place of an axis among those of the arguments for the group of a collective.

        Args:
            inputs: How many inputs it has.
            nodes: A list of its operators.
            outputs: A list of its results.

        Raises:
            ValueError: if some part of it is not as `write_nodes` writes it; the error names the part.
        """
        for number in range(inputs):
            self._append(self.graph.placeholder(f"input_{number}"), "Tensor")
        for call in nodes:
            self.part = f"node {len(self.nodes)}"
            self._read_call(call)
        self.part = "outputs"
        results = [None if value is None else self._read_output(value) for value in outputs]
        self.graph.output(results)
        return self.graph

    def _append(self, node: Node, result: str | tuple[str, ...]) -> None:
        self.nodes.append(node)
        self.results[node] = result

    def _read_output(self, value: JSON) -> Node:
        node = self._read_node(value)
        if self.results[node] != "Tensor":
            self.refuse("a node whose result is a Tensor", value)
        return node

    def _read_call(self, call: JSON) -> None:
        if not has_form(call, (str, list, dict)):
            self.refuse("an operator's name, a list of arguments and an object of keywords", call)
        target, args, kwargs = call
        self.part = f"{self.part} ({target:.80})"
        if target == GETITEM:
            self._read_getitem(args)
        elif _is_collective(target):
            self._read_operator(target, [*args, *self._read_axis_and_label(kwargs)], {})
        else:
            self._read_operator(target, args, kwargs)

    def _read_axis_and_label(self, kwargs: dict[str, JSON]) -> list[JSON]:
        """Read what a collective is over and for; the last arguments of its operator."""
        place: JSON = kwargs.get("axis")
        label: JSON = kwargs.get("label")
        if not has_form(place, int) or place >= len(self._axes):
            self.refuse("'axis' to be the place of one", place)
        if not has_form(label, _LABEL):
            self.refuse("'label' to be a verb, units, leaves and parts", label)
        return [*self._axes[place], str(place), json.dumps(label)]

    def _read_operator(self, target: str, args: list[JSON], kwargs: dict[str, JSON]) -> None:
        callee = find_operator(target)
        if callee is None:
            self.refuse("an operator of torch on tensors, or of fshard", target)
        if len(args) > len(callee.positional):
            self.refuse(f"at most {len(callee.positional)} arguments by their places", len(args))
        # A keyword is the schema's own, because torch.fx writes it into Python text.
        others = kwargs.keys() - {*callee.keywords}
        if others:
            self.refuse(f"keywords of {callee.keywords}", min(others))
        given = {**dict(zip(callee.positional, args, strict=False)), **kwargs}
        values: dict[str, Any] = {}
        for name, kind in callee.kinds.items():
            if name in given:
                values[name] = self._read_value(given[name], kind, name)
            elif name in callee.required:
                self.refuse(f"a value for {name!r}", None)
        if target in ON_NUMBERS and not any(isinstance(value, Node) for value in values.values()):
            # Others may take for ever.
            self.refuse("a number that is known only as the graph runs", args)
        keywords = {name: values.pop(name) for name in kwargs}
        self._append(self.graph.call_function(callee.function, tuple(values.values()), keywords), callee.result)

    def _read_getitem(self, args: list[JSON]) -> None:
        """Take one of several results."""
        if len(args) != 2:
            self.refuse("a node and a number as arguments", args)
        node = self._read_node(args[0])
        index = args[1]
        result = self.results[node]
        results = result if isinstance(result, tuple) else ()
        # The length of a list is known only as the graph runs.
        size = 2**31 if result == "List[Tensor]" else len(results)
        if not has_form(index, int) or index >= size:
            self.refuse("the number of a result", index)
        self._append(self.graph.call_function(operator.getitem, (node, index)), results[index] if results else "Tensor")

    def _read_value(self, value: JSON, kind: str, name: str) -> Any:
        """Read the value of an argument of a type as schemas spell it, such as Optional[List[int]]."""
        if kind.startswith("Optional["):
            return None if value is None else self._read_value(value, kind[9:-1], name)
        if kind.startswith("List[") and type(value) is list:
            return [self._read_value(entry, kind[5:-1], name) for entry in value]
        content = self._read_object(value) if type(value) is dict and len(value) == 1 else value
        if not self._is_of_kind(content, kind, name):
            self.refuse(f"{name!r} to be {kind}", value)
        return content

    def _read_object(self, value: dict[str, JSON]) -> Any:
        """Read a value that JSON has no form for, which stands in an object under the name of its form."""
        ((form, content),) = value.items()
        if form == "node":
            return self._read_node(value)
        if form == "device" and type(content) is str:
            return _read_device(content)
        return _CONSTANTS.get((form, content)) if type(content) is str else None

    def _is_of_kind(self, value: Any, kind: str, name: str) -> bool:
        """Whether an argument may have a value."""
        if isinstance(value, Node):
            return self.results[value] in ("number", kind) and kind in (*NUMBERS, "Tensor")
        if type(value) is int and not -(2**63) <= value < 2**63:
            return False
        if type(value) is str and not (value in _WORDS.split() or (name in _ANY_TEXT and _FX_COMMENT not in value)):
            return False
        return type(value) in KINDS.get(kind, ())

    def _read_node(self, value: JSON) -> Node:
        """Read a reference to a node, which must stand before the one that is read."""
        number: JSON = value.get("node") if type(value) is dict and len(value) == 1 else None
        if not has_form(number, int) or number >= len(self.nodes):
            self.refuse(f"a node before it, of {len(self.nodes)}", value)
        return self.nodes[number]

    def refuse(self, expected: str, got: JSON) -> NoReturn:
        """Raise the error of the part that is read."""
        self._source.refuse(self.part, expected, got)


def _read_device(text: str) -> torch.device | None:
    try:
        return torch.device(text)
    except RuntimeError:
        return None
