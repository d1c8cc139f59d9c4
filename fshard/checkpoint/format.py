"""What a checkpoint's manifest says: leaves, chunks and files; FORMAT.md describes it."""

import hashlib
import json
import math
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch

NAME, VERSION = "fshard.checkpoint", 1
MANIFEST = "manifest.json"
# How every manifest begins, and no other file of its name.
HEAD = f'{{"format": "{NAME}",'
# A manifest has about 100 bytes for each chunk; nothing of what a larger one says would be believed.
MAX_MANIFEST_BYTES = 1 << 30
MAX_DIMS = 64
# What each dtype is called in torch and in safetensors, which lacks complex ones: they are stored as pairs.
DTYPES = (
    *(("bool", "BOOL"), ("uint8", "U8"), ("int8", "I8"), ("uint16", "U16"), ("int16", "I16"), ("uint32", "U32")),
    *(("int32", "I32"), ("uint64", "U64"), ("int64", "I64"), ("float8_e4m3fn", "F8_E4M3"), ("float8_e5m2", "F8_E5M2")),
    *(("float16", "F16"), ("bfloat16", "BF16"), ("float32", "F32"), ("float64", "F64")),
    *(("complex64", "F32"), ("complex128", "F64")),
)


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read; the message names the file or the leaf."""


class Chunk(NamedTuple):
    """A box of a leaf's elements, as one file holds it.

    Attributes:
        file: Index of the file.
        offset: Where the box starts along each dim of the leaf.
        shape: How far it goes.
        checksum: CRC-32 of its bytes.
    """

    file: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    checksum: int


class Leaf(NamedTuple):
    """A leaf that is a tensor: its name in torch of a dtype, its global shape, and chunks that tile it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class File(NamedTuple):
    """A file of chunks: its size and a digest of its header."""

    bytes: int
    header: str


class Manifest(NamedTuple):
    """All that a checkpoint says of itself.

    Attributes:
        step: The step it was saved at.
        tensors: Leaves that are tensors, by path.
        values: Other leaves, by path: None, bool, int, float or str.
        files: Files in the order of the ranks that wrote them.
    """

    step: int
    tensors: dict[str, Leaf]
    values: dict[str, Any]
    files: tuple[File, ...]


