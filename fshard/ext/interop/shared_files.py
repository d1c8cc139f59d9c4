"""Files of safetensors that ranks write side by side, and checksums of the boxes that each of them wrote."""

import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from operator import index
from pathlib import Path
from typing import Any

import torch

from fshard.checkpoint import CheckpointError
from fshard.extend import Exchange, bytes_of, expect, lay_out

# CRC-32 of boxes, by the names of tensors.
CHECKSUMS = "checksums.json"
# A box has at most so many bytes, or one row: so much is read to check it.
BOX_BYTES = 16 * 1024 * 1024

# The dtype of a tensor in a file, and its shape.
Kind = tuple[torch.dtype, Sequence[int]]
# The part of a tensor that a rank writes: where it starts along each dim, and a function that makes it.
Part = tuple[Sequence[int], Callable[[], torch.Tensor]]
# Where a box starts along each dim, its shape, and the CRC-32 of its bytes.
Checked = tuple[Sequence[int], Sequence[int], int]


def write(
    exchange: Exchange, directory: Path, files: Mapping[str, Mapping[str, Kind]], parts: Iterator[Part | None]
) -> dict[str, list[Checked]]:
    """Write parts of tensors at their places in files. Every rank must call this.

    Args:
        exchange: The exchange.
        directory: Where the files go.
        files: The tensors of each file by name, those of larger elements first.
        parts: This rank's part of each tensor, in this order, or None; all are taken, whatever fails.

    Returns:
        The boxes that all ranks wrote, by the name of the tensor.
    """
    sums: dict[str, list[Checked]] = {name: [] for kinds in files.values() for name in kinds}
    try:
        for file, kinds in files.items():
            header, starts, size = lay_out(kinds, format="pt")
            # Ranks begin in no order: each makes the file if it is not there.
            with open(directory / file, "a+b") as out:
                # A full disk is an error here; a write to mapped memory would end the process.
                os.posix_fallocate(out.fileno(), 0, size)
                mapped = torch.from_file(f"{directory / file}", shared=True, size=size, dtype=torch.uint8)
                if not exchange.rank:
                    mapped[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
                for (name, start), part in zip(starts.items(), parts, strict=False):
                    dtype, shape = kinds[name]
                    whole = mapped[start : start + dtype.itemsize * math.prod(shape)].view(dtype).view(tuple(shape))
                    sums[name] = _write(whole, part[0], part[1]()) if part else []
                os.fsync(out.fileno())
    finally:
        for _ in parts:
            pass
        said = exchange.everyone(sums)
    return {name: [box for each in said for box in each[name]] for name in sums}


def _write(whole: torch.Tensor, offset: Sequence[int], tensor: torch.Tensor) -> list[Checked]:
    """Copy a part of a tensor to its place in the file, and list its boxes with their checksums."""
    if not tensor.numel():
        return []
    part = whole[tuple(slice(at, at + size) for at, size in zip(offset, tensor.shape, strict=True))]
    part.copy_(tensor)
    if not part.dim():
        return [((), (), zlib.crc32(bytes_of(part)))]
    rows = max(BOX_BYTES * len(part) // part.nbytes, 1)
    boxes = zip(count(offset[0], rows), part.split(rows), strict=False)
    return [((at, *offset[1:]), tuple(box.shape), zlib.crc32(bytes_of(box))) for at, box in boxes]


def read_checksums(directory: Path) -> dict[str, list[Checked]] | None:
    """Read the checksums of a directory, if it has any."""
    path = directory / CHECKSUMS
    if not path.is_file():
        return None
    try:
        return {
            name: [(tuple(map(index, offset)), tuple(map(index, size)), index(crc)) for offset, size, crc in boxes]
            for name, boxes in json.loads(path.read_bytes()).items()
        }
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: found no checksums of tensors ({type(error).__name__})") from None


def read(path: Path, name: str, tensor: Any, boxes: Sequence[Checked] | None, place: tuple[slice, ...]) -> torch.Tensor:
    """Read a part of a tensor in a file, if the boxes that it lies in have the bytes that were written."""
    if boxes is not None:
        got, remedy = f"{[box[:2] for box in boxes]!s:.80}", f"remove {CHECKSUMS}"
        is_all = sum(math.prod(size) for _, size, _ in boxes) == math.prod(tensor.get_shape())
        expect(is_all, f"{path.with_name(CHECKSUMS)}", f"boxes that make all of {name}", got, remedy, CheckpointError)
    for offset, size, checksum in boxes or ():
        box = tuple(slice(at, at + n) for at, n in zip(offset, size, strict=False))
        if all(max(a.start, b.start) < min(a.stop, b.stop) for a, b in zip(box, place, strict=False)):
            needed, remedy = f"the bytes of {name} that were written", f"have it written again, or remove {CHECKSUMS}"
            holds = zlib.crc32(bytes_of(tensor[box])) == checksum
            expect(holds, f"{path}", needed, f"others in {[*size]} from {[*offset]}", remedy, CheckpointError)
    found: torch.Tensor = tensor[place]
    # A copy, because a tensor that is read whole is the mapped file.
    return found.clone()
