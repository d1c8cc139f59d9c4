"""Slots: files in the host's memory, each of which holds one rank's part of a generation.

fshard/checkpoint/FORMAT.md describes the file.
"""

import json
import mmap
import os
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from fshard.checkpoint import CheckpointError
from fshard.ext.memory.job_directory import check_private
from fshard.extend import Exchange, copy_into, expect_file, files, join_ranks, open_regular

# Of the outline, which has it in the place of a step.
VERSION = 1
# The elements begin on a page of their own.
_PAGE = 4096


class Slot:
    """A file for one rank's part of a generation, and of those that follow it there.

    Attributes:
        path: The file.
        outline: A manifest of what does not change from one generation to the next: all leaves that are tensors, each
            with the chunk that is in the slot, if one is; and as values the `token` of those ranks that write
            generations together, the `rank` that writes, how many `ranks` do, and the `room` for each of the two texts.
        kinds: The dtype and the shape of each chunk, by path.
        starts: Where chunks begin in the file, by path.
        size: The bytes of the file.
    """

    def __init__(self, path: Path, outline: files.Manifest) -> None:
        """Lay the file out, which is neither made nor read."""
        self.path = path
        self.outline = outline
        room = outline.values["room"]
        # The text that says which generation the slot holds, and that of the checksums.
        outline_end = len(files.encode(outline)) + 1
        mark_end = outline_end + room
        checksums_end = mark_end + room
        self._mark = slice(outline_end, mark_end)
        self._checksums = slice(mark_end, checksums_end)
        self.kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for name, leaf in outline.tensors.items():
            for chunk in leaf.chunks:
                self.kinds[name] = getattr(torch, leaf.dtype), chunk.shape
        layout = files.lay_out(self.kinds, pairs=True)
        # Without the header, which the outline takes the place of.
        shift = checksums_end + -checksums_end % _PAGE - len(layout.header)
        self.starts = {name: shift + start for name, start in layout.starts.items()}
        self.size = shift + layout.size


class SlotWriter(Slot):
    """A slot that this rank writes: a mapped file, whose memory is set aside before anything is written to it."""

    def __init__(self, path: Path, outline: files.Manifest) -> None:
        """Make the file anew. A process of an earlier start that still writes does so to a file without a name.

        Raises:
            CheckpointError: if there is no room for it.
        """
        super().__init__(path, outline)
        self._memory = _allocate(path, self.size)
        self._put(slice(0, self._mark.start), files.encode(outline))
        self._number = 0
        self._targets = []
        for name, start in self.starts.items():
            dtype, shape = self.kinds[name]
            count = torch.Size(shape).numel()
            self._targets.append(torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start).view(shape))
        # A thread of low priority that holds the interpreter's lock holds up the steps, so it takes these as they are.
        self._bytes = list(map(files.byte_view, self._targets))

    def write(self, number: int, content: bytes, tensors: Sequence[torch.Tensor]) -> None:
        """Write a generation, which counts on this rank as soon as this returns.

        Args:
            number: The number of the generation.
            content: A manifest of its step and of the leaves that are no tensors.
            tensors: The tensors, in the order of `starts`.
        """
        self._number = number
        # A kill in between leaves a slot without a mark.
        self._put(self._mark, b"")
        copy_into(self._targets, tensors)
        self._put(self._mark, b"%d " % number + content)

    def seal(self, number: int) -> bool:
        """Write the checksums of a generation unless another one takes its place meanwhile; returns whether it did."""
        checksums = {}
        for name, data in zip(self.starts, self._bytes, strict=True):
            checksums[name] = zlib.crc32(data)
            # Behind the elements, so that none is of another generation.
            if self._number != number:
                return False
        self._put(self._checksums, files.encode(files.Manifest(number, {}, checksums)))
        return True

    def _put(self, place: slice, text: bytes) -> None:
        self._memory[place] = text.ljust(place.stop - place.start, b"\0")


