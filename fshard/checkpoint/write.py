"""Writing one rank's part of a checkpoint, and making all parts a checkpoint."""

import fcntl
import json
import os
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Event, main_thread
from typing import Any

import torch

from fshard.checkpoint.files import MARK, named, read_bytes, write_bytes
from fshard.checkpoint.format import (
    DTYPES,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    CheckpointError,
    Chunk,
    File,
    Leaf,
    Manifest,
    check_tiles,
    digest,
    dtype_name,
    encode,
    file_name,
    stored,
)
from fshard.checkpoint.layout import Piece

# What is hashed and then written while the processor still has it at hand.
BLOCK_BYTES = 8 << 20
# Seconds between two looks for other ranks' parts.
LOOK_EVERY = 0.002
# Seconds that the end of the program waits for ranks that may be dead.
PATIENCE_AT_EXIT = 30.0


def write_part(directory: Path, rank: int, pieces: Mapping[str, Piece], tick: Callable[[int], Any]) -> None:
    """Write what a rank has to write, and then the list of it, by which others know that it is there.

    One pass hashes, writes and tells of progress, which the writer of safetensors does not.

    Args:
        directory: The checkpoint that is being made.
        rank: This rank.
        pieces: Its parts, by the path of their leaves.
        tick: Called with bytes as they are written.
    """
    # By the size of elements, so that each is aligned.
    ordered = sorted(pieces.items(), key=lambda item: -item[1].tensor.element_size())
    entries: dict[str, Any] = {}
    end = 0
    for path, piece in ordered:
        tensor, start = stored(piece.tensor), end
        end += tensor.nbytes
        name = dict(DTYPES)[dtype_name(tensor)]
        entries[path] = {"dtype": name, "shape": list(tensor.shape), "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    # So that the tensors start at a multiple of 64 bytes.
    header += b" " * (-(8 + len(header)) % 64)
    header = len(header).to_bytes(8, "little") + header
    part = directory / file_name(rank)
    with named(part), open(part, "xb", buffering=0) as file:
        # The kernel gives it back when this process is killed, by which the first rank knows; some disks have no locks.
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        chunks = _write_file(file.fileno(), header, dict(ordered), tick)
        listing = {"bytes": len(header) + end, "header": digest(header), "chunks": chunks}
        # The last thing, because the first rank may rename the directory once it sees it.
        write_bytes(directory / _listing_name(rank), json.dumps(listing).encode(), durable=False)


def _write_file(
    descriptor: int, header: bytes, pieces: Mapping[str, Piece], tick: Callable[[int], Any]
) -> dict[str, list[Any]]:
    chunks = {}
    _write_all(descriptor, memoryview(header))
    for name, piece in pieces.items():
        checksum = 0
        data = bytes_of(stored(piece.tensor))
        for start in range(0, len(data), BLOCK_BYTES):
            block = data[start : start + BLOCK_BYTES]
            checksum = zlib.crc32(block, checksum)
            _write_all(descriptor, block)
            tick(len(block))
        chunks[name] = [piece.offset, piece.shape, checksum]
    os.fsync(descriptor)
    return chunks


def join_parts(
    directory: Path, world_size: int, step: int, leaves: Mapping[str, Leaf], values: Mapping[str, Any], wait: "Wait"
) -> None:
    """Wait for the parts of all ranks and write the manifest of them.

    Args:
        directory: The checkpoint that is being made.
        world_size: How many ranks write.
        step: The step it is of.
        leaves: Leaves that are tensors, by path, without chunks.
        values: Other leaves, by path.
        wait: How to wait.

    Raises:
        CheckpointError: if a part does not come, or parts do not make whole leaves.
    """
    files = []
    chunks: dict[str, list[Chunk]] = {path: [] for path in leaves}
    for rank in range(world_size):
        listed = directory / _listing_name(rank)
        wait(listed, directory / file_name(rank))
        listing = json.loads(read_bytes(listed, MAX_MANIFEST_BYTES))
        files.append(File(listing["bytes"], listing["header"]))
        for leaf, (offset, shape, checksum) in listing["chunks"].items():
            chunks[leaf].append(Chunk(rank, tuple(offset), tuple(shape), checksum))
    tensors = {path: leaf._replace(chunks=tuple(chunks[path])) for path, leaf in leaves.items()}
    for path, leaf in tensors.items():
        check_tiles(path, leaf)
    write_bytes(directory / MANIFEST, encode(Manifest(step, tensors, dict(values), tuple(files))))
    for rank in range(world_size):
        os.remove(directory / _listing_name(rank))
    # From now on the manifest says whose it is.
    os.remove(directory / MARK)


class Wait:
    """Waits for a file that another rank writes, until a time is over or somebody gives up."""

    def __init__(self, seconds: float) -> None:
        """Start the time."""
        self.given_up = Event()
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds

    def __call__(self, path: Path, part: Path) -> None:
        """Wait until a file is there.

        Args:
            path: The file.
            part: What its writer has locked until then.

        Raises:
            CheckpointError: if it does not come.
        """
        while not path.exists():
            if not main_thread().is_alive():
                # The lock is free once the file is there, too.
                if _is_free(part) and not path.exists():
                    raise CheckpointError(
                        f"{part}: expected a rank to write it, got one that is gone; see why it ended"
                    )
                self._deadline = min(self._deadline, time.monotonic() + PATIENCE_AT_EXIT)
            if time.monotonic() > self._deadline:
                remedy = "see that every rank is alive and that all share the directory"
                raise CheckpointError(f"{path}: found nothing after {self._seconds:.0f} s; {remedy}")
            if self.given_up.wait(LOOK_EVERY):
                raise CheckpointError("another rank failed")


def _is_free(part: Path) -> bool:
    """Whether a file is there and nobody has it locked."""
    try:
        with open(part, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _listing_name(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The elements of a tensor as bytes on the host."""
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # A single element counts as contiguous whatever its stride, which a view as bytes does not allow.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy().data


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