def file_name(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def digest(data: bytes | memoryview) -> str:
    """A digest of bytes, as manifests hold it."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def encode(manifest: Manifest) -> bytes:
    """Write a manifest as JSON."""
    values = {path: _encoded(value) for path, value in manifest.values.items()}
    body = json.dumps({"step": manifest.step, "tensors": manifest.tensors, "values": values, "files": manifest.files})
    head = f'{HEAD}\n "version": {VERSION},\n "digest": "{digest(body.encode())}"'
    return f'{head},\n "body": {body}}}\n'.encode()


def decode(data: bytes) -> Manifest:
    """Read a manifest and check all that it says of itself.

    Raises:
        CheckpointError: if it is not one that `encode` wrote.
    """
    try:
        document = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"it is no JSON that fshard wrote ({error})") from None
    _need(isinstance(document, dict) and document.get("format") == NAME, "it is not of a checkpoint of fshard")
    found = document.get("version")
    _need(found == VERSION, f"expected version {VERSION}, got {_shown(found)}; read it with the fshard that wrote it")
    _need(set(document) == {"format", "version", "digest", "body"}, "it has other entries than it should")
    manifest = _manifest(document["body"])
    # Byte for byte, so that nothing can change unnoticed.
    _need(encode(manifest) == data, "its digest does not match, so it was damaged or edited")
    return manifest


def _manifest(body: Any) -> Manifest:
    keys = {"step", "tensors", "values", "files"}
    _need(isinstance(body, dict) and set(body) == keys, "its body has other entries than it should")
    step, tensors, values, files = (body[key] for key in ("step", "tensors", "values", "files"))
    _need(_is_size(step) and isinstance(tensors, dict) and isinstance(values, dict), "its body has other kinds in it")
    _need(isinstance(files, list) and len(files) < 100_000, "its files are no list")
    for file in files:
        _need(isinstance(file, list) and len(file) == 2 and _is_size(file[0]), "a file's entry is no size and digest")
        _need(isinstance(file[1], str) and bool(re.fullmatch("[0-9a-f]{32}", file[1])), "a file's digest is none")
    leaves = {path: _leaf(path, given, len(files)) for path, given in tensors.items()}
    decoded = {path: _decoded(path, value) for path, value in values.items()}
    return Manifest(step, leaves, decoded, tuple(File(*file) for file in files))


def _leaf(path: str, given: Any, files: int) -> Leaf:
    _need(isinstance(given, list) and len(given) == 3, f"{path} has other entries than it should")
    dtype, shape, chunks = given
    known = isinstance(dtype, str) and dtype in dict(DTYPES)
    _need(known, f"{path} is of dtype {_shown(dtype)}, which no tensor has")
    _need(_is_shape(shape), f"{path} has no shape")
    _need(isinstance(chunks, list), f"{path} has no chunks")
    for chunk in chunks:
        fits = isinstance(chunk, list) and len(chunk) == 4 and _is_size(chunk[0]) and chunk[0] < files
        fits = fits and _is_shape(chunk[1]) and _is_shape(chunk[2]) and len(chunk[1]) == len(chunk[2]) == len(shape)
        _need(fits and _is_size(chunk[3]) and chunk[3] < 1 << 32, f"{path} has a chunk that is none")
    leaf = Leaf(dtype, tuple(shape), tuple(Chunk(c[0], tuple(c[1]), tuple(c[2]), c[3]) for c in chunks))
    check_tiles(path, leaf)
    return leaf


def check_tiles(path: str, leaf: Leaf) -> None:
    """Refuse a leaf whose chunks do not cover each of its elements once.

    Chunks form a grid, as pieces of shards do, so that this takes a time and memory linear in their number.

    Raises:
        CheckpointError: if an element is missing or there twice.
    """
    if not math.prod(leaf.shape):
        _need(not leaf.chunks, f"{path} has chunks and no elements")
        return
    cuts = [sorted({chunk.offset[dim] for chunk in leaf.chunks}) for dim in range(len(leaf.shape))]
    whole = all(cut and cut[0] == 0 for cut in cuts)
    sizes = [{a: b - a for a, b in pairwise([*cut, size])} for cut, size in zip(cuts, leaf.shape, strict=True)]
    whole &= len(leaf.chunks) == math.prod(map(len, cuts)) == len({chunk.offset for chunk in leaf.chunks})
    whole = whole and all(
        chunk.shape == tuple(size[start] for size, start in zip(sizes, chunk.offset, strict=True))
        for chunk in leaf.chunks
    )
    whole = whole and all(size > 0 for chunk in leaf.chunks for size in chunk.shape)
    whole = whole and len({chunk.file for chunk in leaf.chunks}) == len(leaf.chunks)
    _need(whole, f"the chunks of {path} do not cover each element of {list(leaf.shape)} once")


def dtype_name(tensor: torch.Tensor) -> str:
    """The name in torch of a tensor's dtype."""
    return str(tensor.dtype).removeprefix("torch.")


def stored(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as files hold it."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _encoded(value: Any) -> Any:
    # JSON has no infinity and other rules for numbers; repr is exact.
    return {"float": repr(value)} if isinstance(value, float) else value


def _decoded(path: str, value: Any) -> Any:
    if isinstance(value, dict):
        _need(set(value) == {"float"} and isinstance(value["float"], str), f"{path} has a value that is none")
        return _number(float, value["float"], path)
    _need(value is None or isinstance(value, bool | int | str), f"{path} has a value that is none")
    return value


def _number(read: Callable[[str], float], text: str, path: str) -> float:
    try:
        return read(text)
    except ValueError:
        raise CheckpointError(f"{path} has a value that is no number") from None


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MAX_DIMS and all(map(_is_size, value))


def _need(condition: bool, otherwise: str) -> None:
    if not condition:
        raise CheckpointError(otherwise)


def _shown(value: Any) -> str:
    """A value for an error: what is nested may be so too deeply to print."""
    return repr(value)[:40] if isinstance(value, int | float | str) else f"a {type(value).__name__}"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
