"""The operators of a graph as JSON: written from a torch.fx.Graph, and read into one by the schemas of the operators.

torch.fx makes Python text of a graph. None of the text comes from a file: names of arguments are those of schemas,
names of nodes are made here, and a value is a number, an entry of a table, or a text that is quoted.
"""

import json
import math
import operator
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import torch
from torch.fx import Graph, Node

import fshard as fs
from fshard.ext.saved_graph.operators import COLLECTIVES, NUMBERS, ON_NUMBERS, Parameter, find_operator
from fshard.ext.saved_graph.refusal import Source
from fshard.extend import describe, expect

JSON = Any
GETITEM = "getitem"
# Floats that JSON has no numbers for.
_NOT_FINITE: Mapping[str, float] = MappingProxyType({"inf": math.inf, "-inf": -math.inf, "nan": math.nan})
# Torch's own values among the arguments of operators: the types of arguments by the types of values.
_CONSTANT_KINDS = MappingProxyType(
    {torch.dtype: "ScalarType", torch.layout: "Layout", torch.memory_format: "MemoryFormat"}
)
_CONSTANT_TYPES = tuple(_CONSTANT_KINDS)
_CONSTANTS: Mapping[tuple[str, str], Any] = MappingProxyType(
    {
        (_CONSTANT_KINDS[type(value)], str(value).removeprefix("torch.")): value
        for value in vars(torch).values()
        if isinstance(value, _CONSTANT_TYPES)
    }
)
# The texts that torch's operators take: ways to round, to approximate, to reduce, to search and to factorize.
_WORDS = frozenset(
    (
        *("trunc", "floor", "none", "tanh", "sum", "prod", "mean", "amax", "amin", "max", "min", "add", "multiply"),
        *("left", "right", "L", "U", "r", "reduced", "complete", "gels", "gelsy", "gelsd", "gelss"),
        *("gesvd", "gesvdj", "gesvda"),
    )
)
# Texts of any content: those that are shown in an error alone, and the name of an axis, which is compared.
_ANY_TEXT = ("assert_msg", "api_name", "axis")
# torch.fx takes a line of its text with this in it for a comment of its own, and leaves it out.
_FX_COMMENT = "# COUNTER: "
_DESCRIPTIONS = MappingProxyType(
    {
        "Tensor": "a tensor or a number",
        "int": "a whole number of 64 bits",
        "float": "a number",
        "bool": "true or false",
        "number": "a number",
        "ScalarType": "a dtype",
        "Layout": "a layout",
        "MemoryFormat": "a memory format",
        "Device": "a device",
        "Generator": "null",
        "str": "a text that the operator takes",
    }
)


