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
from torch.fx import Graph

import fshard as fs
from fshard.ext.saved_graph.nodes import NodeReader
from fshard.ext.saved_graph.refusal import Source
from fshard.ext.saved_graph.structures import check_structure
from fshard.extend import process_rank

JSON = Any
# A file begins with these bytes and its digest; another version would begin otherwise.
_HEAD = b'{"format": "fshard.graph",\n "version": 2,\n "digest": "'
# Between the digest and the body, and behind the body.
_MIDDLE = b'",\n "body": '
_TAIL = b"}\n"
_DIGEST_BYTES = 16
# A file has about 100 bytes for each operator, so no graph needs a larger one.
_MAX_BYTES = 1 << 30
_VERSIONS = MappingProxyType({"fshard": fs.__version__, "torch": torch.__version__})


class SavedGraph(NamedTuple):
    """The content of a file.

    Attributes:
        arguments: Descriptions of the arguments by their names, which those of a call must equal.
        axes: Names and sizes of the axes of the arguments.
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
    axes: list[tuple[str, int]]
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
        body: The fields of a SavedGraph, with "nodes" and "outputs" in the place of "graph", and "told" in that of
            "trace_facts".

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
        raise ValueError(f"{reader} is no graph of version 2 of the format; {remedy}")
    start = len(_HEAD) + 2 * _DIGEST_BYTES + len(_MIDDLE)
    text = data[start : -len(_TAIL)]
    if data != _seal(text):
        raise ValueError(f"{reader}: the digest does not match, so the file was damaged, cut off or edited; {remedy}")
    return _read_body(text, Source(reader, remedy))


def _seal(text: bytes) -> bytes:
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
    for name, (is_valid, expected) in _FIELDS.items():
        if not is_valid(body[name]):
            source.refuse(name, expected, body[name])
    check_structure(body["result"], source)
    _check_lengths(body, source)
    axes = [(name, size) for name, size in body["axes"]]
    return SavedGraph(
        body["arguments"],
        axes,
        NodeReader(source, axes).read(len(body["inputs"]), body["nodes"], body["outputs"]),
        body["inputs"],
        body["result"],
        body["specs"],
        body["donated"],
        body["written"],
        body["facts"],
        trace_facts=body["told"],
        sources=body["sources"],
    )


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
        if others:
            source.refuse(name, f"leaves that are {containing}", min(others))
    for name, counted, kind in (("specs", "outputs", "output"), ("facts", "axes", "axis")):
        size = len(body[counted])
        if len(body[name]) != size:
            source.refuse(name, f"{size} of them, one for each {kind}", len(body[name]))


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


def _make_list_test(is_valid: Callable[[JSON], bool]) -> Callable[[JSON], bool]:
    """Make a test of a list each of whose entries is None or passes another test."""
    return lambda value: type(value) is list and all(entry is None or is_valid(entry) for entry in value)


# The fields of a body: for each a test of its type, and the type in words. `NodeReader` checks nodes and outputs.
_FIELDS: Mapping[str, tuple[Callable[[JSON], bool], str]] = MappingProxyType(
    {
        "arguments": (_are_texts, "an object of texts"),
        "axes": (_are_axes, "a list of names and sizes"),
        "inputs": (_are_leaves, "a list of numbers that rise"),
        "nodes": (lambda value: type(value) is list, "a list"),
        "outputs": (lambda value: type(value) is list, "a list"),
        "result": (lambda value: type(value) is dict, "an object"),
        "specs": (_make_list_test(_is_number), "a list of numbers and nulls"),
        "donated": (_are_leaves, "a list of numbers that rise"),
        "written": (_are_leaves, "a list of numbers that rise"),
        "facts": (_make_list_test(_is_text), "a list of texts and nulls"),
        "told": (_is_text, "a text"),
        "sources": (_are_texts, "an object of texts"),
    }
)
