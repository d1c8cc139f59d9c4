"""Graphs of jitted functions in files: traced once, and run in later processes without the function."""

import json
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

import fshard as fs
from fshard.extend import Jitted, Program, Traced, calling, describe, expect, flatten

VERSIONS = MappingProxyType({"format": "graph 1", "fshard": fs.__version__, "torch": torch.__version__})
# Torch's own values among the arguments of operators, by the names of their types.
CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)
# Operators are those of these namespaces of torch's, and Python's own on numbers.
NAMESPACES = ("aten", "fshard", "prims", "_c10d_functional")
_OF_PYTHON = ("getitem", "add", "sub", "mul", "truediv", "floordiv", "mod", "neg", "pow")
OF_PYTHON = MappingProxyType({name: getattr(operator, name) for name in _OF_PYTHON} | {"sqrt": math.sqrt})
Structure = Any


def save_graph(directory: str | Path, f: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Save the graph that a jitted function has for arguments; every rank must call this. Follows jax.export.

    Args:
        directory: Where each rank writes a file of its own, of JSON.
        f: What `fs.jit` returned, with the backend "graph".
        *args: Arguments as for a call, which is traced if need be, and not run.
        **kwargs: Keywords of the call.

    Raises:
        ValueError: if no file can hold a part of the graph: a tensor that the function closes over, a result whose spec
            no argument has, or a structure of results that is no tuple, list, dict or part of the arguments.

    >>> import tempfile, torch, fshard as fs
    >>> directory, x = tempfile.mkdtemp(), torch.zeros(2)
    >>> fs.save_graph(directory, fs.jit(lambda x: {"y": x.cos()}), x)
    >>> fs.load_graph(directory)(x)
    {'y': tensor([1., 1.])}
    """
    kept = isinstance(f, Jitted) and f.backend == "graph"
    expect(kept, "save_graph", 'f to be a function of fs.jit with the backend "graph"', describe(f))
    with calling("save_graph", lambda: flatten((args, kwargs)).axes):
        key, program, flat = f.found_for(args, kwargs)  # type: ignore[attr-defined]
    traced, place = program.traced, Path(directory)
    needed, remedy = "no tensor that the function closes over", "pass it as an argument"
    expect(not traced.closed, "save_graph", needed, f"{len(traced.closed)}", remedy)
    groups = {axis.group_name: f"group {n}" for n, axis in enumerate(flat.axes)}
    specs = [leaf.spec for leaf in flat.leaves if isinstance(leaf, fs.Sharded)]
    strange = [spec for spec in traced.specs if spec is not None and spec not in specs]
    expect(not strange, "save_graph", "results with specs that arguments have", f"{strange[:1]}")
    body = {
        **VERSIONS,
        "arguments": _arguments(key, flat),
        "nodes": [*_written(traced.graph.graph, groups)],
        "inputs": traced.inputs,
        "result": _structure(traced.treedef, flat.treedef),
        "specs": [None if spec is None else specs.index(spec) for spec in traced.specs],
        "donated": program.donated,
        "written": sorted(program.written),
        "facts": [program.facts.get(axis) for axis in flat.axes],
        "told": program.told,
    }
    place.mkdir(parents=True, exist_ok=True)
    (place / _file(flat)).write_text(json.dumps(body))


def load_graph(directory: str | Path) -> Callable[..., Any]:
    """Make a function of a graph that `save_graph` wrote, for calls with the same arguments but for tensors' values.

    Args:
        directory: Where the ranks wrote it.

    Returns:
        A function like the one that was saved; it knows nothing of the code that the graph was traced from.

    Raises:
        ValueError: by the function returned, where versions, this rank's place, or the arguments are others, by name.
        FileNotFoundError: by the function returned, if there is no file for this rank.

    >>> import tempfile, torch, fshard as fs
    >>> directory = tempfile.mkdtemp()
    >>> fs.save_graph(directory, fs.jit(lambda x: 2 * x), torch.zeros(2))
    >>> step = fs.load_graph(directory)
    >>> step(torch.ones(2)), step.traces
    (tensor([2., 2.]), ['read from a file'])
    """
    return _Loaded(Path(directory))


class _Loaded(Jitted):
    """A jitted function whose graphs are read rather than traced."""

    def __init__(self, directory: Path) -> None:
        super().__init__(_function, (), (), "graph")
        self._directory = directory

    def program_for(self, key: Any, flat: Any) -> Program:
        body = json.loads((self._directory / _file(flat)).read_text())
        found = {**VERSIONS, **_arguments(key, flat)}
        saved = {**{name: body[name] for name in VERSIONS}, **body["arguments"]}
        wrong = [name for name in {**saved, **found} if saved.get(name) != found.get(name)]
        told = [(f"{name}: {saved.get(name)}", f"{found.get(name)}") for name in wrong[:1]] or [("", "")]
        expect(not wrong, "load_graph", *told[0], "save the graph again, for these arguments")
        specs = [leaf.spec for leaf in flat.leaves if isinstance(leaf, fs.Sharded)]
        graph = _read(body["nodes"], {f"group {n}": axis.group_name for n, axis in enumerate(flat.axes)})
        treedef = flatten(_made(body["result"], flat.treedef)).treedef
        results = [None if n is None else specs[n] for n in body["specs"]]
        traced = Traced(GraphModule(torch.nn.Module(), graph), body["inputs"], treedef, results, [])
        facts = {axis: text for axis, text in zip(flat.axes, body["facts"], strict=True) if text is not None}
        self.traces.append("read from a file")
        return Program(traced, body["donated"], {*body["written"]}, [], facts, body["told"], traced.graph)


def _function(*_: Any, **__: Any) -> None:
    needed = "a call outside of fs.jit, torch.func and modes, on tensors that require no gradient"
    expect(False, "load_graph", needed, "another", "call the function itself, which no file has")


def _file(flat: Any) -> str:
    """Each rank has a graph of its own."""
    return "-".join(["graph", *(f"{axis.name}{fs.axis_index(axis)}" for axis in flat.axes)]) + ".json"


def _arguments(key: Any, flat: Any) -> dict[str, str]:
    """All that a call is compared by, as texts without names of groups, which are others in each process."""
    texts = {"structure": str(flat.treedef), **{name: str(value) for name, value in key.facts(flat.paths).items()}}
    for axis in flat.axes:
        texts = {name: text.replace(f"group_name={axis.group_name!r}", "") for name, text in texts.items()}
    return texts


def _structure(treedef: Any, given: Any) -> Structure:
    """Describe the structure of a result: as parts of the arguments', and tuples, lists and dicts of such."""
    known = {part: path for path, part in reversed([*_parts(given, ())])}
    if treedef in known:
        return {"as": known[treedef]}
    children = [_structure(child, given) for child in treedef.children()]
    kinds = {tuple: "tuple", list: "list", dict: "dict"}
    remedy = "return it in an argument's place"
    expect(treedef.type in kinds, "save_graph", "results in tuples, lists and dicts", f"{treedef}"[:60], remedy)
    return {kinds[treedef.type]: children, "keys": treedef.entries()}


def _parts(treedef: Any, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Any]]:
    yield path, treedef
    for n, child in enumerate(treedef.children()):
        yield from _parts(child, (*path, n))