def write_nodes(graph: Graph, axes: Sequence[fs.Axis]) -> dict[str, JSON]:
    """Write a graph down.

    Args:
        graph: Of what jit traced.
        axes: Those of the arguments. A file has places in this list, because process groups have other names in each
            process.

    Returns:
        "nodes", each with the name of its operator, arguments and keywords, and "outputs". A node has a number: those
        of the inputs come first.

    Raises:
        ValueError: if JSON has no form for a node.
    """
    inputs = graph.find_nodes(op="placeholder")
    calls = [node for node in graph.nodes if node.op == "call_function"]
    numbers = {node: n for n, node in enumerate([*inputs, *calls])}
    names = {function: name for name, (function, _) in ON_NUMBERS.items()} | {operator.getitem: GETITEM}

    def write(value: Any) -> JSON:
        if isinstance(value, Node):
            expect(value in numbers, "save_graph", "operators on tensors in a graph", f"{value.op} {value.target}")
            return {"node": numbers[value]}
        if isinstance(value, list | tuple):
            return [write(entry) for entry in value]
        if isinstance(value, _CONSTANT_TYPES):
            return {"torch": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if isinstance(value, float) and not math.isfinite(value):
            return {"float": str(value)}
        is_plain = value is None or isinstance(value, bool | int | float | str)
        expect(is_plain, "save_graph", "numbers and texts in a graph", describe(value))
        return value

    nodes = []
    for node in calls:
        target = names.get(node.target, str(node.target))
        args = [write(value) for value in node.args]
        if _is_collective(target):
            args[-2:] = [{"group": _place_of_axis(node, axes)}, {"label": json.loads(str(node.args[-1]))}]
        nodes.append([target, args, {name: write(value) for name, value in node.kwargs.items()}])
    (outputs,) = graph.output_node().args
    return {"nodes": nodes, "outputs": write(outputs)}


def _is_collective(target: str) -> bool:
    namespace, _, rest = target.partition(".")
    return namespace == "fshard" and rest.removesuffix(".default") in COLLECTIVES


def _place_of_axis(node: Node, axes: Sequence[fs.Axis]) -> int:
    """The place of a collective's axis among those of the arguments."""
    *_, name, size, group, _ = node.args
    places = [n for n, axis in enumerate(axes) if (axis.name, axis.size, axis.group_name) == (name, size, group)]
    remedy = "shard a leaf of the arguments over it: a file cannot name a process group of its own"
    expect(places, "save_graph", "collectives over axes of the arguments alone", f"one over {name!r}", remedy)
    return places[0]


class ReadGraph(NamedTuple):
    """A graph that was read.

    Attributes:
        graph: The graph, with None for the groups of collectives.
        groups: For each collective the place of its group among those of the arguments' axes.
    """

    graph: Graph
    groups: dict[Node, int]

    def with_groups(self, names: Sequence[str]) -> Graph:
        """Copy the graph, with the names of process groups of a call."""
        graph, copies = Graph(), dict[Node, Node]()
        graph.output(graph.graph_copy(self.graph, copies))
        for node, group in self.groups.items():
            copy = copies[node]
            *args, _, label = copy.args
            copy.args = (*args, names[group], label)
        return graph


class NodeReader:
    """Reads what `write_nodes` wrote, and refuses everything else.

    Attributes:
        graph: What has been read so far.
        groups: As in `ReadGraph`.
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
        self.groups: dict[Node, int] = {}
        self.nodes: list[Node] = []
        self.results: list[str | tuple[str, ...]] = []
        self.part = ""
        self._source = source
        self._axes = axes

    def read(self, inputs: int, nodes: JSON, outputs: JSON) -> ReadGraph:
        """Read a graph.

        Args:
            inputs: How many inputs it has.
            nodes: Its operators.
            outputs: Its results.

        Raises:
            ValueError: if some part of it is not as `write_nodes` writes it; the error names the part.
        """
        for n in range(inputs):
            self._append(self.graph.placeholder(f"input_{n}"), "Tensor")
        for entry in self._list(nodes, "nodes"):
            self.part = f"node {len(self.nodes)}"
            self._read_node(entry)
        self.part = "outputs"
        results = [
            None if value is None else self._node(value, ("Tensor",)) for value in self._list(outputs, "outputs")
        ]
        self.graph.output(results)
        return ReadGraph(self.graph, self.groups)

    def _append(self, node: Node, result: str | tuple[str, ...]) -> None:
        self.nodes.append(node)
        self.results.append(result)

    def _read_node(self, entry: JSON) -> None:
        is_call = type(entry) is list and len(entry) == 3
        if not is_call or not (type(entry[0]) is str and type(entry[1]) is list and type(entry[2]) is dict):
            self.refuse("an operator's name, a list of arguments and an object of keywords", entry)
        target, args, kwargs = entry
        self.part = f"{self.part} ({target:.80})"
        if target == GETITEM:
            self._read_getitem(args, kwargs)
        elif target in ON_NUMBERS:
            self._read_number(target, args, kwargs)
        else:
            self._read_operator(target, args, kwargs)

    def _read_operator(self, target: str, args: list[JSON], kwargs: dict[str, JSON]) -> None:
        callee = find_operator(target)
        if callee is None:
            self.refuse("an operator of torch on tensors, or of fshard", target)
        if len(args) > len(callee.positional):
            self.refuse(f"at most {len(callee.positional)} arguments by their places", len(args))
        values = [self._argument(value, parameter) for value, parameter in zip(args, callee.positional, strict=False)]
        keywords: dict[str, Any] = {}
        for name, value in kwargs.items():
            parameter = callee.keywords.get(name)
            if parameter is None:
                self.refuse(f"keywords of {[*callee.keywords]}", name)
            # The schema's own name, for generated text.
            keywords[parameter.name] = self._argument(value, parameter)
        absent = [
            *callee.positional[len(args) :],
            *(callee.keywords[name] for name in callee.keywords.keys() - kwargs.keys()),
        ]
        for parameter in absent:
            if parameter.is_required:
                self.refuse(f"a value for {parameter.name!r}", None)
        group = self._check_collective(values) if _is_collective(target) else None
        node = self.graph.call_function(callee.function, tuple(values), keywords)
        if group is not None:
            self.groups[node] = group
        self._append(node, callee.result)

    def _check_collective(self, values: list[Any]) -> int:
        """Return the group of a collective, whose axis and size must be those of an axis of the arguments."""
        *_, axis, size, group, _ = values
        if self._axes[group] != (axis, size):
            self.refuse(f"a collective over the axis {self._axes[group]}", f"{axis!r:.60} of {size} ranks")
        # The process group's name is another in each process.
        values[-2] = None
        return group

    def _read_getitem(self, args: list[JSON], kwargs: dict[str, JSON]) -> None:
        """Take one of several results."""
        if len(args) != 2 or kwargs:
            self.refuse("a node and a number as arguments", [args, kwargs])
        number, index = self._number_of_node(args[0]), args[1]
        result = self.results[number]
        size = len(result) if isinstance(result, tuple) else 2**31 if result == "List[Tensor]" else 0
        if type(index) is not int or not 0 <= index < size:
            self.refuse("the number of a result", index)
        node = self.graph.call_function(operator.getitem, (self.nodes[number], index))
        self._append(node, result[index] if isinstance(result, tuple) else "Tensor")

    def _read_number(self, target: str, args: list[JSON], kwargs: dict[str, JSON]) -> None:
        """Compute with numbers, of which one at least is known only as the graph runs."""
        function, arity = ON_NUMBERS[target]
        if len(args) != arity or kwargs:
            self.refuse(f"{arity} numbers as arguments", [args, kwargs])
        values = [self._value(value, "number", target) for value in args]
        if not any(isinstance(value, Node) for value in values):
            self.refuse("a number that is known only as the graph runs", args)
        self._append(self.graph.call_function(function, tuple(values)), "number")

    def _argument(self, value: JSON, parameter: Parameter) -> Any:
        """Read the value of an argument of an operator."""
        if value is None:
            if not parameter.may_be_none:
                self.refuse(f"{parameter.name!r} to be {_DESCRIPTIONS[parameter.kind]}", value)
            return None
        if not parameter.is_list:
            return self._value(value, parameter.kind, parameter.name)
        entries = self._list(value, parameter.name)
        if parameter.may_hold_none:
            return [None if entry is None else self._value(entry, parameter.kind, parameter.name) for entry in entries]
        return [self._value(entry, parameter.kind, parameter.name) for entry in entries]

    def _value(self, value: JSON, kind: str, name: str) -> Any:
        """Read one value of a type that a schema asks for."""
        if type(value) is dict:
            return self._object(value, kind, name)
        match kind:
            case "int":
                is_valid = type(value) is int
            case "float":
                is_valid = type(value) in (int, float)
            case "number" | "Tensor":
                is_valid = type(value) in (int, float, bool)
            case "bool":
                is_valid = type(value) is bool
            case "str":
                is_valid = type(value) is str and _is_text_of(name, value)
            case _:
                is_valid = False
        if type(value) is int:
            is_valid = is_valid and -(2**63) <= value < 2**63
        elif type(value) is float:
            is_valid = is_valid and math.isfinite(value)
        if not is_valid:
            self.refuse(f"{name!r} to be {_DESCRIPTIONS[kind]}", value)
        return value

    def _object(self, value: dict[str, JSON], kind: str, name: str) -> Any:
        """Read a value that JSON has no form for, which stands in an object under the name of its kind."""
        form, content = next(iter(value.items())) if len(value) == 1 else ("", None)
        is_number = kind in NUMBERS or kind == "Tensor"
        if form == "node" and is_number:
            return self._node(value, ("Tensor", "number") if kind == "Tensor" else ("number",))
        if form == name == "group" and kind == "str" and type(content) is int and 0 <= content < len(self._axes):
            return content
        if form == name == "label" and kind == "str" and _is_label(content):
            return json.dumps(content)
        if type(content) is str:
            if form == "torch" and (kind, content) in _CONSTANTS:
                return _CONSTANTS[kind, content]
            if form == "float" and kind in ("float", "number", "Tensor") and content in _NOT_FINITE:
                return _NOT_FINITE[content]
            if form == "device" and kind == "Device":
                return self._device(content)
        self.refuse(f"{name!r} to be {_DESCRIPTIONS[kind]}", value)

    def _node(self, value: JSON, results: Sequence[str]) -> Node:
        number = self._number_of_node(value)
        if self.results[number] not in results:
            self.refuse(f"a node whose result is a {' or a '.join(results)}", f"node {number}: {self.results[number]}")
        return self.nodes[number]

    def _number_of_node(self, value: JSON) -> int:
        """Read a reference to a node, which must stand before the one that is read."""
        number = value.get("node") if type(value) is dict and len(value) == 1 else None
        if type(number) is not int or not 0 <= number < len(self.nodes):
            self.refuse(f"a node before it, of {len(self.nodes)}", value)
        return number

    def _device(self, text: str) -> torch.device:
        try:
            return torch.device(text)
        except RuntimeError:
            self.refuse("a device", text)

    def _list(self, value: JSON, name: str) -> list[JSON]:
        if type(value) is not list:
            self.refuse(f"{name!r} to be a list", value)
        return value

    def refuse(self, expected: str, got: JSON) -> NoReturn:
        """Raise the error of the part that is read."""
        self._source.refuse(self.part, expected, got)


def _is_text_of(name: str, value: str) -> bool:
    """Whether a text may be the value of an argument; groups and labels of collectives are objects."""
    if name in _ANY_TEXT:
        return _FX_COMMENT not in value
    return value in _WORDS and name not in ("group", "label")


def _is_label(value: JSON) -> bool:
    """Whether a value has the parts of an `fs.comm.Label`: who asks, for which units and leaves, and of what."""
    if type(value) is not list or len(value) != 4:
        return False
    verb, units, leaves, parts = value
    if type(units) is not list or type(leaves) is not list:
        return False
    return all(type(text) is str and _FX_COMMENT not in text for text in (verb, *units, *leaves, parts))
