"""The format of a checkpoint: a manifest, and files of safetensors; FORMAT.md describes it.

Files are written in one pass, where the package's own writer needs all tensors of a file at once.
"""

import hashlib
import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from fshard.checkpoint.errors import CheckpointError, expect_file

# A manifest begins with these bytes and its digest; a later version would begin otherwise.
HEAD = b'{"format": "fshard.checkpoint",\n "version": 1,\n "digest": "'
MANIFEST = "manifest.json"
# A manifest has about 100 bytes for each chunk; a reader would believe nothing in a larger one.
MAX_MANIFEST_BYTES = 1 << 30
# The name of each dtype in files, by its name in torch.
_IN_TORCH = "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64"
_IN_FILES = "BOOL U8 I8 U16 I16 U32 I32 U64 I64"
_IN_TORCH += " float8_e4m3fn float8_e5m2 float16 bfloat16 float32 float64 complex64"
_IN_FILES += " F8_E4M3 F8_E5M2 F16 BF16 F32 F64 C64"
DTYPES = MappingProxyType(dict(zip(_IN_TORCH.split(), _IN_FILES.split(), strict=True)))
# Complex numbers are stored as pairs.
SAVED = (*DTYPES, "complex128")


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


class StoredLeaf(NamedTuple):
    """A leaf that is a tensor: the name of its dtype in torch, its global shape, and chunks that tile it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class Manifest(NamedTuple):
    """The content of a manifest.

    Attributes:
        step: The step of the state.
        tensors: Leaves that are tensors, by path.
        values: Other leaves, by path: None, a bool, an int, a float or a str.
    """

    step: int
    tensors: Mapping[str, StoredLeaf]
    values: Mapping[str, Any]


def file_name(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def digest(data: bytes) -> str:
    """A digest of bytes, as manifests hold it."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def encode(manifest: Manifest) -> bytes:
    """Write a manifest as JSON."""
    # JSON has no infinity and other rules for numbers; repr is exact.
    values = {path: {"float": repr(v)} if isinstance(v, float) else v for path, v in manifest.values.items()}
    body = json.dumps({**manifest._asdict(), "values": values}).encode()
    return HEAD + f'{digest(body)}",\n "body": '.encode() + body + b"}\n"


def decode(data: bytes, place: object = MANIFEST) -> Manifest:
    """Read a manifest.

    Args:
        data: The content of its file.
        place: The file, for errors.

    Raises:
        CheckpointError: if `encode` did not write it, or the chunks do not cover each leaf.
    """
    manifest = decode_outline(data, place)
    check_tiles(manifest, place)
    return manifest


def decode_outline(data: bytes, place: object) -> Manifest:
    """Read a manifest that need not have chunks yet.

    Args:
        data: The content of its file.
        place: The file, for errors.

    Raises:
        CheckpointError: if `encode` did not write it.
    """
    remedy = "read it by the fshard that wrote it"
    expect_file(data.startswith(HEAD), f"{place}", "a manifest of version 1", "another file", remedy)
    try:
        manifest = _manifest(json.loads(data)["body"])
        # Byte for byte, so that nothing can change unnoticed: neither an entry nor its spelling.
        is_whole = encode(manifest) == data
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise CheckpointError(f"{place}: its digest does not match, so it was damaged or edited")
    return manifest


def _manifest(body: Any) -> Manifest:
    """Take apart what JSON made of a body; `encode` makes other bytes of entries of other types."""
    tensors = {
        path: StoredLeaf(dtype, tuple(shape), tuple(Chunk(f, tuple(at), tuple(n), crc) for f, at, n, crc in chunks))
        for path, (dtype, shape, chunks) in body["tensors"].items()
    }
    values = {path: float(v["float"]) if isinstance(v, dict) else v for path, v in body["values"].items()}
    return Manifest(body["step"], tensors, values)


def check_tiles(manifest: Manifest, place: object) -> None:
    """Refuse a leaf whose chunks do not cover each of its elements once.

    Chunks form a grid, as pieces of shards do, so that the check takes time and memory linear in their number.

    Raises:
        CheckpointError: if an element is missing or there twice.
    """
    for path, leaf in manifest.tensors.items():
        found = f"{leaf.dtype!r:.40} in {len(leaf.chunks)} chunks"
        fits = leaf.dtype in SAVED and _tile(leaf.shape, leaf.chunks)
        expect_file(fits, f"{place}", f"chunks that cover each element of {path:.100} once", found)


def _tile(shape: tuple[int, ...], chunks: Sequence[Chunk]) -> bool:
    numbers = [*shape, *(n for chunk in chunks for n in (chunk.file, *chunk.offset, *chunk.shape))]
    if any(type(n) is not int or not 0 <= n < 1 << 62 for n in numbers):
        return False
    if any(not len(chunk.offset) == len(chunk.shape) == len(shape) for chunk in chunks):
        return False
    cuts = [sorted({0, size, *(chunk.offset[dim] for chunk in chunks)}) for dim, size in enumerate(shape)]
    sizes = [[(start, stop - start) for start, stop in pairwise(cut)] for cut in cuts]
    boxes = {tuple(zip(chunk.offset, chunk.shape, strict=True)) for chunk in chunks}
    # One part of a leaf in each file.
    is_grid = len({chunk.file for chunk in chunks}) == len(chunks) == math.prod(map(len, sizes))
    return is_grid and boxes == set(product(*sizes))


def lay_out(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], *, pairs: bool = False, **metadata: str
) -> tuple[bytes, dict[str, int], int]:
    """Lay out the tensors of a file: larger elements first, so that each is aligned, from a multiple of 64 bytes on.

    Args:
        tensors: The dtype of each tensor and its shape, by the tensor's name.
        pairs: Whether complex numbers are written as pairs of real ones.
        metadata: Texts that the file says of itself.

    Returns:
        The header of the file, the place where each tensor begins, in their order, and the size of the file.
    """
    entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    starts, end = {}, 0
    for name in sorted(tensors, key=lambda name: -tensors[name][0].itemsize):
        dtype, shape = tensors[name]
        if pairs and dtype.is_complex:
            dtype, shape = dtype.to_real(), (*shape, 2)
        starts[name], end = end, end + dtype.itemsize * math.prod(shape)
        stored = DTYPES.get(name_of(dtype))
        expect_file(stored, name, "a dtype that safetensors has", f"{dtype}")
        entries[name] = {"dtype": stored, "shape": shape, "data_offsets": (starts[name], end)}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % 64)
    header = len(header).to_bytes(8, "little") + header
    return header, {name: len(header) + start for name, start in starts.items()}, len(header) + end


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype in torch."""
    return str(dtype).removeprefix("torch.")


def write_file(path: Path, header: bytes, tensors: Iterable[torch.Tensor] = ()) -> list[int]:
    """Write a header and tensors to a new file, and have them on the disk.

    Args:
        path: The file.
        header: The header.
        tensors: The tensors, in the order of the layout; each is taken when the one before it is written.

    Returns:
        The CRC-32 of each tensor's bytes.
    """
    checksums = []
    with open(path, "xb") as file:
        file.write(header)
        for tensor in tensors:
            data = bytes_of(tensor)
            checksums.append(zlib.crc32(data))
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return checksums


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The elements of a tensor as bytes on the host."""
    return byte_view(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous())


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    # A single element counts as contiguous whatever its stride, which a view as bytes does not allow.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data
