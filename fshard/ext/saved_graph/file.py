"""The file of a graph: JSON behind a digest.

A digest finds damage. It is no signature: whoever writes a file can write its digest, so nothing is taken for right
because the digest matches.
"""

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_origin, get_type_hints

import torch
from torch.fx import Graph

import fshard as fs
from fshard.ext.saved_graph.nodes import GraphReader
from fshard.ext.saved_graph.source import Source
from fshard.extend import files, process_rank

JSON = Any
_HEAD = b'{"format": "fshard.graph",\n "version": 5,\n "digest": "'
# Between the digest and the body, and behind the body.
_MIDDLE = b'",\n "body": '
_TAIL = b"}\n"
# A file has about 100 bytes for each operator, so no graph needs a larger one.
_MAX_BYTES = 1 << 30
_VERSIONS = f"fshard {fs.__version__}, torch {torch.__version__}"


class SavedGraph(NamedTuple):
    """The content of a file.

    Attributes:
        versions: The versions of fshard and torch that wrote it.
        arguments: Descriptions of the arguments by their names, which those of a call must equal.
        inputs: The leaves of the arguments that are inputs of the graph.
        nodes: The operators, as `write_nodes` writes them.
        outputs: The nodes that are results.
        result: The structure of the result, as `write_structure` writes it.
        specs: For each leaf of the result the number of the Sharded argument whose spec it has; None of others.
        donated: Leaves of the arguments that are donated.
        written: Those of them that something may be written to.
        facts: For each axis what ranks compare over it.
        trace_facts: What ranks compare in their first trace, before they agree on the leaves that any of them uses.
        sources: Digests of the files of source code that a cached graph depends on, by path; else empty.
    """

    versions: str
    arguments: dict[str, str]
    inputs: list[int]
    nodes: list[JSON]
    outputs: list[JSON]
    result: list[JSON]
    specs: list[int | None]
    donated: list[int]
    written: list[int]
    facts: list[str]
    trace_facts: str
    sources: dict[str, str]

    def read_graph(self, source: Source, axes: Sequence[fs.Axis]) -> Graph:
        """Read the operators, for the axes of the arguments.

        Raises:
            ValueError: if they are no graph; the error names the source and the part.
        """
        return GraphReader(len(self.inputs), axes).read(source, self.nodes, self.outputs)


def locate_file(directory: str | Path) -> Path:
    """Return the path of this rank's file."""
    return Path(directory) / f"graph-rank-{process_rank():05d}.json"


def name_source(path: Path) -> Source:
    """Name a file, for errors of its content."""
    return Source(f"load_graph: {path}", "save the graph again, on every rank")


def encode(body: Mapping[str, JSON], axes: Sequence[fs.Axis]) -> bytes:
    """Write what a file holds, with the versions of fshard and torch and a digest.

    Args:
        body: The fields of a SavedGraph but for the versions.
        axes: The axes of the arguments.

    Raises:
        ValueError: if it could not be read.
    """
    text = json.dumps({"versions": _VERSIONS, **body}).encode()
    source = Source("save_graph", "leave it out of the function")
    _read_body(text, source).read_graph(source, axes)
    return _seal(text)


def write_file(path: Path, content: bytes) -> None:
    """Write a file, at once: one of this name from before stays until all of it is written.

    Raises:
        OSError: if it cannot be written; the error names the path.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Threads have numbers that no other process has.
    draft = path.with_suffix(f".{threading.get_native_id()}")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        error.filename = f"{path}"
        raise


def read_file(path: Path) -> SavedGraph:
    """Read a file, but for its nodes and the structure of its result.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if `encode` of these versions did not write it; the error names the path and the part.
    """
    source = name_source(path)
    if not path.exists():
        raise FileNotFoundError(f"{source.reader}: there is no such file, so this rank has no graph; {source.remedy}")
    if not path.is_file() or path.stat().st_size > _MAX_BYTES:
        raise ValueError(f"{source.reader} must be a file of at most {_MAX_BYTES} bytes; {source.remedy}")
    data = path.read_bytes()
    text = data.partition(_MIDDLE)[2].removesuffix(_TAIL)
    if data != _seal(text):
        problem = "the digest does not match, so the file was damaged, cut off or edited, or is of another format"
        raise ValueError(f"{source.reader}: {problem}; {source.remedy}")
    return _read_body(text, source)


def _seal(text: bytes) -> bytes:
    """Put a body into a file with its digest."""
    return _HEAD + files.digest(text).encode() + _MIDDLE + text + _TAIL


def _read_body(text: bytes, source: Source) -> SavedGraph:
    """Read all that a file says, and check the types of its fields."""
    with source.reading("body"):
        body = json.loads(text.decode())
        types = {name: type(part) for name, part in body.items()}
        expected = {name: get_origin(kind) or kind for name, kind in get_type_hints(SavedGraph).items()}
        if types != expected:
            raise TypeError(f"expected {expected}, got {types}")
        saved = SavedGraph(**body)
        for facts in (saved.trace_facts, *saved.facts):
            # Ranks compare texts by their names.
            "".join(map("".join, json.loads(facts).items()))
    if saved.versions != _VERSIONS:
        raise ValueError(f"{source.reader}: expected a graph of {_VERSIONS}, got {saved.versions:.80}; {source.remedy}")
    return saved
