"""Files of safetensors that ranks write side by side, and checksums of the boxes that each of them wrote."""

import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fshard.checkpoint import CheckpointError
from fshard.extend import Box, Exchange, bytes_of, files, lay_out

# The name of the file that has the CRC-32 of boxes. It is a manifest, as checkpoints of fshard have them.
CHECKSUMS = "checksums.json"
# A box has at most so many bytes, or one row: so much is read to check it.
BOX_BYTES = 16 * 1024 * 1024

# The tensors of a file by name, on the meta device, those of larger elements first.
TensorKinds = Mapping[str, torch.Tensor]
# The boxes that were written of each tensor.
WrittenBoxes = Mapping[str, Sequence[files.Chunk]]


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
            boxes |= _write_file(directory / file, kinds, parts, has_header=exchange.rank == 0)
    finally:
        for _ in parts:
            pass
        boxes_of_ranks = exchange.all_gather_object(boxes)
    if exchange.rank:
        return
    tensors = {}
    for kinds in kinds_of_files.values():
        for name, kind in kinds.items():
            written = chain.from_iterable(boxes_of_rank.get(name, ()) for boxes_of_rank in boxes_of_ranks)
            tensors[name] = files.StoredLeaf(f"{kind.dtype}", kind.shape, tuple(written))
    (directory / CHECKSUMS).write_bytes(files.encode(files.Manifest(0, tensors, {})))


def _write_file(
    path: Path, kinds: TensorKinds, parts: Iterator[Part | None], *, has_header: bool
) -> dict[str, list[files.Chunk]]:
    """Write this rank's parts of the tensors of one file, with its header or without, and list their boxes."""
    dtypes_and_shapes = {name: (kind.dtype, kind.shape) for name, kind in kinds.items()}
    header, starts, size = lay_out(dtypes_and_shapes, format="pt")
    boxes = {}
    # Ranks come here in any order, and the first one creates the file.
    with open(path, "a+b") as file:
        # On a full disk this is an error, where a write to mapped memory would end the process.
        os.posix_fallocate(file.fileno(), 0, size)
        mapped = torch.from_file(f"{path}", shared=True, size=size, dtype=torch.uint8)
        if has_header:
            mapped[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        for (name, start), part in zip(starts.items(), parts, strict=False):
            if part is None:
                continue
            kind = kinds[name]
            data = mapped[start : start + kind.nbytes]
            whole = data.view(kind.dtype).view(kind.shape)
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
    rows = max(BOX_BYTES * len(part) // part.nbytes, 1)
    first_row, *inner = offset
    boxes = []
    for number, box in enumerate(part.split(rows)):
        start = (first_row + number * rows, *inner)
        checksum = zlib.crc32(bytes_of(box))
        boxes.append(files.Chunk(0, start, tuple(box.shape), checksum))
    return boxes


def read_checksums(directory: Path) -> WrittenBoxes | None:
    """Read the checksums of a directory, if it has any."""
    path = directory / CHECKSUMS
    if not path.is_file():
        return None
    manifest = files.decode_outline(path.read_bytes(), path)
    return {name: tensor.chunks for name, tensor in manifest.tensors.items()}


def read(
    path: Path, name: str, tensor: Any, boxes: Sequence[files.Chunk] | None, place: tuple[slice, ...]
) -> torch.Tensor:
    """Read a part of a tensor in a file.

    Args:
        path: The file.
        name: The name of the tensor.
        tensor: The tensor, as safetensors slices it.
        boxes: The boxes that were written of it; None reads without checks.
        place: The part.

    Raises:
        CheckpointError: if a box that the part lies in has other bytes than were written.
    """
    if boxes is not None:
        _check_boxes(path, name, tensor, boxes, place)
    part: torch.Tensor = tensor[place]
    # A tensor that is read whole is the mapped file, so this takes a copy.
    return part.clone()


def _check_boxes(path: Path, name: str, tensor: Any, boxes: Sequence[files.Chunk], place: tuple[slice, ...]) -> None:
    """Refuse boxes that do not make up a part of a tensor, and other bytes in those of them that it lies in."""
    offsets = tuple(side.start for side in place)
    sizes = tuple(side.stop - side.start for side in place)
    part = Box(offsets, sizes)
    counts = {}
    for box in boxes:
        shape = part.intersect(box.box).shape
        if min(shape, default=1) > 0:
            counts[box] = math.prod(shape)
    if sum(counts.values()) != math.prod(sizes):
        text = f"its boxes of {name} are not all of it; remove {CHECKSUMS}, which may be of another export"
        raise CheckpointError(f"{path.with_name(CHECKSUMS)}: {text}")
    for box in counts:
        checksum = zlib.crc32(bytes_of(tensor[box.box.slices]))
        if checksum != box.checksum:
            text = f"{name} has other bytes than were written, in {[*box.shape]} from {[*box.offsets]}"
            raise CheckpointError(f"{path}: {text}; have it written again, or remove {CHECKSUMS}")
