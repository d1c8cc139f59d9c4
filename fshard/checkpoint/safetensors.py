"""Files of safetensors, written in one pass: the package's own writer needs all tensors of a file at once."""

import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import IO, Any, NamedTuple

import torch

from fshard.checkpoint.pieces import bytes_of

# The name of each dtype in files, by its name in torch.
DTYPES = MappingProxyType(
    {
        **{"bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32"},
        **{"int32": "I32", "uint64": "U64", "int64": "I64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"},
        **{"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64", "complex64": "C64"},
    }
)
# Bytes that are hashed and then written while the processor still has them at hand.
BLOCK_BYTES = 8 << 20


class Layout(NamedTuple):
    """The header of a file, the place where each tensor begins, in their order, and the size of the file."""

    header: bytes
    starts: dict[str, int]
    size: int


def lay_out(tensors: Mapping[str, tuple[str, Sequence[int]]], *, pairs: bool = False, **metadata: str) -> Layout:
    """Lay out the tensors of a file: larger elements first, so that each is aligned, from a multiple of 64 bytes on.

    Args:
        tensors: The name in torch of each tensor's dtype and its shape, by the tensor's name.
        pairs: Whether complex numbers are written as pairs of real ones.
        metadata: Texts that the file says of itself.
    """
    entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    starts, end = {}, 0
    for name in sorted(tensors, key=lambda name: -_dtype(tensors[name][0]).itemsize):
        dtype, shape = _dtype(tensors[name][0]), list(tensors[name][1])
        if pairs and dtype.is_complex:
            dtype, shape = dtype.to_real(), [*shape, 2]
        starts[name], end = end, end + dtype.itemsize * math.prod(shape)
        stored = DTYPES[str(dtype).removeprefix("torch.")]
        entries[name] = {"dtype": stored, "shape": shape, "data_offsets": [starts[name], end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % 64)
    header = len(header).to_bytes(8, "little") + header
    return Layout(header, {name: len(header) + start for name, start in starts.items()}, len(header) + end)


def write_tensors(file: IO[bytes], header: bytes, tensors: Iterable[torch.Tensor]) -> list[int]:
    """Write a header and tensors to a file, and have them on the disk.

    Args:
        file: The open file, without a buffer.
        header: The header.
        tensors: The tensors, in the order of the layout; each is taken when the one before it is written.

    Returns:
        The CRC-32 of each tensor's bytes.
    """
    write_all(file.fileno(), memoryview(header))
    checksums = []
    for tensor in tensors:
        data, checksum = bytes_of(tensor), 0
        for start in range(0, len(data), BLOCK_BYTES):
            block = data[start : start + BLOCK_BYTES]
            checksum = zlib.crc32(block, checksum)
            write_all(file.fileno(), block)
        checksums.append(checksum)
    os.fsync(file.fileno())
    return checksums


def write_all(descriptor: int, data: memoryview) -> None:
    """Write all of some bytes, of which one call of the system may write a part."""
    while data:
        data = data[os.write(descriptor, data) :]


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)
