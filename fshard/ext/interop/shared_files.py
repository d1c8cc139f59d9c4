"""Files of safetensors that ranks write side by side, and checksums of the boxes that each of them wrote."""

import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fshard.checkpoint import CheckpointError
from fshard.extend import Box, Entry, Exchange, bytes_of, files, lay_out, read_box

# The name of the file that has the CRC-32 of boxes. It is a manifest, as checkpoints of fshard have them.
CHECKSUMS = "checksums.json"
# A box has at most so many bytes, or one row: so much is read to check it.
BOX_BYTES = 16 * 1024 * 1024

# The tensors of a file by name, on the meta device, those of larger elements first.
TensorKinds = Mapping[str, torch.Tensor]
# Tensors with the boxes that were written of them.
WrittenTensors = Mapping[str, files.StoredLeaf]


class Part(NamedTuple):
    """The part of a tensor that a rank writes: where it starts along each dim, and a function that makes it."""

    offset: tuple[int, ...]
    make: Callable[[], torch.Tensor]


def write(
    exchange: Exchange, directory: Path, kinds_of_files: Mapping[str, TensorKinds], parts: Iterator[Part | None]
) -> None:
    """Write parts of tensors at their places in files, and the checksums of what was written. Every rank must call.

    Args:
        exchange: The exchange.
        directory: Where the files go.
        kinds_of_files: The tensors of each file.
        parts: This rank's part of each tensor, in this order, or None. All are taken, also if a write fails, because
            other ranks may gather leaves with this one to make theirs.
    """
    boxes: dict[str, list[files.Chunk]] = {}
    try:
        for file, kinds in kinds_of_files.items():
            boxes |= _write_file(directory / file, kinds, parts)
    finally:
        for _ in parts:
            pass
        boxes_of_ranks = exchange.all_gather_object(boxes)
    if exchange.rank:
        return
    tensors = {}
    for kinds in kinds_of_files.values():
        for name, kind in kinds.items():
            written: list[files.Chunk] = []
            for boxes_of_rank in boxes_of_ranks:
                written += boxes_of_rank.get(name, ())
            tensors[name] = files.StoredLeaf(files.name_of(kind.dtype), kind.shape, tuple(written))
    manifest = files.Manifest(0, tensors, {})
    (directory / CHECKSUMS).write_bytes(files.encode(manifest))


def _write_file(path: Path, kinds: TensorKinds, parts: Iterator[Part | None]) -> dict[str, list[files.Chunk]]:
    """Write the header of one file and this rank's parts of its tensors, and list their boxes."""
    dtypes_and_shapes = {name: (kind.dtype, kind.shape) for name, kind in kinds.items()}
    header, starts, size = lay_out(dtypes_and_shapes, format="pt")
    boxes = {}
    # Ranks come here in any order, and the first one creates the file.
    with open(path, "a+b") as file:
        # On a full disk this is an error, where a write to mapped memory would end the process.
        os.posix_fallocate(file.fileno(), 0, size)
        mapped = torch.from_file(f"{path}", shared=True, size=size, dtype=torch.uint8)
        mapped[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        for (name, start), part in zip(starts.items(), parts, strict=False):
            if part is None:
                continue
            kind = kinds[name]
            stop = start + kind.nbytes
            elements = mapped[start:stop].view(kind.dtype)
            whole = elements.view(kind.shape)
            boxes[name] = _write_part(whole, part.offset, part.make())
        os.fsync(file.fileno())
    return boxes


def _write_part(whole: torch.Tensor, offset: tuple[int, ...], tensor: torch.Tensor) -> list[files.Chunk]:
    """Copy a part of a tensor to its place in the file, and list its boxes."""
    if not tensor.numel():
        return []
    part = whole[Box(offset, tensor.shape).slices]
    part.copy_(tensor)
    if not part.dim():
        return [files.Chunk(0, (), (), zlib.crc32(bytes_of(part)))]
    row_bytes = part.nbytes // len(part)
    rows = max(BOX_BYTES // row_bytes, 1)
    first_row, *inner = offset
    boxes = []
    for number, box in enumerate(part.split(rows)):
        start = (first_row + number * rows, *inner)
        shape = tuple(box.shape)
        checksum = zlib.crc32(bytes_of(box))
        boxes.append(files.Chunk(0, start, shape, checksum))
    return boxes


def read_checksums(directory: Path) -> WrittenTensors | None:
    """Read the checksums of a directory, if it has any."""
    path = directory / CHECKSUMS
    if not path.is_file():
        return None
    try:
        manifest = files.decode_outline(path.read_bytes(), path)
    except CheckpointError as error:
        # Others write files of this name too.
        raise CheckpointError(f"{error}, or remove it to read without checksums") from None
    return manifest.tensors


def make_entry(path: Path, name: str, tensor: Any, written: WrittenTensors | None) -> Entry:
    """Make an entry of a tensor in a file.

    Args:
        path: The file.
        name: The name of the tensor.
        tensor: The tensor, as safetensors slices it.
        written: The checksums of all tensors; None reads without checks.

    Raises:
        CheckpointError: if the checksums are of another tensor.
    """
    shape = tuple(tensor.get_shape())
    # An empty box says the dtype without reading the tensor.
    dtype = tensor[(slice(0, 0),) * len(shape)].dtype
    if written is None:
        # A tensor that is read whole is the mapped file, so this takes a copy.
        return Entry(dtype, shape, lambda place: tensor[place].clone())
    leaf = written.get(name)
    expected = (files.name_of(dtype), shape)
    if leaf is None or leaf[:2] != expected:
        checksums = path.with_name(CHECKSUMS)
        raise CheckpointError(f"{checksums} is of another {name} than {path.name} has; remove it")
    read_chunk = partial(_read_chunk, path, tensor)
    return Entry(dtype, shape, partial(read_box, name, leaf, read_chunk))


def _read_chunk(path: Path, tensor: Any, name: str, chunk: files.Chunk, memory: torch.Tensor) -> None:
    """Read a box of a tensor, and refuse other bytes than were written."""
    memory.copy_(tensor[chunk.box.slices])
    checksum = zlib.crc32(bytes_of(memory))
    if checksum != chunk.checksum:
        text = f"{name} has other bytes than were written, in {[*chunk.shape]} from {[*chunk.offsets]}"
        raise CheckpointError(f"{path}: {text}; have it written again, or remove {CHECKSUMS}")
