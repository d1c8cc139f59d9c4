"""Graphs of jitted functions in files: traced once, and run in later processes without the function.

- `operators`: the operators that a file may name.
- `nodes`: the operators of a graph as JSON.
- `structures`: the structure of a result as JSON.
- `cache`: files that a restarted program finds by itself.
- `identity`: a digest of all that a trace of a function reads.
- `file`: the file, its digest and its checks.
- `forms`: forms of values in a file, and errors of what it says.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

import fshard as fs
from fshard.ext import _compat
from fshard.ext.saved_graph.file import SavedGraph, encode, locate_file, read_file
from fshard.ext.saved_graph.nodes import with_groups, write_nodes
from fshard.ext.saved_graph.structures import make_tree, write_structure
from fshard.extend import Jitted, Program, Traced, calling, describe, flatten


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
    if not isinstance(f, Jitted) or f.backend != "graph":
        raise ValueError(f'save_graph: f must be a function of fs.jit with the backend "graph", not {describe(f)}.')
    with calling("save_graph", lambda: flatten((args, kwargs)).axes):
        key, program, flat = f.find_call(args, kwargs)
    path = locate_file(directory)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_program(key, program, flat, sources={}))


def encode_program(key: Any, program: Program, flat: Any, sources: Mapping[str, str]) -> bytes:
    """Write a program as the content of a file.

    Args:
        key: The signature of the call that it is for.
        program: The program.
        flat: The arguments of the call.
        sources: Digests of the files that the graph depends on, by path.

    Raises:
        ValueError: as `save_graph`.
    """
    traced = program.traced
    if traced.captured:
        raise ValueError(
            f"save_graph: the function closes over tensors ({len(traced.captured)} of them), which a file does not "
            "hold. Pass them as arguments."
        )
    body = {
        "arguments": _describe_arguments(key, flat),
        "axes": [(axis.name, axis.size) for axis in flat.axes],
        "inputs": traced.input_leaves,
        **write_nodes(traced.module.graph, flat.axes),
        "result": write_structure(traced.treedef, flat.treedef),
        "specs": _find_places(traced.specs, _list_specs(flat)),
        "donated": program.donated_leaves,
        "written": sorted(program.overwritten_leaves),
        "facts": [program.facts.get(axis) for axis in flat.axes],
        "trace_facts": program.trace_facts,
        "sources": dict(sources),
    }
    return encode(body)


def _find_places(results: Sequence[Any], specs: list[Any]) -> list[int | None]:
    """Find the place of each result's spec among those of the arguments; None of a result without a spec."""
    places: list[int | None] = []
    for spec in results:
        if spec is not None and spec not in specs:
            raise ValueError(
                f"save_graph: a result has a spec that no argument has ({spec}). Return a leaf that is laid out as one "
                "of the arguments."
            )
        places.append(None if spec is None else specs.index(spec))
    return places


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
    path = locate_file(directory)
    return _Loaded(path, read_file(path))


class _Loaded(Jitted):
    """A jitted function whose graph is read rather than traced."""

    def __init__(self, path: Path, saved: SavedGraph) -> None:
        super().__init__(_refuse_to_run, (), (), (), "graph", ())
        self._path = path
        self._saved = saved

    def make_program(self, key: Any, flat: Any) -> Program:
        saved = self._saved
        arguments = _describe_arguments(key, flat)
        for name in {**saved.arguments, **arguments}:
            expected, got = saved.arguments.get(name), arguments.get(name)
            if got != expected:
                raise ValueError(
                    f"load_graph: the graph is for {name}: {expected}, got {got}. Save it again for these arguments."
                )
        self._check_leaves(flat)
        specs = _list_specs(flat)
        graph = with_groups(saved.graph, [axis.group_name for axis in flat.axes])
        traced = Traced(
            _compat.lazy_module(graph),
            saved.inputs,
            self._make_treedef(flat),
            specs=[None if place is None else specs[place] for place in saved.specs],
            captured=[],
        )
        facts = {axis: text for axis, text in zip(flat.axes, saved.facts, strict=True) if text is not None}
        return Program(
            traced, saved.donated, set(saved.written), [], facts, saved.trace_facts, origin="read from a file"
        )

    def trace_call(self, args: Any, kwargs: Any) -> NoReturn:
        raise ValueError(
            "load_graph: a saved graph has no shapes to read, plan or report. Use the function that it was saved from."
        )

    def _check_leaves(self, flat: Any) -> None:
        """Refuse a file whose numbers of leaves and axes are not those of the arguments that it says it is for."""
        saved = self._saved
        tensors = [n for n, leaf in enumerate(flat.leaves) if isinstance(leaf, torch.Tensor | fs.Sharded)]
        axes = [[axis.name, axis.size] for axis in flat.axes]
        largest_place = max((place for place in saved.specs if place is not None), default=-1)
        if (saved.inputs, saved.axes) != (tensors, axes) or largest_place >= len(_list_specs(flat)):
            self._refuse("inputs, axes and specs are not those of the arguments")

    def _make_treedef(self, flat: Any) -> Any:
        """Make the structure of the result."""
        try:
            treedef = flatten(make_tree(self._saved.result, flat.treedef)).treedef
        except LookupError:
            self._refuse("result has parts that the arguments do not have")
        if treedef.num_leaves != len(self._saved.specs):
            self._refuse("result does not have one leaf for each output")
        return treedef

    def _refuse(self, problem: str) -> NoReturn:
        raise ValueError(f"load_graph: {self._path}: its {problem}. Save the graph again.")


def _refuse_to_run(*_: Any, **__: Any) -> NoReturn:
    raise ValueError(
        "load_graph: a saved graph cannot run inside fs.jit, under torch.func or a mode, or on tensors that require a "
        "gradient. Call the function that it was saved from."
    )


def _list_specs(flat: Any) -> list[Any]:
    """List the specs of the leaves that are Sharded."""
    return [leaf.spec for leaf in flat.sharded]


def _describe_arguments(key: Any, flat: Any) -> dict[str, str]:
    """Describe all by which calls are told apart, without names of groups, which are others in each process."""
    texts = {}
    for name, value in {"structure": flat.treedef, **key.list_entries(flat.paths)}.items():
        text = str(value)
        for axis in flat.axes:
            text = text.replace(f"group_name={axis.group_name!r}", "")
        texts[name] = text
    return texts
