"""Files of safetensors that ranks write side by side, and checksums of the boxes that each of them wrote."""

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, product, repeat
from pathlib import Path
from typing import Any, BinaryIO

import torch

from fshard.checkpoint import CheckpointError
from fshard.extend import Exchange, bytes_of, expect, lay_out

# CRC-32 of boxes, by the names of tensors.
CHECKSUMS = "checksums.json"
# A box has at most so many bytes, or one row: so much is copied to write it, and read to check it.
BOX_BYTES = 16 * 1024 * 1024

# The dtype of a tensor in a file, and its shape.
Kind = tuple[torch.dtype, Sequence[int]]
# What a rank writes of a tensor: where it starts along each dim, and what makes it.
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
        for name, kinds in files.items():
            header, starts, _ = lay_out(kinds, format="pt")
            # Ranks begin in no order: each makes the file if it is not there, and cuts nothing off.
            with open(os.open(directory / name, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as file:
                file.write(b"" if exchange.rank else header)
                for (tensor, start), part in zip(starts.items(), parts, strict=False):
                    for box in _boxes(*part) if part else ():
                        sums[tensor].append(_write_box(file, start, kinds[tensor], *box))
                file.flush()
                os.fsync(file.fileno())
    finally:
        for _ in parts:
            pass
        said = exchange.everyone(sums)
    return {name: [box for each in said for box in each[name]] for name in sums}


def _boxes(offset: Sequence[int], make: Callable[[], torch.Tensor]) -> Iterator[tuple[Sequence[int], torch.Tensor]]:
    tensor = make()
    if not tensor.dim():
        yield offset, tensor
    elif tensor.numel():
        rows = max(BOX_BYTES * len(tensor) // tensor.nbytes, 1)
        for begin in range(0, len(tensor), rows):
            yield (offset[0] + begin, *offset[1:]), tensor[begin : begin + rows]


def _write_box(file: BinaryIO, start: int, kind: Kind, offset: Sequence[int], tensor: torch.Tensor) -> Checked:
    dtype, shape = kind
    data, size = bytes_of(tensor.to(dtype)), tuple(tensor.shape)
    # Of the dims behind this one the box has all, so that it is a run of bytes for each index of those before.
    dim = max((dim for dim, n in enumerate(size) if n < shape[dim]), default=0)
    indices = [*product(*map(range, size[:dim]))]
    run, strides = len(data) // len(indices), torch.empty(shape, device="meta").stride()
    for number, index in enumerate(indices):
        place = sum((at + i) * step for at, i, step in zip(offset, chain(index, repeat(0)), strides, strict=False))
        file.seek(start + place * dtype.itemsize)
        file.write(data[number * run : (number + 1) * run])
    return offset, size, zlib.crc32(data)


def read_checksums(directory: Path) -> dict[str, list[Checked]]:
    """Read the checksums of a directory, if it has any."""
    path = directory / CHECKSUMS
    try:
        found = json.loads(path.read_bytes()) if path.exists() else {}
        return {name: [(at, size, checksum) for at, size, checksum in boxes] for name, boxes in found.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: found no checksums of tensors ({type(error).__name__})") from None


def read(path: Path, name: str, tensor: Any, sums: Sequence[Checked], box: tuple[slice, ...]) -> torch.Tensor:
    """Read a box of a tensor in a file, if the boxes that it lies in have the bytes that were written."""
    for offset, size, checksum in sums:
        whole = tuple(slice(at, at + n) for at, n in zip(offset, size, strict=True))
        if all(max(a.start, b.start) < min(a.stop, b.stop) for a, b in zip(whole, box, strict=True)):
            needed, remedy = f"the bytes of {name} that were written", f"have it written again, or remove {CHECKSUMS}"
            holds = zlib.crc32(bytes_of(tensor[whole])) == checksum
            expect(holds, f"{path}", needed, f"others in {size} from {offset}", remedy, CheckpointError)
    found: torch.Tensor = tensor[box]
    return found
