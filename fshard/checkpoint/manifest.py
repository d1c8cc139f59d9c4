"""The manifest of a checkpoint: its leaves, chunks and files; FORMAT.md describes it."""

import hashlib
import json
import math
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple, get_args, get_origin

from fshard.checkpoint.errors import CheckpointError
from fshard.checkpoint.safetensors import DTYPES
from fshard.tree.checks import describe

NAME, VERSION = "fshard.checkpoint", 1
MANIFEST = "manifest.json"
# A manifest has about 100 bytes for each chunk; a reader would believe nothing in a larger one.
MAX_MANIFEST_BYTES = 1 << 30
# Complex numbers are stored as pairs.
SAVED = tuple(dict.fromkeys((*DTYPES, "complex128")))

Value = None | bool | int | float | str
Parts = dict[str, tuple[str, tuple[int, ...]]]


class Chunk(NamedTuple):
    """A box of a leaf's elements in a file.

    Attributes:
        file: Index of the file.
        offset: Where the box starts along each dim of the leaf.
        shape: The size of the box along each dim.
        checksum: CRC-32 of its bytes.
    """

    file: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    checksum: int


class Leaf(NamedTuple):
    """A leaf that is a tensor: the name of its dtype in torch, its global shape, and chunks that tile it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class File(NamedTuple):
    """A file of chunks: its size and a digest of its header."""

    bytes: int
    header: str


class Manifest(NamedTuple):
    """The content of a manifest.

    Attributes:
        step: The step of the state.
        tensors: Leaves that are tensors, by path.
        values: Other leaves, by path.
        files: Files in the order of the ranks that wrote them.
    """

    step: int
    tensors: dict[str, Leaf]
    values: dict[str, Value]
    files: tuple[File, ...]


def file_name(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def digest(data: bytes | memoryview) -> str:
    """A digest of bytes, as manifests hold it."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def parts_of(manifest: Manifest) -> list[Parts]:
    """The tensors of each file: the dtype and shape of each chunk, by the path of its leaf."""
    parts: list[Parts] = [{} for _ in manifest.files]
    for path, leaf in manifest.tensors.items():
        for chunk in leaf.chunks:
            parts[chunk.file][path] = leaf.dtype, chunk.shape
    return parts


def encode(manifest: Manifest) -> bytes:
    """Write a manifest as JSON."""
    # JSON has no infinity and other rules for numbers; repr is exact.
    values = {path: {"float": repr(v)} if isinstance(v, float) else v for path, v in manifest.values.items()}
    body = json.dumps({**manifest._asdict(), "values": values})
    head = f'{{"format": "{NAME}",\n "version": {VERSION},\n "digest": "{digest(body.encode())}"'
    return f'{head},\n "body": {body}}}\n'.encode()


def decode(data: bytes) -> Manifest:
    """Read a manifest.

    Raises:
        CheckpointError: if `encode` did not write it.
    """
    try:
        document = json.loads(data.decode(), parse_constant=float)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"it is no JSON that fshard wrote ({error})") from None
    if not isinstance(document, dict) or document.get("format") != NAME:
        raise CheckpointError("it is not of a checkpoint of fshard")
    if document.get("version") != VERSION:
        found = f"expected version {VERSION}, got {_shown(document.get('version'))}"
        raise CheckpointError(f"{found}; read it with the fshard that wrote it")
    manifest = _typed("body", document.get("body"), Manifest)
    for path, leaf in manifest.tensors.items():
        if leaf.dtype not in SAVED or any(chunk.file >= len(manifest.files) for chunk in leaf.chunks):
            found = f"{leaf.dtype!r:.40} in {len(leaf.chunks)} chunks"
            raise CheckpointError(f"{path}: expected a dtype of torch, in chunks of files of the manifest, got {found}")
        check_tiles(path, leaf)
    # Byte for byte, so that nothing can change unnoticed: neither an entry nor its spelling.
    if encode(manifest) != data:
        raise CheckpointError("its digest does not match, so it was damaged or edited")
    return manifest


def _typed(place: str, value: Any, needed: Any) -> Any:
    """Convert a value of JSON to a type of the manifest's fields, and refuse a value of another type."""
    origin, inner, fields = get_origin(needed), get_args(needed), getattr(needed, "__annotations__", {})
    if needed is Manifest and isinstance(value, dict) and value.keys() == fields.keys():
        return Manifest(**{name: _typed(name, value[name], field) for name, field in fields.items()})
    if needed is not Manifest and fields and isinstance(value, list) and len(value) == len(fields):
        return needed(*(_typed(place, part, field) for part, field in zip(value, fields.values(), strict=True)))
    if origin is tuple and isinstance(value, list):
        return tuple(_typed(place, part, inner[0]) for part in value)
    if origin is dict and isinstance(value, dict):
        return {path: _typed(path, part, inner[1]) for path, part in value.items()}
    if needed == Value and isinstance(value, dict) and value.keys() == {"float"} and isinstance(value["float"], str):
        with suppress(ValueError):
            return float(value["float"])
    if type(value) is needed and (needed is str or 0 <= value < 1 << 62):
        return value
    if needed == Value and type(value) in inner and not isinstance(value, float):
        return value
    words = {int: "a whole number from 0", str: "a text", tuple: "a list", dict: "entries by path"}
    expected = f"[{', '.join(fields)}]" if fields else words.get(origin or needed, "None, a bool, int, float or str")
    raise CheckpointError(f"{place}: expected {expected}, got {_shown(value)}")


def check_tiles(path: str, leaf: Leaf) -> None:
    """Refuse a leaf whose chunks do not cover each of its elements once.

    Chunks form a grid, as pieces of shards do, so that the check takes time and memory linear in their number.

    Raises:
        CheckpointError: if an element is missing or there twice.
    """
    if not _tile(leaf.chunks, leaf.shape):
        raise CheckpointError(f"{path}: expected chunks that cover each element of {list(leaf.shape)} once, got others")


def _tile(chunks: tuple[Chunk, ...], shape: tuple[int, ...]) -> bool:
    dims = range(len(shape))
    if 0 in shape:
        return not chunks
    if any(not len(chunk.offset) == len(chunk.shape) == len(shape) or 0 in chunk.shape for chunk in chunks):
        return False
    cuts = [sorted({chunk.offset[dim] for chunk in chunks}) for dim in dims]
    if any(cut[:1] != [0] for cut in cuts):
        return False
    sizes = [{a: b - a for a, b in pairwise([*cut, size])} for cut, size in zip(cuts, shape, strict=True)]
    different = len({chunk.offset for chunk in chunks}) == len({chunk.file for chunk in chunks}) == len(chunks)
    fits = all(chunk.shape[dim] == sizes[dim][chunk.offset[dim]] for chunk in chunks for dim in dims)
    return different and fits and len(chunks) == math.prod(map(len, cuts))


def _shown(value: Any) -> str:
    """A value for an error: a nested one may be nested too deeply to print."""
    return repr(value)[:40] if isinstance(value, int | float | str) else describe(value)
