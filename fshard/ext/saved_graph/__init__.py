"""Graphs of jitted functions in files: traced once, and run in later processes without the function.

- `operators`: the operators that a file may name.
- `nodes`: the operators of a graph as JSON.
- `structures`: the structure of a result as JSON.
- `cache`: files that a restarted program finds by itself.
- `identity`: a digest of all that a trace of a function reads.
- `file`: the file, its digest and its fields.
- `source`: where a graph is read from, for errors.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

import fshard as fs
from fshard.ext import _compat
from fshard.ext.saved_graph.file import SavedGraph, encode, locate_file, name_source, read_file, write_file
from fshard.ext.saved_graph.nodes import write_nodes
from fshard.ext.saved_graph.source import Source
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
            has, or a part of a result that is no tuple, list or dict, nor of a class that is in the arguments.
        OSError: if the file cannot be written, with its path. A graph that was there before stays.

    >>> import tempfile, torch, fshard as fs
    >>> directory, x = tempfile.mkdtemp(), torch.zeros(2)
    >>> fs.save_graph(directory, fs.jit(lambda x: {"y": x.cos()}), x)
    >>> fs.load_graph(directory)(x)
    {'y': tensor([1., 1.])}
    """
    if not isinstance(f, Jitted) or f.backend != "graph":
        raise ValueError(f'save_graph: f must be a function of fs.jit with the backend "graph", not {describe(f)}.')
    with calling("save_graph", lambda: flatten((args, kwargs)).axes):
        signature, program, flat = f.find_call(args, kwargs)
    write_file(locate_file(directory), encode_program(signature, program, flat, sources={}))


def encode_program(signature: Any, program: Program, flat: Any, sources: Mapping[str, str]) -> bytes:
    """Write a program as the content of a file.

    Args:
        signature: The signature of the call that it is for.
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
    specs = [leaf.spec for leaf in flat.sharded]
    body = {
        "arguments": _describe_arguments(signature, flat),
        "inputs": traced.input_leaves,
        **write_nodes(traced.module.graph, flat.axes),
        "result": write_structure(traced.treedef, flat.treedef),
        "specs": [None if spec is None else _find_place(spec, specs) for spec in traced.specs],
        "donated": program.donated_leaves,
        "written": sorted(program.overwritten_leaves),
        "facts": [program.facts[axis] for axis in flat.axes],
        "trace_facts": program.trace_facts,
        "sources": dict(sources),
    }
    return encode(body, flat.axes)


def _find_place(spec: Any, specs: list[Any]) -> int:
    """Find the place of a result's spec among those of the arguments."""
    if spec not in specs:
        raise ValueError(
            f"save_graph: a result has a spec that no argument has ({spec}). Return a leaf that is laid out as one of "
            "the arguments."
        )
    return specs.index(spec)


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
            by the function returned, where this rank's place or the arguments are others, by name, or where what the
            file says of arguments and results does not fit these.

    >>> import tempfile, torch, fshard as fs
    >>> directory = tempfile.mkdtemp()
    >>> fs.save_graph(directory, fs.jit(lambda x: 2 * x), torch.zeros(2))
    >>> step = fs.load_graph(directory)
    >>> step(torch.ones(2)), step.traces
    (tensor([2., 2.]), ['read from a file'])
    """
    path = locate_file(directory)
    saved = read_file(path)
    # A call reads the nodes again, with its axes in the place of these.
    saved.read_graph(name_source(path), [fs.Axis("axis", 1, "group")] * len(saved.facts))
    return LoadedFunction(name_source(path), saved)


class LoadedFunction(Jitted):
    """A jitted function whose graph is read rather than traced."""

    def __init__(self, source: Source, saved: SavedGraph) -> None:
        super().__init__(_refuse_to_run, (), (), (), "graph", ())
        self._source = source
        self._saved = saved

    def make_program(self, signature: Any, flat: Any) -> Program:
        """Read the program of a call, whose arguments must be those that the graph was traced for."""
        self._check_arguments(_describe_arguments(signature, flat))
        saved = self._saved
        module = _compat.lazy_module(saved.read_graph(self._source, flat.axes))
        with self._source.reading("result"):
            inputs = [n for n, tensor in enumerate(flat.tensors) if isinstance(tensor, torch.Tensor)]
            are_donated = set(saved.donated)
            are_written = set(saved.written)
            donated = [leaf for leaf in inputs if leaf in are_donated]
            written = [leaf for leaf in donated if leaf in are_written]
            treedef = flatten(make_tree(saved.result, flat.treedef)).treedef
            are_inputs = (saved.inputs, saved.donated, saved.written) == (inputs, donated, written)
            if not are_inputs or not treedef.num_leaves == len(saved.outputs) == len(saved.specs):
                raise ValueError("the leaves are not those of the arguments and of the result")
            specs = [leaf.spec for leaf in flat.sharded]
            specs_of_result = [None if n is None else specs[n] for n in saved.specs]
            return Program(
                Traced(module, inputs, treedef, specs_of_result, captured=[]),
                donated_leaves=donated,
                overwritten_leaves=set(written),
                captures=[],
                facts=dict(zip(flat.axes, saved.facts, strict=True)),
                trace_facts=saved.trace_facts,
                origin="read from a file",
            )

    def _check_arguments(self, arguments: Mapping[str, str]) -> None:
        """Refuse a call whose arguments are described otherwise than those that the graph was traced for."""
        for name in {**self._saved.arguments, **arguments}:
            expected = self._saved.arguments.get(name)
            got = arguments.get(name)
            if got != expected:
                raise ValueError(
                    f"load_graph: the graph is for {name}: {expected}, got {got}. Save it again for these arguments."
                )

    def trace_call(self, args: Any, kwargs: Any) -> NoReturn:
        """Refuse what asks for the graph with the shapes of its tensors."""
        raise ValueError(
            "load_graph: a saved graph has no shapes to read, plan or report. Use the function that it was saved from."
        )


def _refuse_to_run(*_: Any, **__: Any) -> NoReturn:
    raise ValueError(
        "load_graph: a saved graph cannot run inside fs.jit, under torch.func or a mode, or on tensors that require a "
        "gradient. Call the function that it was saved from."
    )


def _describe_arguments(signature: Any, flat: Any) -> dict[str, str]:
    """Describe all by which calls are told apart, without names of groups, which are others in each process."""
    texts = {}
    for name, value in {"structure": flat.treedef, **signature.list_entries(flat.paths)}.items():
        text = str(value)
        for axis in flat.axes:
            text = text.replace(f"group_name={axis.group_name!r}", "")
        texts[name] = text
    return texts
