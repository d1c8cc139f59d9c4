"""Files of safetensors that ranks write side by side, and checksums of the boxes that each of them wrote."""

import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import index
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fshard.checkpoint import CheckpointError
from fshard.extend import Box, Exchange, bytes_of, lay_out

# The name of the file that has the CRC-32 of boxes, by the names of tensors.
CHECKSUMS = "checksums.json"
# A box has at most so many bytes, or one row: so much is read to check it.
BOX_BYTES = 16 * 1024 * 1024


class TensorKind(NamedTuple):
    """The dtype of a tensor in a file, and its shape."""

    dtype: torch.dtype
    shape: Sequence[int]

    @property
    def nbytes(self) -> int:
        """Count the bytes that the tensor takes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


# The tensors of a file by name, those of larger elements first.
TensorKinds = Mapping[str, TensorKind]


class Part(NamedTuple):
    """The part of a tensor that a rank writes: where it starts along each dim, and a function that makes it."""

    offset: tuple[int, ...]
    make: Callable[[], torch.Tensor]


class WrittenBox(NamedTuple):
    """A box of a tensor in a file: where it starts along each dim, its shape, and the CRC-32 of its bytes."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    checksum: int

    @property
    def place(self) -> tuple[slice, ...]:
        """Index the box in its tensor."""
        return Box(self.offset, self.shape).slices


WrittenBoxes = Mapping[str, Sequence[WrittenBox]]


def write(
    exchange: Exchange, directory: Path, files: Mapping[str, TensorKinds], parts: Iterator[Part | None]
) -> WrittenBoxes:
    """Write parts of tensors at their places in files. Every rank must call this.

    Args:
        exchange: The exchange.
        directory: Where the files go.
        files: The tensors of each file.
        parts: This rank's part of each tensor, in this order, or None. All are taken, also if a write fails, because
            other ranks may gather leaves with this one to make theirs.

    Returns:
        The boxes that all ranks wrote, by the name of the tensor.
    """
    boxes: dict[str, list[WrittenBox]] = {}
    try:
        for file, kinds in files.items():
            boxes |= _write_file(directory / file, kinds, parts, has_header=exchange.rank == 0)
    finally:
        for _ in parts:
            pass
        boxes_of_ranks = exchange.all_gather_object(boxes)
    boxes = {}
    for boxes_of_rank in boxes_of_ranks:
        for name, boxes_of_tensor in boxes_of_rank.items():
            boxes.setdefault(name, []).extend(boxes_of_tensor)
    return boxes


def _write_file(
    path: Path, kinds: TensorKinds, parts: Iterator[Part | None], *, has_header: bool
) -> dict[str, list[WrittenBox]]:
    """Write this rank's parts of the tensors of one file, with its header or without, and list their boxes."""
    header, starts, size = lay_out(kinds, format="pt")
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
            whole = data.view(kind.dtype).view(tuple(kind.shape))
            boxes[name] = _write_part(whole, part.offset, part.make())
        os.fsync(file.fileno())
    return boxes


def _write_part(whole: torch.Tensor, offset: tuple[int, ...], tensor: torch.Tensor) -> list[WrittenBox]:
    """Copy a part of a tensor to its place in the file, and list its boxes."""
    if not tensor.numel():
        return []
    part = whole[Box(offset, tensor.shape).slices]
    part.copy_(tensor)
    if not part.dim():
        return [WrittenBox((), (), zlib.crc32(bytes_of(part)))]
    rows = max(BOX_BYTES * len(part) // part.nbytes, 1)
    first_row, *inner = offset
    boxes = []
    for number, box in enumerate(part.split(rows)):
        start = (first_row + number * rows, *inner)
        checksum = zlib.crc32(bytes_of(box))
        boxes.append(WrittenBox(start, tuple(box.shape), checksum))
    return boxes


def read_checksums(directory: Path) -> WrittenBoxes | None:
    """Read the checksums of a directory, if it has any."""
    path = directory / CHECKSUMS
    if not path.is_file():
        return None
    try:
        rows_by_name = json.loads(path.read_bytes())
        return {name: list(map(_parse_box, rows)) for name, rows in rows_by_name.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        cause = type(error).__name__
        raise CheckpointError(f"{path} does not hold checksums of tensors ({cause}); remove it") from None


def _parse_box(row: Sequence[Any]) -> WrittenBox:
    """Make a box of what JSON made of it, and refuse numbers that are not whole."""
    offset, shape, checksum = row
    return WrittenBox(tuple(map(index, offset)), tuple(map(index, shape)), index(checksum))


def read(
    path: Path, name: str, tensor: Any, boxes: Sequence[WrittenBox] | None, place: tuple[slice, ...]
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


def _check_boxes(path: Path, name: str, tensor: Any, boxes: Sequence[WrittenBox], place: tuple[slice, ...]) -> None:
    """Refuse boxes that do not make up a part of a tensor, and other bytes in those of them that it lies in."""
    part = Box(tuple(side.start for side in place), tuple(side.stop - side.start for side in place))
    counts = {}
    for box in boxes:
        shape = part.intersect(Box(box.offset, box.shape)).shape
        if len(box.offset) == len(box.shape) == len(place) and min(shape, default=1) > 0:
            counts[box] = math.prod(shape)
    if sum(counts.values()) != math.prod(part.shape):
        listed = [box[:2] for box in boxes]
        text = f"its boxes of {name} are not all of it: {listed!s:.80}"
        raise CheckpointError(f"{path.with_name(CHECKSUMS)}: {text}; remove {CHECKSUMS}")
    for box in counts:
        if zlib.crc32(bytes_of(tensor[box.place])) != box.checksum:
            text = f"{name} has other bytes than were written, in {[*box.shape]} from {[*box.offset]}"
            raise CheckpointError(f"{path}: {text}; have it written again, or remove {CHECKSUMS}")