def _allocate(path: Path, size: int) -> mmap.mmap:
    """Map a new file with memory for all of it, so that no write to it can end the process."""
    try:
        path.unlink(missing_ok=True)
        with open(path, "x+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            return mmap.mmap(file.fileno(), size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except OSError as error:
        with suppress(OSError):
            path.unlink()
        remedy = "Each rank keeps two such files: make room there, or pass another directory as memory="
        raise CheckpointError(f"{path}: cannot set {size} bytes aside ({error.strerror}). {remedy}") from error


class SlotPart(Slot):
    """One rank's part of a generation, as its slot has it.

    Attributes:
        number: The number of the generation.
        content: A manifest of its step and of the leaves that are no tensors.
        generation: What all parts of the generation have in common, and no others: as JSON a list of the number, how
            many ranks wrote it, their token and the content.
        checksums: The checksums of chunks by path; empty if the rank was killed before it wrote them.
    """

    def __init__(self, path: Path) -> None:
        """Read what a slot says of itself.

        Raises:
            CheckpointError: if it holds no part of a generation, or half of one.
        """
        with open_regular(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            outline = files.decode_outline(data[: data.find(b"\0")], path)
            expect_file(outline.step == VERSION, f"{path}", f"version {VERSION}", f"{outline.step}")
            super().__init__(path, outline)
            expect_file(len(data) == self.size, f"{path}", f"{self.size} bytes", f"{len(data)}")
            mark = data[self._mark].rstrip(b"\0")
            checksums = data[self._checksums].rstrip(b"\0")
        number, _, content = mark.partition(b" ")
        self.number = int(number)
        self.content = files.decode_outline(content, path)
        values = outline.values
        self.generation = json.dumps([self.number, values["ranks"], values["token"], content.decode()])
        self.checksums: Mapping[str, Any] = {}
        with suppress(CheckpointError):
            sealed = files.decode_outline(checksums, path)
            self.checksums = sealed.values if sealed.step == self.number else {}

    def read(self, name: str, memory: torch.Tensor) -> None:
        """Read the chunk of a leaf into contiguous memory on the host.

        Raises:
            CheckpointError: if it does not match its checksum.
        """
        data = files.byte_view(memory)
        with open_regular(self.path) as file:
            file.seek(self.starts[name])
            is_whole = file.readinto(data) == len(data)
        # Without checksums the order of writes counts: the mark was written when the elements were there.
        expected = self.checksums.get(name)
        if expected is not None:
            is_whole = is_whole and expected == zlib.crc32(data)
        if not is_whole:
            raise CheckpointError(f"{self.path}: the elements of {name} do not match their checksum")

    def check(self, *, is_sealed: bool) -> None:
        """Refuse a part whose elements do not match their checksums, or which has none if it must be sealed.

        Raises:
            CheckpointError: if it is refused.
        """
        if is_sealed and self.checksums.keys() != self.kinds.keys():
            raise CheckpointError(f"{self.path}: its checksums are missing")
        for name, (dtype, shape) in self.kinds.items():
            self.read(name, torch.empty(shape, dtype=dtype, device="cpu"))


def slot_path(directory: Path, rank: int, number: int) -> Path:
    """The slot of a rank for generations of even numbers, or that for those of odd ones."""
    return directory / f"rank-{rank:05d}.{number % 2}"


def list_parts(directory: Path) -> list[SlotPart]:
    """List the parts of generations that are in the slots of a directory; slots without a whole part are left out."""
    parts = []
    for path in directory.glob("rank-*.[01]"):
        with suppress(OSError, ValueError, LookupError, TypeError):
            if not path.is_symlink():
                parts.append(SlotPart(path))
    return parts


# By generation and by the rank that wrote them: parts, and the ranks on whose hosts they are.
Parts = Mapping[str, Mapping[str, SlotPart]]
Holders = Mapping[str, Mapping[str, list[int]]]


def locate_parts(exchange: Exchange, directory: Path) -> tuple[Parts, Holders]:
    """Find the parts in the memory of all hosts.

    Args:
        exchange: The ranks that ask, as many as there are now.
        directory: The job's directory on this host.

    Returns:
        Those that this rank can read; and which ranks can read each of all, the same on every rank.
    """
    parts = defaultdict[str, dict[str, SlotPart]](dict)
    with exchange.raise_on_all_ranks(directory):
        if directory.exists():
            check_private(directory)
        for part in list_parts(directory):
            parts[part.generation][f"{part.outline.values['rank']}"] = part
    here = {name: {writer: [exchange.rank] for writer in writers} for name, writers in parts.items()}
    return parts, exchange.merge_objects(here, join_ranks)
