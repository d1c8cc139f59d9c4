"""Graphs of jitted functions in files: traced once, and run in later processes without the function.

- `operators`: the operators that a file may name.
- `nodes`: the operators of a graph as JSON.
- `structures`: the structure of a result as JSON.
- `file`: the file, its digest and its checks.
- `refusal`: errors of what a file says.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fshard as fs
from fshard.ext import _compat
from fshard.ext.saved_graph.file import SavedGraph, encode, file_of, read_file
from fshard.ext.saved_graph.nodes import write_nodes
from fshard.ext.saved_graph.structures import make_tree, write_structure
from fshard.extend import Jitted, Program, Traced, calling, describe, expect, flatten


def save_graph(directory: str | Path, f: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Save the graph that a jitted function has for arguments; every rank must call this. Follows jax.export.

    Args:
        directory: Where each rank writes a file of its own, of JSON.
        f: What `fs.jit` returned, with the backend "graph".
        *args: Arguments as for a call, which is traced if need be, and not run.
        **kwargs: Keywords of the call.

    Raises:
        ValueError: if no file can hold a part of the graph: a tensor that the function closes over, a collective over
            an axis that no argument has, an operator that is not torch's or fshard's, a result whose spec no argument
            has, or a structure of results that is no tuple, list, dict or part of the arguments.

    >>> import tempfile, torch, fshard as fs
    >>> directory, x = tempfile.mkdtemp(), torch.zeros(2)
    >>> fs.save_graph(directory, fs.jit(lambda x: {"y": x.cos()}), x)
    >>> fs.load_graph(directory)(x)
    {'y': tensor([1., 1.])}
    """
    is_graph = isinstance(f, Jitted) and f.backend == "graph"
    expect(is_graph, "save_graph", 'f to be a function of fs.jit with the backend "graph"', describe(f))
    with calling("save_graph", lambda: flatten((args, kwargs)).axes):
        key, program, flat = f.find_call(args, kwargs)  # type: ignore[attr-defined]
    traced = program.traced
    expected, remedy = "no tensor that the function closes over", "pass it as an argument"
    expect(not traced.captured, "save_graph", expected, f"{len(traced.captured)}", remedy)
    specs = _specs_in(flat)
    strange = [spec for spec in traced.specs if spec is not None and spec not in specs]
    expect(not strange, "save_graph", "results with specs that arguments have", f"{strange[:1]}")
    body = {
        "arguments": _arguments(key, flat),
        "axes": [(axis.name, axis.size) for axis in flat.axes],
        "inputs": traced.input_leaves,
        **write_nodes(traced.module.graph, flat.axes),
        "result": write_structure(traced.treedef, flat.treedef),
        "specs": [None if spec is None else specs.index(spec) for spec in traced.specs],
        "donated": program.donated_leaves,
        "written": sorted(program.overwritten_leaves),
        "facts": [program.facts.get(axis) for axis in flat.axes],
        "told": program.trace_facts,
    }
    content = encode(body)
    path = file_of(directory)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def load_graph(directory: str | Path) -> Callable[..., Any]:
    """Make a function of a graph that `save_graph` wrote, for calls with the same arguments but for tensors' values.

    The file is read now. It is data: it can name operators of torch on tensors, fshard's collectives and numbers, and
    whatever else it says is refused. It decides what is computed all the same, so load files that you trust to be
    right. A digest finds files that were damaged, not files that somebody wrote on purpose.

    Args:
        directory: Where the ranks wrote it; each reads the file that the same rank of the run wrote.

    Returns:
        A function like the one that was saved; it knows nothing of the code that the graph was traced from.

    Raises:
        FileNotFoundError: if there is no file of this rank.
        ValueError: if the file is damaged, of another version, or says what no graph does, with the path and the part;
            by the function returned, where this rank's place or the arguments are others, by name.

    >>> import tempfile, torch, fshard as fs
    >>> directory = tempfile.mkdtemp()
    >>> fs.save_graph(directory, fs.jit(lambda x: 2 * x), torch.zeros(2))
    >>> step = fs.load_graph(directory)
    >>> step(torch.ones(2)), step.traces
    (tensor([2., 2.]), ['read from a file'])
    """
    path = file_of(directory)
    return _Loaded(path, read_file(path))


class _Loaded(Jitted):
    """A jitted function whose graph is read rather than traced."""

    def __init__(self, path: Path, saved: SavedGraph) -> None:
        super().__init__(_refuse_to_run, (), (), "graph")
        self._path = path
        self._saved = saved

    def make_program(self, key: Any, flat: Any) -> Program:
        saved = self._saved
        given = _arguments(key, flat)
        for name in {**saved.arguments, **given}:
            expected, got = f"{name}: {saved.arguments.get(name)}", f"{given.get(name)}"
            is_same = saved.arguments.get(name) == given.get(name)
            expect(is_same, "load_graph", expected, got, "save the graph again, for these arguments")
        self._check_leaves(flat)
        specs = _specs_in(flat)
        results = [None if n is None else specs[n] for n in saved.specs]
        module = _compat.lazy_module(saved.graph.with_groups([axis.group_name for axis in flat.axes]))
        traced = Traced(module, saved.inputs, self._treedef(flat), results, [])
        facts = {axis: text for axis, text in zip(flat.axes, saved.facts, strict=True) if text is not None}
        return Program(traced, saved.donated, {*saved.written}, [], facts, saved.told)

    def explain_trace(self, key: Any, flat: Any) -> str:
        return "read from a file"

    def _check_leaves(self, flat: Any) -> None:
        """Refuse a file whose numbers of leaves and axes are not those of the arguments that it says it is for."""
        saved = self._saved
        tensors = [n for n, leaf in enumerate(flat.leaves) if isinstance(leaf, torch.Tensor | fs.Sharded)]
        self._expect(saved.inputs == tensors, "the tensors of the arguments as inputs")
        axes = [(axis.name, axis.size) for axis in flat.axes]
        self._expect(saved.axes == axes, "the axes of the arguments")
        highest = max((n for n in saved.specs if n is not None), default=-1)
        self._expect(highest < len(_specs_in(flat)), "specs of the arguments")

    def _treedef(self, flat: Any) -> Any:
        """The structure of the result."""
        try:
            treedef = flatten(make_tree(self._saved.result, flat.treedef)).treedef
        except LookupError:
            treedef = None
        is_fitting = treedef is not None and treedef.num_leaves == len(self._saved.specs)
        self._expect(is_fitting, "a result of parts of the arguments, with a leaf for each output")
        return treedef

    def _expect(self, holds: bool, expected: str) -> None:
        expect(holds, f"load_graph: {self._path}", expected, "others", "save the graph again")


def _refuse_to_run(*_: Any, **__: Any) -> None:
    expected = "a call outside of fs.jit, torch.func and modes, on tensors that require no gradient"
    expect(False, "load_graph", expected, "another", "call the function itself, which no file has")


def _specs_in(flat: Any) -> list[Any]:
    """The specs of the leaves that are Sharded."""
    return [leaf.spec for leaf in flat.leaves if isinstance(leaf, fs.Sharded)]


def _arguments(key: Any, flat: Any) -> dict[str, str]:
    """All that a call is compared by, as texts without names of groups, which are others in each process."""
    texts = {
        "structure": str(flat.treedef),
        **{name: str(value) for name, value in key.list_entries(flat.paths).items()},
    }
    for axis in flat.axes:
        texts = {name: text.replace(f"group_name={axis.group_name!r}", "") for name, text in texts.items()}
    return texts
