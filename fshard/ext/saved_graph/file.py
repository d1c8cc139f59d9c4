"""The file of a graph: JSON behind a digest, and the checks of everything that stands in it.

A digest finds damage. It is no signature: whoever writes a file can write its digest, so nothing is taken for right
because the digest matches.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import torch

import fshard as fs
from fshard.ext.saved_graph.nodes import NodeReader, ReadGraph
from fshard.ext.saved_graph.refusal import Source
from fshard.ext.saved_graph.structures import find_fault
from fshard.extend import expect, process_rank

JSON = Any
# A file begins with these bytes and its digest; another version would begin otherwise.
_HEAD = b'{"format": "fshard.graph",\n "version": 2,\n "digest": "'
# What stands between the digest and the body, and behind the body.
_MIDDLE, _TAIL = b'",\n "body": ', b"}\n"
_DIGEST_BYTES = 16
# A file has about 100 bytes for each operator; a reader would believe nothing in a larger one.
_MAX_BYTES = 1 << 30
_VERSIONS = MappingProxyType({"fshard": fs.__version__, "torch": torch.__version__})


class SavedGraph(NamedTuple):
    """The content of a file.

    Attributes:
        arguments: What a call is compared by: texts by their names.
        axes: Names and sizes of the axes of the arguments.
        graph: The operators.
        inputs: The leaves of the arguments that are inputs of the graph.
        result: The structure of the result, as `structures` writes it.
        specs: For each leaf of the result the number of the Sharded argument whose spec it has; None of others.
        donated: Leaves of the arguments that are donated.
        written: Those of them that something may be written to.
        facts: For each axis what ranks compare over it.
        told: The facts that hold before ranks have agreed on the leaves that any of them uses.
    """

    arguments: Mapping[str, str]
    axes: list[tuple[str, int]]
    graph: ReadGraph
    inputs: list[int]
    result: JSON
    specs: list[int | None]
    donated: list[int]
    written: list[int]
    facts: list[str | None]
    told: str


def file_of(directory: str | Path) -> Path:
    """The file of this rank."""
    return Path(directory) / f"graph-rank-{process_rank():05d}.json"


def encode(body: Mapping[str, JSON]) -> bytes:
    """Write what a file holds, with the versions of fshard and torch and a digest.

    Args:
        body: What `decode` reads: the fields of a SavedGraph, "nodes" and "outputs" in the place of "graph".

    Raises:
        ValueError: if `decode` would refuse it.
    """
    text = json.dumps({**_VERSIONS, **body}, allow_nan=False).encode()
    _read_body(text, Source("save_graph", "leave it out of the function"))
    return _sealed(text)


def read_file(path: Path) -> SavedGraph:
    """Read a file.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if `encode` of these versions did not write it; the error names the path and the part.
    """
    reader, remedy = f"load_graph: {path}", "save the graph again, on every rank"
    if not path.exists():
        raise FileNotFoundError(f"{reader}: there is no such file, so this rank has no graph; {remedy}")
    is_readable = path.is_file() and path.stat().st_size <= _MAX_BYTES
    expect(is_readable, reader, f"a file of at most {_MAX_BYTES} bytes", "another", remedy)
    data = path.read_bytes()
    is_graph = data.startswith(_HEAD) or _HEAD.startswith(data)
    expect(is_graph, reader, "a graph of version 2 of the format", "another file", remedy)
    start = len(_HEAD) + 2 * _DIGEST_BYTES + len(_MIDDLE)
    text = data[start : -len(_TAIL)]
    if data != _sealed(text):
        raise ValueError(f"{reader}: the digest does not match, so the file was damaged, cut off or edited; {remedy}")
    return _read_body(text, Source(reader, remedy))


def _sealed(text: bytes) -> bytes:
    """Put a body into a file with its digest."""
    digest = hashlib.blake2b(text, digest_size=_DIGEST_BYTES).hexdigest()
    return _HEAD + digest.encode() + _MIDDLE + text + _TAIL


def _read_body(text: bytes, source: Source) -> SavedGraph:
    """Read and check all that a file says, as far as it can be checked without arguments."""
    body = _parse(text, source)
    fields = {**_VERSIONS, **_FIELDS}
    if type(body) is not dict or body.keys() != fields.keys():
        source.refuse("body", f"an object of {[*fields]}", body)
    for name, version in _VERSIONS.items():
        if body[name] != version:
            source.refuse(name, version, body[name])
    for name, (holds, expected) in _FIELDS.items():
        if not holds(body[name]):
            source.refuse(name, expected, body[name])
    fault = find_fault(body["result"])
    if fault:
        source.refuse("result", "tuples, lists, dicts and parts of the arguments", fault)
    _check_lengths(body, source)
    axes = [(name, size) for name, size in body["axes"]]
    graph = NodeReader(source, axes).read(len(body["inputs"]), body["nodes"], body["outputs"])
    same = {name: body[name] for name in ("arguments", "inputs", "result", "specs", "donated", "written")}
    return SavedGraph(axes=axes, graph=graph, facts=body["facts"], told=body["told"], **same)


def _parse(text: bytes, source: Source) -> JSON:
    def refuse_number(name: str) -> NoReturn:
        raise ValueError(f"{name} is no number of JSON")

    try:
        return json.loads(text.decode(), parse_constant=refuse_number)
    except (ValueError, RecursionError) as error:
        source.refuse("body", "a text of JSON", str(error))


def _check_lengths(body: dict[str, JSON], source: Source) -> None:
    """Refuse fields that do not go together."""
    inputs, donated, written = ({*body[name]} for name in ("inputs", "donated", "written"))
    if not donated <= inputs:
        source.refuse("donated", "leaves that are inputs", min(donated - inputs))
    if not written <= donated:
        source.refuse("written", "leaves that are donated", min(written - donated))
    if len(body["specs"]) != len(body["outputs"]):
        source.refuse("specs", f"{len(body['outputs'])} of them, one for each output", len(body["specs"]))
    if len(body["facts"]) != len(body["axes"]):
        source.refuse("facts", f"{len(body['axes'])} of them, one for each axis", len(body["facts"]))


def _is_number(value: JSON) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _is_text(value: JSON) -> bool:
    return type(value) is str


def _are_leaves(value: JSON) -> bool:
    return type(value) is list and all(map(_is_number, value)) and value == sorted({*value})


def _are_texts(value: JSON) -> bool:
    return type(value) is dict and all(map(_is_text, value.values()))


def _are_axes(value: JSON) -> bool:
    if type(value) is not list or not all(type(axis) is list and len(axis) == 2 for axis in value):
        return False
    return all(_is_text(name) and _is_number(size) for name, size in value)


def _are_or_none(holds: Callable[[JSON], bool]) -> Callable[[JSON], bool]:
    """Make a test of a list with None or such entries."""
    return lambda value: type(value) is list and all(entry is None or holds(entry) for entry in value)


# The fields of a body: for each a test of its type, and the type in words. Nodes have checks of their own.
_FIELDS: Mapping[str, tuple[Callable[[JSON], bool], str]] = MappingProxyType(
    {
        "arguments": (_are_texts, "an object of texts"),
        "axes": (_are_axes, "a list of names and sizes"),
        "inputs": (_are_leaves, "a list of numbers that rise"),
        "nodes": (lambda value: type(value) is list, "a list"),
        "outputs": (lambda value: type(value) is list, "a list"),
        "result": (lambda value: type(value) is dict, "an object"),
        "specs": (_are_or_none(_is_number), "a list of numbers and nulls"),
        "donated": (_are_leaves, "a list of numbers that rise"),
        "written": (_are_leaves, "a list of numbers that rise"),
        "facts": (_are_or_none(_is_text), "a list of texts and nulls"),
        "told": (_is_text, "a text"),
    }
)
