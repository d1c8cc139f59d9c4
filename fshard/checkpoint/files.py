"""The format of a checkpoint: a manifest, and files of safetensors, written and read; FORMAT.md describes it.

Files are written in one pass, where the package's own writer needs all tensors of a file at once.
"""

import hashlib
import json
import math
import os
import re
import stat
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from io import BufferedReader
from itertools import pairwise, product
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from fshard.checkpoint.boxes import Box
from fshard.checkpoint.errors import CheckpointError, expect_file
from fshard.shard import bytes_of

__all__ = [
    "Chunk",
    "Manifest",
    "StoredLeaf",
    "decode_outline",
    "digest",
    "encode",
    "lay_out",
    "list_kinds",
    "merge",
    "name_of",
]

# A manifest begins with these bytes and its digest; a later version would begin otherwise.
HEAD = b'{"format": "fshard.checkpoint",\n "version": 1,\n "digest": "'
MANIFEST = "manifest.json"
# A manifest has about 100 bytes for each chunk; a reader would believe nothing in a larger one.
MAX_MANIFEST_BYTES = 1 << 30
# No file number, offset or size is as large as this, so that sums and products of a few stay exact.
NUMBER_LIMIT = 1 << 62
# Dtypes by pairs: the name in torch, and the name in files.
_DTYPE_NAMES = """
    bool BOOL  uint8 U8  int8 I8  uint16 U16  int16 I16  uint32 U32  int32 I32  uint64 U64  int64 I64
    float8_e4m3fn F8_E4M3  float8_e5m2 F8_E5M2  float16 F16  bfloat16 BF16  float32 F32  float64 F64  complex64 C64
"""
DTYPES = MappingProxyType(dict(re.findall(r"(\w+) (\w+)", _DTYPE_NAMES)))
# Complex numbers are stored as pairs.
SAVED = (*DTYPES, "complex128")


class Chunk(NamedTuple):
    """The bytes of one box of a leaf in a file. A manifest has the fields in this order.

    Attributes:
        file: Index of the file.
        offsets: Where the box starts along each dim of the leaf.
        shape: How many elements the box has along each dim.
        checksum: CRC-32 of the bytes.
    """

    file: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    checksum: int

    @property
    def box(self) -> Box:
        """The box."""
        return Box(self.offsets, self.shape)


class StoredLeaf(NamedTuple):
    """A leaf that is a tensor.

    Attributes:
        dtype: The name of its dtype in torch.
        shape: Its global shape.
        chunks: Chunks whose boxes cover it.
    """

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


class FileLayout(NamedTuple):
    """Where the tensors of a file are.

    Attributes:
        header: The header of the file.
        starts: Where the bytes of each tensor begin, by its name, in their order.
        size: The bytes of the file.
    """

    header: bytes
    starts: dict[str, int]
    size: int


