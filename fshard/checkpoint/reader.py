"""CheckpointReader: read the files of a checkpoint, and refuse those that are damaged."""

import os
import zlib
from functools import cache
from pathlib import Path

import torch

from fshard.checkpoint import files
from fshard.checkpoint.directory import open_regular
from fshard.checkpoint.errors import CheckpointError, expect_file
from fshard.shard import bytes_of


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
        path = checkpoint / files.MANIFEST
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            limit = files.MAX_MANIFEST_BYTES
            expect_file(size <= limit, f"{path}", f"at most {limit} bytes", f"{size}")
            # A read of the limit would take memory for all of it.
            data = file.read(size)
        self.manifest = files.decode(data, path)
        self.digest = files.digest(data)
        self.starts = cache(self._read_starts)
        self._kinds = files.list_kinds(self.manifest)

    def check_files(self) -> None:
        """Refuse files that are not there, or of another size or header than follow from the manifest."""
        for index in self._kinds:
            self.starts(index)

    def _read_starts(self, index: int) -> dict[str, int]:
        """Return where chunks begin in a file, whose size and header follow from the manifest, byte for byte."""
        path = self._path / files.file_name(index)
        layout = files.lay_out(self._kinds[index], pairs=True)
        with open_regular(path) as file:
            header = file.read(len(layout.header))
            size = os.fstat(file.fileno()).st_size
        expect_file(size == layout.size, f"{path}", f"{layout.size} bytes", f"{size}")
        if header != layout.header:
            raise CheckpointError(
                f"{path}: its header is not the one that follows from the manifest, so it was damaged"
            )
        return layout.starts

    def read_chunk(self, path: str, chunk: files.Chunk, memory: torch.Tensor) -> None:
        """Read a chunk of a leaf into contiguous memory on the host."""
        file_path = self._path / files.file_name(chunk.file)
        data = bytes_of(memory)
        start = self.starts(chunk.file)[path]
        with open_regular(file_path) as file:
            file.seek(start)
            is_whole = file.readinto(data) == len(data) and zlib.crc32(data) == chunk.checksum
        if not is_whole:
            raise CheckpointError(f"{file_path}: the elements of {path} do not match their checksum, so it was damaged")
