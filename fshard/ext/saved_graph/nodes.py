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
from fshard.ext.saved_graph.operators import COLLECTIVES, NUMBERS, ON_NUMBERS, Parameter, find_operator
from fshard.ext.saved_graph.refusal import Source
from fshard.extend import describe

JSON = Any
# The name that a file has for `operator.getitem`.
GETITEM = "getitem"
# The kinds of arguments: the types of their values, and these in words.
_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = MappingProxyType(
    {
        "Tensor": ((int, float, bool), "a tensor or a number"),
        "int": ((int,), "a whole number of 64 bits"),
        "float": ((int, float), "a number"),
        "bool": ((bool,), "true or false"),
        "number": ((int, float, bool), "a number"),
        "ScalarType": ((torch.dtype,), "a dtype"),
        "Layout": ((torch.layout,), "a layout"),
        "MemoryFormat": ((torch.memory_format,), "a memory format"),
        "Device": ((torch.device,), "a device"),
        "Generator": ((), "null"),
        "str": ((str,), "a text that the operator takes"),
    }
)
# Torch's own values among the arguments of operators.
_CONSTANT_TYPES = (torch.dtype, torch.layout, torch.memory_format)
# The texts that torch's operators take: ways to round, to approximate, to reduce, to search and to factorize.
_WORDS = """
    trunc floor none tanh
    sum prod mean amax amin max min add multiply
    left right L U r reduced complete
    gels gelsy gelsd gelss gesvd gesvdj gesvda
"""
# Arguments with texts of any content: those that only errors show, and the name of an axis, which is compared.
_ANY_TEXT = ("assert_msg", "api_name", "axis")
# torch.fx takes a line of its text with this in it for a comment of its own, and leaves it out.
_FX_COMMENT = "# COUNTER: "


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
        axes: The axes of its arguments. A file names the group of a collective by the place of its axis here, because
            process groups have other names in each process.

    Returns:
        "nodes", each with the name of its operator, arguments and keywords, and "outputs". Nodes are numbered, the
        inputs first.

    Raises:
        ValueError: if JSON has no form for a node.
    """
    inputs = graph.find_nodes(op="placeholder")
    calls = [node for node in graph.nodes if node.op == "call_function"]
    numbers = {node: number for number, node in enumerate([*inputs, *calls])}
    names = {function: name for name, (function, _) in ON_NUMBERS.items()}
    names[operator.getitem] = GETITEM
    nodes = []
    for node in calls:
        target = names.get(node.target, str(node.target))
        args = [_write_value(value, numbers) for value in node.args]
        if _is_collective(target):
            place = _find_place_of_axis(node, axes)
            label = json.loads(str(node.args[-1]))
            args[-2:] = [{"group": place}, {"label": label}]
        kwargs = {name: _write_value(value, numbers) for name, value in node.kwargs.items()}
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
        self.results: list[str | tuple[str, ...]] = []
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
        results = [None if value is None else self._read_node(value, ("Tensor",)) for value in outputs]
        self.graph.output(results)
        return self.graph

    def _append(self, node: Node, result: str | tuple[str, ...]) -> None:
        self.nodes.append(node)
        self.results.append(result)

    def _read_call(self, call: JSON) -> None:
        is_triple = type(call) is list and len(call) == 3
        if not is_triple or [type(part) for part in call] != [str, list, dict]:
            self.refuse("an operator's name, a list of arguments and an object of keywords", call)
        target, args, kwargs = call
        self.part = f"{self.part} ({target:.80})"
        if target == GETITEM:
            self._read_getitem(args, kwargs)
        elif target in ON_NUMBERS:
            self._read_arithmetic(target, args, kwargs)
        else:
            self._read_operator(target, args, kwargs)

    def _read_operator(self, target: str, args: list[JSON], kwargs: dict[str, JSON]) -> None:
        callee = find_operator(target)
        if callee is None:
            self.refuse("an operator of torch on tensors, or of fshard", target)
        if len(args) > len(callee.positional):
            self.refuse(f"at most {len(callee.positional)} arguments by their places", len(args))
        values = list(map(self._read_argument, args, callee.positional))
        keywords: dict[str, Any] = {}
        for name, value in kwargs.items():
            parameter = callee.keywords.get(name)
            if parameter is None:
                self.refuse(f"keywords of {[*callee.keywords]}", name)
            # The schema's own name, because torch.fx writes it into Python text.
            keywords[parameter.name] = self._read_argument(value, parameter)
        for parameter in (*callee.positional[len(args) :], *callee.keywords.values()):
            if parameter.is_required and parameter.name not in keywords:
                self.refuse(f"a value for {parameter.name!r}", None)
        if _is_collective(target):
            self._check_axis(values)
        self._append(self.graph.call_function(callee.function, tuple(values), keywords), callee.result)

    def _check_axis(self, values: list[Any]) -> None:
        """Refuse a collective whose axis and size are not those of its group."""
        *_, axis, size, place, _ = values
        expected = self._axes[int(place)]
        if (axis, size) != expected:
            self.refuse(f"a collective over the axis {expected}", f"{axis!r:.60} of {size} ranks")

    def _read_getitem(self, args: list[JSON], kwargs: dict[str, JSON]) -> None:
        """Take one of several results."""
        if len(args) != 2 or kwargs:
            self.refuse("a node and a number as arguments", [args, kwargs])
        number = self._read_number_of_node(args[0])
        index = args[1]
        result = self.results[number]
        results = result if isinstance(result, tuple) else ()
        # The length of a list is known only as the graph runs.
        size = 2**31 if result == "List[Tensor]" else len(results)
        if type(index) is not int or not 0 <= index < size:
            self.refuse("the number of a result", index)
        node = self.graph.call_function(operator.getitem, (self.nodes[number], index))
        self._append(node, results[index] if results else "Tensor")

    def _read_arithmetic(self, target: str, args: list[JSON], kwargs: dict[str, JSON]) -> None:
        """Compute with numbers, of which one at least is known only as the graph runs."""
        function, arity = ON_NUMBERS[target]
        if len(args) != arity or kwargs:
            self.refuse(f"{arity} numbers as arguments", [args, kwargs])
        values = [self._read_value(value, "number", target) for value in args]
        if not any(isinstance(value, Node) for value in values):
            self.refuse("a number that is known only as the graph runs", args)
        self._append(self.graph.call_function(function, tuple(values)), "number")

    def _read_argument(self, value: JSON, parameter: Parameter) -> Any:
        """Read the value of an argument of an operator."""
        kind = parameter.kind
        name = parameter.name
        if value is None and parameter.may_be_none:
            return None
        if not parameter.is_list:
            return self._read_value(value, kind, name)
        if type(value) is not list:
            self.refuse(f"{name!r} to be a list", value)
        entries = []
        for entry in value:
            is_none = entry is None and parameter.may_hold_none
            entries.append(None if is_none else self._read_value(entry, kind, name))
        return entries

    def _read_value(self, value: JSON, kind: str, name: str) -> Any:
        """Read one value of the kind that a schema asks for."""
        types, description = _KINDS[kind]
        content = self._read_object(value, kind, name) if type(value) is dict else value
        is_valid = type(content) in (Node, *types)
        if is_valid and content is value:
            is_valid = _is_value_of(name, value)
        if not is_valid:
            self.refuse(f"{name!r} to be {description}", value)
        return content

    def _read_object(self, value: dict[str, JSON], kind: str, name: str) -> Any:
        """Read a value that JSON has no form for, which stands in an object under the name of its form."""
        if len(value) != 1:
            return None
        ((form, content),) = value.items()
        if form == "node" and kind == "Tensor":
            return self._read_node(value, ("Tensor", "number"))
        if form == "node" and kind in NUMBERS:
            return self._read_node(value, ("number",))
        if form == name == "group":
            is_place = type(content) is int and 0 <= content < len(self._axes)
            return str(content) if is_place else None
        if form == name == "label":
            return json.dumps(content) if _is_label(content) else None
        if type(content) is not str:
            return None
        if form == "device":
            return _read_device(content)
        return _CONSTANTS.get((form, content))

    def _read_node(self, value: JSON, results: Sequence[str]) -> Node:
        """Read a reference to a node that has one of some kinds of results."""
        number = self._read_number_of_node(value)
        if self.results[number] not in results:
            self.refuse(f"a node whose result is a {' or a '.join(results)}", f"node {number}: {self.results[number]}")
        return self.nodes[number]

    def _read_number_of_node(self, value: JSON) -> int:
        """Read a reference to a node, which must stand before the one that is read."""
        number = value.get("node") if type(value) is dict and len(value) == 1 else None
        if type(number) is not int or not 0 <= number < len(self.nodes):
            self.refuse(f"a node before it, of {len(self.nodes)}", value)
        return number

    def refuse(self, expected: str, got: JSON) -> NoReturn:
        """Raise the error of the part that is read."""
        self._source.refuse(self.part, expected, got)


def _read_device(text: str) -> torch.device | None:
    try:
        return torch.device(text)
    except RuntimeError:
        return None


def _is_value_of(name: str, value: str | float) -> bool:
    """Whether a text or a number may be the value of an argument; groups and labels of collectives are objects."""
    if type(value) is int:
        return -(2**63) <= value < 2**63
    if not isinstance(value, str):
        return math.isfinite(value)
    if name in _ANY_TEXT:
        return _FX_COMMENT not in value
    return value in _WORDS.split() and name not in ("group", "label")


def _is_label(value: JSON) -> bool:
    """Whether a value has the parts of an `fs.comm.Label`: who asks, for which units and leaves, and of what."""
    if type(value) is not list or len(value) != 4:
        return False
    verb, units, leaves, parts = value
    if type(units) is not list or type(leaves) is not list:
        return False
    return all(type(text) is str and _FX_COMMENT not in text for text in (verb, *units, *leaves, parts))