def file_name(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def digest(data: bytes) -> str:
    """A digest of bytes, as manifests hold it."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def encode(manifest: Manifest) -> bytes:
    """Write a manifest as JSON."""
    values = dict(manifest.values)
    for path, value in values.items():
        if isinstance(value, float):
            # JSON has no infinity and other rules for numbers; repr is exact.
            values[path] = {"float": repr(value)}
    body = json.dumps({**manifest._asdict(), "values": values}).encode()
    return HEAD + f'{digest(body)}",\n "body": '.encode() + body + b"}\n"


def decode(data: bytes, file: object = MANIFEST) -> Manifest:
    """Read a manifest.

    Args:
        data: The content of its file.
        file: The file, for errors.

    Raises:
        CheckpointError: if `encode` did not write it, or the chunks do not cover each leaf.
    """
    manifest = decode_outline(data, file)
    for path, leaf in manifest.tensors.items():
        if leaf.dtype not in SAVED:
            raise CheckpointError(f"{file}: {path:.100} has dtype {leaf.dtype!r:.40}, which fshard does not know")
        if not _cover_once(leaf.shape, leaf.chunks):
            raise CheckpointError(
                f"{file}: the {len(leaf.chunks)} chunks of {path:.100} do not cover each of its elements once; save it "
                "on a mesh of all ranks that it is split over"
            )
    return manifest


def decode_outline(data: bytes, file: object) -> Manifest:
    """Read a manifest that need not have chunks yet.

    Args:
        data: The content of its file.
        file: The file, for errors.

    Raises:
        CheckpointError: if `encode` did not write it.
    """
    remedy = "read it by the fshard that wrote it"
    expect_file(data.startswith(HEAD), f"{file}", "a manifest of version 1", "another file", remedy)
    try:
        manifest = _parse_body(json.loads(data)["body"])
        # Byte for byte, so that nothing can change unnoticed: neither an entry nor its spelling.
        is_whole = encode(manifest) == data
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise CheckpointError(f"{file}: its digest does not match, so it was damaged or edited")
    return manifest


def _parse_body(body: Any) -> Manifest:
    """Take apart what JSON made of a body.

    Containers of other types are found by `encode`, which makes other bytes of them. A plain value keeps its bytes, so
    that a new field needs a check of its type here.
    """
    tensors = {}
    for path, (dtype, shape, chunks) in body["tensors"].items():
        parsed = [Chunk(file, tuple(offsets), tuple(sizes), checksum) for file, offsets, sizes, checksum in chunks]
        tensors[path] = StoredLeaf(dtype, tuple(shape), tuple(parsed))
    values = {}
    for path, value in body["values"].items():
        values[path] = float(value["float"]) if isinstance(value, dict) else value
    return Manifest(body["step"], tensors, values)


def merge(manifests: Sequence[Manifest]) -> Manifest:
    """Put the chunks of several manifests of one state together; a box that several have counts once."""
    first, *_ = manifests
    tensors = {}
    for path, leaf in first.tensors.items():
        chunks = {}
        for manifest in manifests:
            for chunk in manifest.tensors.get(path, leaf).chunks:
                chunks[chunk.box] = chunk
        tensors[path] = leaf._replace(chunks=tuple(chunks.values()))
    return first._replace(tensors=tensors)


def list_kinds(manifest: Manifest) -> Mapping[int, Mapping[str, Any]]:
    """List the dtype and the shape of each chunk, by its file and then by the path of its leaf."""
    kinds: Any = defaultdict(dict)
    for path, leaf in manifest.tensors.items():
        for chunk in leaf.chunks:
            kinds[chunk.file][path] = getattr(torch, leaf.dtype), chunk.shape
    return kinds


def _cover_once(shape: tuple[int, ...], chunks: Sequence[Chunk]) -> bool:
    """Whether the boxes of chunks form a grid that covers a shape, as those of shards do.

    The check takes time and memory linear in the number of chunks.
    """
    numbers = [*shape]
    for chunk in chunks:
        numbers += [chunk.file, *chunk.offsets, *chunk.shape]
    if any(type(number) is not int or not 0 <= number < NUMBER_LIMIT for number in numbers):
        return False
    if any(not len(chunk.offsets) == len(chunk.shape) == len(shape) for chunk in chunks):
        return False
    # The sides of the grid's cells, as (start, size), along each dim.
    sides = []
    for dim, size in enumerate(shape):
        cuts = {0, size} | {chunk.offsets[dim] for chunk in chunks}
        sides.append([(start, stop - start) for start, stop in pairwise(sorted(cuts))])
    # A file has at most one chunk of a leaf. Cells are listed only if their number is right: they may be too many.
    if not len({chunk.file for chunk in chunks}) == len(chunks) == math.prod(map(len, sides)):
        return False
    return {tuple(zip(*chunk.box, strict=True)) for chunk in chunks} == set(product(*sides))


def lay_out(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], *, pairs: bool = False, **metadata: str
) -> FileLayout:
    """Lay out the tensors of a file: larger elements first, so that each is aligned, from a multiple of 64 bytes on.

    Args:
        tensors: The dtype of each tensor and its shape, by the tensor's name.
        pairs: Whether complex numbers are written as pairs of real ones.
        metadata: Texts that the file says of itself.

    Returns:
        The header of the file, where each tensor begins, and the size of the file.
    """
    entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    starts = {}
    end = 0
    for name in sorted(tensors, key=lambda name: -tensors[name][0].itemsize):
        dtype, shape = tensors[name]
        if pairs and dtype.is_complex:
            dtype = dtype.to_real()
            shape = (*shape, 2)
        starts[name] = end
        end += dtype.itemsize * math.prod(shape)
        stored = DTYPES.get(name_of(dtype))
        expect_file(stored, name, "a dtype that safetensors has", f"{dtype}")
        entries[name] = {"dtype": stored, "shape": shape, "data_offsets": (starts[name], end)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    header = len(text).to_bytes(8, "little") + text
    size = len(header)
    return FileLayout(header, {name: size + start for name, start in starts.items()}, size + end)


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


def open_regular(path: Path) -> BufferedReader:
    """Open a file to read it, but no pipe or device, which might never end; links are followed."""
    expect_file(stat.S_ISREG(path.stat().st_mode), f"{path}", "a regular file", "something else")
    return open(path, "rb")


class CheckpointReader:
    """The files of a checkpoint, each checked when it is first read.

    It reads into the memory of the result and compares as it goes, where maps of files, as readers of safetensors make
    them, cost a fault for each page and end the process when a file is cut short.

    Attributes:
        manifest: The manifest.
        digest: Its digest.
        starts: Returns where chunks begin in the file of a rank.
    """

    def __init__(self, checkpoint: Path) -> None:
        """Read the manifest of a checkpoint."""
        self._path = checkpoint
        path = checkpoint / MANIFEST
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            expect_file(size <= MAX_MANIFEST_BYTES, f"{path}", f"at most {MAX_MANIFEST_BYTES} bytes", f"{size}")
            # A read of the limit would take memory for all of it.
            data = file.read(size)
        self.manifest = decode(data, path)
        self.digest = digest(data)
        self.starts = cache(self._read_starts)
        self._kinds = list_kinds(self.manifest)

    def check_files(self) -> None:
        """Refuse files that are not there, or of another size or header than follow from the manifest."""
        for index in self._kinds:
            self.starts(index)

    def _read_starts(self, index: int) -> dict[str, int]:
        """Return where chunks begin in a file, whose size and header follow from the manifest, byte for byte."""
        path = self._path / file_name(index)
        layout = lay_out(self._kinds[index], pairs=True)
        with open_regular(path) as file:
            header = file.read(len(layout.header))
            size = os.fstat(file.fileno()).st_size
        expect_file(size == layout.size, f"{path}", f"{layout.size} bytes", f"{size}")
        if header != layout.header:
            raise CheckpointError(
                f"{path}: its header is not the one that follows from the manifest, so it was damaged"
            )
        return layout.starts

    def read_chunk(self, path: str, chunk: Chunk, memory: torch.Tensor) -> None:
        """Read a chunk of a leaf into contiguous memory on the host."""
        file_path = self._path / file_name(chunk.file)
        data = bytes_of(memory)
        start = self.starts(chunk.file)[path]
        with open_regular(file_path) as file:
            file.seek(start)
            is_whole = file.readinto(data) == len(data) and zlib.crc32(data) == chunk.checksum
        if not is_whole:
            raise CheckpointError(f"{file_path}: the elements of {path} do not match their checksum, so it was damaged")