def _made(structure: Structure, given: Any) -> Any:
    """Make a tree of a structure, with numbers for leaves."""
    if "as" in structure:
        for n in structure["as"]:
            given = given.child(n)
        return given.unflatten(range(given.num_leaves))
    children = [_made(child, given) for kind in ("tuple", "list", "dict") for child in structure.get(kind, ())]
    if "dict" in structure:
        return dict(zip(structure["keys"], children, strict=True))
    return tuple(children) if "tuple" in structure else children


def _written(graph: Graph, groups: dict[str, str]) -> Iterator[Any]:
    """Write nodes down: name of the operator, arguments and keywords, in which a node is its number."""
    numbers = {node: n for n, node in enumerate(graph.nodes)}

    def value(x: Any) -> Any:
        if isinstance(x, Node):
            return {"node": numbers[x]}
        if isinstance(x, CONSTANTS):
            return {"torch": str(x).removeprefix("torch.")}
        if isinstance(x, torch.device):
            return {"device": str(x)}
        if isinstance(x, dict):
            return {"dict": {name: value(y) for name, y in x.items()}}
        if isinstance(x, list | tuple):
            return [value(y) for y in x]
        expect(
            isinstance(x, bool | int | float | str | None), "save_graph", "numbers and texts in a graph", describe(x)
        )
        return groups.get(x, x) if isinstance(x, str) else x

    names = {function: name for name, function in OF_PYTHON.items()}
    for node in graph.nodes:
        target = names.get(node.target, str(node.target)) if node.op == "call_function" else ""
        _function_of(node.op, target, "save_graph")
        yield node.op, target, value(node.args), value(node.kwargs)


def _function_of(op: str, target: str, what: str) -> Callable[..., Any] | None:
    """Find an operator by its name: a file is data, and can name no other functions."""
    if op != "call_function" or target in OF_PYTHON:
        return OF_PYTHON.get(target)
    expect(target.partition(".")[0] in NAMESPACES, what, f"operators of {NAMESPACES}", f"{target:.40}")
    found: Callable[..., Any] = attrgetter(target)(torch.ops)
    return found


def _read(nodes: Sequence[Any], groups: dict[str, str]) -> Graph:
    graph, made = Graph(), list[Node]()

    def value(x: Any) -> Any:
        if isinstance(x, list):
            return [value(y) for y in x]
        if not isinstance(x, dict):
            return groups.get(x, x) if isinstance(x, str) else x
        ((kind, y),) = x.items()
        match kind:
            case "node":
                return made[y]
            case "torch":
                return getattr(torch, y)
            case "device":
                return torch.device(y)
        return {name: value(z) for name, z in y.items()}

    for op, target, args, kwargs in nodes:
        if (function := _function_of(op, target, "load_graph")) is not None:
            made.append(graph.call_function(function, tuple(value(args)), value(kwargs)))
        elif op == "placeholder":
            made.append(graph.placeholder(f"input_{len(made)}"))
        else:
            made.append(graph.output(*value(args)))
    return graph
