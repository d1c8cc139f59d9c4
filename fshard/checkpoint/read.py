"""Reading leaves from a checkpoint's files, each compared with what the manifest says of it."""

import json
import math
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fshard import _compat
from fshard.checkpoint import files
from fshard.checkpoint.format import (
    DTYPES,
    CheckpointError,
    Chunk,
    Leaf,
    Manifest,
    digest,
    dtype_name,
    file_name,
    stored,
)
from fshard.checkpoint.layout import Piece, empty_like, local_of, overlap, padded_with_zeros, piece_of
from fshard.checkpoint.progress import Tick
from fshard.checkpoint.write import BLOCK_BYTES
from fshard.tree import Sharded, is_sharded

# As much as readers of safetensors take.
MAX_HEADER_BYTES = 100_000_000


class _File(NamedTuple):
    """An open file: where its tensors begin, and what its header says of each."""

    descriptor: int
    start: int
    entries: dict[str, Any]


class Reader:
    """The files of a checkpoint, each opened and checked when it is first needed.

    It reads into the memory of the result and compares as it goes, where maps of files, as readers of safetensors make
    them, cost a fault for each page and end the process when a file is cut short.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        """Read from a checkpoint's directory."""
        self._path = path
        self._manifest = manifest
        self._open: dict[int, _File] = {}
        self._filled: set[int] = set()

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._open.values():
            os.close(file.descriptor)

    def check(self, rank: int, ranks: int) -> None:
        """Check the headers of all files, those that nobody reads too: each rank its share."""
        for index in range(rank, len(self._manifest.files), ranks):
            self._file(index)

    def cost(self, name: str, like: Any) -> int:
        """How many bytes are read for a leaf."""
        leaf, piece = self._manifest.tensors[name], piece_of(like)
        size = getattr(torch, leaf.dtype).itemsize
        return sum(math.prod(chunk.shape) * size for chunk, *_ in _overlaps(leaf, piece))

    def read(self, name: str, like: Any, donated: bool, tick: Tick) -> Any:
        """Read this rank's part of a leaf, into the memory of one that is donated."""
        leaf = self._manifest.tensors[name]
        made = self._taken(like) if donated else empty_like(like)
        piece = piece_of(made)
        for chunk, source, target in _overlaps(leaf, piece):
            into = stored(piece.tensor)
            whole = (chunk.offset, chunk.shape) == (piece.offset, piece.shape)
            if whole and into.is_contiguous() and into.device.type == "cpu":
                self._read_chunk(name, chunk, into, tick)
                continue
            shape = stored(torch.empty(chunk.shape, dtype=getattr(torch, leaf.dtype), device="meta")).shape
            room = torch.empty(shape, dtype=into.dtype, device="cpu")
            self._read_chunk(name, chunk, room, tick)
            into[target].copy_(room[source])
        return made

    def _taken(self, like: Any) -> Any:
        """A donated leaf to be filled, or a new one where its memory is not its own."""
        local = local_of(like)
        memory, is_shared = _compat.storage_key(local), _compat.shares_memory(local)
        local = local.detach()
        if local.is_meta or not local.is_contiguous() or is_shared or memory in self._filled:
            return empty_like(like)
        self._filled.add(memory)
        return padded_with_zeros(Sharded(local, like.spec) if is_sharded(like) else local)

    def _read_chunk(self, name: str, chunk: Chunk, into: torch.Tensor, tick: Tick) -> None:
        """Read a chunk into contiguous memory on the host."""
        path, file = self._path / file_name(chunk.file), self._file(chunk.file)
        found = file.entries.get(name, {})
        start, stop = found.get("data_offsets", (0, 0))
        needed = {"dtype": dict(DTYPES)[dtype_name(into)], "shape": list(into.shape), "data_offsets": [start, stop]}
        if found != needed or stop - start != into.nbytes:
            raise CheckpointError(f"{path}: its header says other things of {name} than the manifest")
        # A single element counts as contiguous whatever its stride, which a view as bytes does not allow.
        data = into.as_strided((into.numel(),), (1,)).view(torch.uint8).numpy().data
        checksum, at = 0, file.start + start
        while data:
            block = data[:BLOCK_BYTES]
            count = os.preadv(file.descriptor, [block], at)
            if not count:
                raise CheckpointError(f"{path}: it was cut short while it was read")
            checksum = zlib.crc32(block[:count], checksum)
            data, at = data[count:], at + count
            tick(count)
        if checksum != chunk.checksum:
            raise CheckpointError(f"{path}: the elements of {name} do not match their checksum, so it was damaged")

    def _file(self, index: int) -> _File:
        if index not in self._open:
            path, needed = self._path / file_name(index), self._manifest.files[index]
            descriptor = files.open_regular(path)
            try:
                self._open[index] = _opened(path, descriptor, needed.bytes, needed.header)
            except BaseException:
                os.close(descriptor)
                raise
        return self._open[index]


def _opened(path: Path, descriptor: int, needed: int, header_digest: str) -> _File:
    """Check a file's size and header."""
    size = os.fstat(descriptor).st_size
    if size != needed:
        raise CheckpointError(f"{path}: expected {needed} bytes, got {size}")
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if length > min(size, MAX_HEADER_BYTES):
        raise CheckpointError(f"{path}: its header does not match its digest, so it was damaged")
    header = os.pread(descriptor, 8 + length, 0)
    if digest(header) != header_digest:
        raise CheckpointError(f"{path}: its header does not match its digest, so it was damaged")
    try:
        entries = json.loads(header[8:])
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its header is no JSON ({error})") from None
    end = 0
    for entry in entries.values() if isinstance(entries, dict) else [None]:
        offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
        numbers = offsets if isinstance(offsets, list) and all(type(n) is int for n in offsets) else []
        if len(numbers) != 2 or not end == numbers[0] <= numbers[1]:
            raise CheckpointError(f"{path}: its header does not give each tensor a place of its own")
        end = numbers[1]
    if 8 + length + end != size:
        raise CheckpointError(f"{path}: its header does not give each byte to a tensor")
    return _File(descriptor, 8 + length, entries)


def _overlaps(leaf: Leaf, piece: Piece) -> Iterable[tuple[Chunk, tuple[slice, ...], tuple[slice, ...]]]:
    # A rank that has nothing of a leaf without dims has a piece with one.
    for chunk in leaf.chunks if piece.tensor.numel() else ():
        common = overlap(chunk.offset, chunk.shape, piece.offset, piece.shape)
        if common is not None:
            yield chunk, *common
