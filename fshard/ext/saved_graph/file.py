"""The file of a graph: JSON behind a digest, and the checks of everything that stands in it.

A digest finds damage. It is no signature: whoever writes a file can write its digest, so nothing is taken for right
because the digest matches.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import torch
from torch.fx import Graph

import fshard as fs
from fshard.ext.saved_graph.forms import Source, has_form
from fshard.ext.saved_graph.nodes import NodeReader
from fshard.ext.saved_graph.structures import check_structure
from fshard.extend import files, process_rank

JSON = Any
# A file begins with these bytes and its digest; another version would begin otherwise.
_HEAD = b'{"format": "fshard.graph",\n "version": 3,\n "digest": "'
# Between the digest and the body, and behind the body.
_MIDDLE = b'",\n "body": '
_TAIL = b"}\n"
# A file has about 100 bytes for each operator, so no graph needs a larger one.
_MAX_BYTES = 1 << 30
_VERSIONS = MappingProxyType({"fshard": fs.__version__, "torch": torch.__version__})
# The fields of a body, each with its form and this in words. `NodeReader` checks nodes and outputs.
_FIELDS: Mapping[str, tuple[Any, str]] = MappingProxyType(
    {
        "arguments": ({str: str}, "an object of texts"),
        "axes": ([(str, int)], "a list of names and sizes"),
        "inputs": ([int], "a list of numbers"),
        "nodes": (list, "a list"),
        "outputs": (list, "a list"),
        "result": (dict, "an object"),
        "specs": ([frozenset((int, None))], "a list of numbers and nulls"),
        "donated": ([int], "a list of numbers"),
        "written": ([int], "a list of numbers"),
        "facts": ([frozenset((str, None))], "a list of texts and nulls"),
        "trace_facts": (str, "a text"),
        "sources": ({str: str}, "an object of texts"),
    }
)


class SavedGraph(NamedTuple):
    """The content of a file.

    Attributes:
        arguments: Descriptions of the arguments by their names, which those of a call must equal.
        axes: Names and sizes of the axes of the arguments, as lists.
        graph: The operators.
        inputs: The leaves of the arguments that are inputs of the graph.
        result: The structure of the result, as `write_structure` writes it.
        specs: For each leaf of the result the number of the Sharded argument whose spec it has; None of others.
        donated: Leaves of the arguments that are donated.
        written: Those of them that something may be written to.
        facts: For each axis what ranks compare over it.
        trace_facts: What ranks compare in their first trace, before they agree on the leaves that any of them uses.
        sources: Digests of the files of source code that a cached graph depends on, by path; else empty.
    """

    arguments: Mapping[str, str]
    axes: list[Any]
    graph: Graph
    inputs: list[int]
    result: JSON
    specs: list[int | None]
    donated: list[int]
    written: list[int]
    facts: list[str | None]
    trace_facts: str
    sources: Mapping[str, str]


def locate_file(directory: str | Path) -> Path:
    """Return the path of this rank's file."""
    return Path(directory) / f"graph-rank-{process_rank():05d}.json"


def encode(body: Mapping[str, JSON]) -> bytes:
    """Write what a file holds, with the versions of fshard and torch and a digest.

    Args:
        body: The fields of a SavedGraph, with "nodes" and "outputs" in the place of "graph".

    Raises:
        ValueError: if `read_file` would refuse it.
    """
    text = json.dumps({**_VERSIONS, **body}, allow_nan=False).encode()
    _read_body(text, Source("save_graph", "leave it out of the function"))
    return _seal(text)


def read_file(path: Path) -> SavedGraph:
    """Read a file.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if `encode` of these versions did not write it; the error names the path and the part.
    """
    reader = f"load_graph: {path}"
    remedy = "save the graph again, on every rank"
    if not path.exists():
        raise FileNotFoundError(f"{reader}: there is no such file, so this rank has no graph; {remedy}")
    if not path.is_file() or path.stat().st_size > _MAX_BYTES:
        raise ValueError(f"{reader} must be a file of at most {_MAX_BYTES} bytes; {remedy}")
    data = path.read_bytes()
    if not data.startswith(_HEAD) and not _HEAD.startswith(data):
        raise ValueError(f"{reader} is no graph of version 3 of the format; {remedy}")
    start = len(_seal(b"")) - len(_TAIL)
    text = data[start : -len(_TAIL)]
    if data != _seal(text):
        raise ValueError(f"{reader}: the digest does not match, so the file was damaged, cut off or edited; {remedy}")
    return _read_body(text, Source(reader, remedy))


def _seal(text: bytes) -> bytes:
    """Put a body into a file with its digest."""
    return _HEAD + files.digest(text).encode() + _MIDDLE + text + _TAIL


def _read_body(text: bytes, source: Source) -> SavedGraph:
    """Read and check all that a file says, as far as it can be checked without arguments."""
    body = _parse(text, source)
    names = [*_VERSIONS, *_FIELDS]
    if type(body) is not dict or body.keys() != {*names}:
        source.refuse("body", f"an object of {names}", body)
    for name, version in _VERSIONS.items():
        got = body.pop(name)
        if got != version:
            source.refuse(name, version, got)
    for name, (form, words) in _FIELDS.items():
        if not has_form(body[name], form):
            source.refuse(name, words, body[name])
    check_structure(body["result"], source)
    _check_lengths(body, source)
    reader = NodeReader(source, body["axes"])
    graph = reader.read(len(body["inputs"]), body.pop("nodes"), body.pop("outputs"))
    return SavedGraph(graph=graph, **body)


def _parse(text: bytes, source: Source) -> JSON:
    def refuse_number(name: str) -> NoReturn:
        raise ValueError(f"{name} is no number of JSON")

    try:
        return json.loads(text.decode(), parse_constant=refuse_number)
    except (ValueError, RecursionError) as error:
        source.refuse("body", "a text of JSON", str(error))


def _check_lengths(body: dict[str, JSON], source: Source) -> None:
    """Refuse fields that do not go together."""
    for name, containing in (("donated", "inputs"), ("written", "donated")):
        others = set(body[name]) - set(body[containing])
        if others or len(body[name]) != len({*body[name]}):
            source.refuse(name, f"leaves that are {containing}, each once", body[name])
    for name, counted, kind in (("specs", "outputs", "output"), ("facts", "axes", "axis")):
        size = len(body[counted])
        if len(body[name]) != size:
            source.refuse(name, f"{size} of them, one for each {kind}", len(body[name]))
