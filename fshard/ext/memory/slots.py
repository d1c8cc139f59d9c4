"""Slots: files in the host's memory, each of which holds one rank's part of a generation.

A slot needs no checksums. Its rank clears the mark, copies the elements, and writes the mark again, and the memory is
the host's: a kill comes between two instructions, and what was written before it stays. So elements lie behind every
mark that is there. Whoever reads a slot that its rank may write over meanwhile looks at the mark, or at the number of
the generation, once more behind the elements. A host that loses power loses the memory, or takes another name for the
job.

fshard/checkpoint/FORMAT.md describes the file.
"""

import fcntl
import json
import mmap
import os
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from fshard.checkpoint import CheckpointError
from fshard.extend import bytes_of, copy_into, files, local_box, open_regular, tensor_of

# Of the outline, which has it in the place of a step.
VERSION = 2
# The elements begin on a page of their own.
_PAGE = 4096
# Names of slots, for glob: a rank, and 0 for generations of even numbers, or 1 for those of odd ones.
SLOTS = f"rank-{5 * '[0-9]'}.[01]"


class Slot:
    """A file for one rank's part of a generation, and of those that follow it there.

    Attributes:
        path: The file.
        outline: A manifest of what does not change from one generation to the next: all leaves that are tensors, each
            with the chunk that is in the slot, if one is; and as values the `token` of those ranks that write
            generations together, the `rank` that writes, how many `ranks` do, and the `room` for the mark.
        mark: Where the text is that says which generation the slot holds.
        kinds: The dtype and the shape of each chunk, by path.
        starts: Where chunks begin in the file, by path.
        size: The bytes of the file.
    """

    def __init__(self, path: Path, outline: files.Manifest) -> None:
        """Lay the file out, which is neither made nor read."""
        self.path = path
        self.outline = outline
        outline_end = len(files.encode(outline)) + 1
        mark_end = outline_end + outline.values["room"]
        self.mark = slice(outline_end, mark_end)
        self.kinds = files.list_kinds(outline)[outline.values["rank"]]
        layout = files.lay_out(self.kinds, pairs=True)
        # Without the header, which the outline takes the place of.
        shift = mark_end + -mark_end % _PAGE - len(layout.header)
        self.starts = {name: shift + start for name, start in layout.starts.items()}
        self.size = shift + layout.size


class SlotWriter(Slot):
    """A slot that this rank writes: a mapped file, whose memory is set aside before anything is written to it.

    Attributes:
        number: The number of the generation that is in the slot, or is being written there.
    """

    def __init__(self, path: Path, outline: files.Manifest) -> None:
        """Make the file anew. A process of an earlier start that still writes does so to a file without a name.

        Raises:
            CheckpointError: if there is no room for it.
        """
        super().__init__(path, outline)
        self.number = 0
        self._lock, self._memory = _allocate(path, self.size)
        weakref.finalize(self, os.close, self._lock)
        self._put(slice(0, self.mark.start), files.encode(outline))
        self._targets = {}
        for name, start in self.starts.items():
            dtype, shape = self.kinds[name]
            count = torch.Size(shape).numel()
            target = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start)
            self._targets[name] = target.view(shape)

    def write(self, number: int, content: bytes, leaves: Mapping[str, Any]) -> None:
        """Write a generation, which counts on this rank as soon as this returns.

        Args:
            number: The number of the generation.
            content: A manifest of its step and of the leaves that are no tensors.
            leaves: The leaves by path, of which the slot has those in `starts`.
        """
        elements = []
        for name, target in self._targets.items():
            tensor = tensor_of(leaves[name])
            if tensor.shape != target.shape:
                # It has padding, or is one element that is split, which is stored with a dim.
                tensor = local_box(leaves[name]).tensor
            elements.append(tensor)
        self.number = number
        # A kill in between leaves a slot without a mark.
        self._put(self.mark, b"")
        copy_into(list(self._targets.values()), elements)
        self._put(self.mark, b"%d " % number + content)

    def read(self, number: int) -> tuple[str, memoryview | None]:
        """Copy a generation in a thread that does not write.

        Returns:
            The name of the slot, and its content; None if another generation takes its place meanwhile.
        """
        # numpy holds no lock of the interpreter meanwhile, and takes one processor.
        data = torch.frombuffer(self._memory, dtype=torch.uint8).numpy().copy().data
        return self.path.name, data if self.number == number else None

    def unlock(self) -> None:
        """Give the lock up, also where a process that was forked meanwhile, such as one that loads data, has it too."""
        fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _put(self, place: slice, text: bytes) -> None:
        self._memory[place] = text.ljust(place.stop - place.start, b"\0")


def _allocate(path: Path, size: int) -> tuple[int, mmap.mmap]:
    """Map a new file with memory for all of it, so that no write to it can end the process; it is locked."""
    try:
        path.unlink(missing_ok=True)
        with open(path, "x+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            # Others see by the lock that this job runs.
            fcntl.flock(file, fcntl.LOCK_EX)
            memory = mmap.mmap(file.fileno(), size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            return os.dup(file.fileno()), memory
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
    """

    def __init__(self, path: Path) -> None:
        """Read what a slot says of itself.

        Raises:
            CheckpointError: if it holds no part of a generation, or half of one.
        """
        with open_regular(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            outline = files.decode_outline(data[: data.find(b"\0")], path)
            super().__init__(path, outline)
            if outline.step != VERSION or len(data) != self.size:
                raise CheckpointError(f"{path}: is no slot of version {VERSION}, or not all of one")
            self._text = data[self.mark]
        number, _, content = self._text.rstrip(b"\0").partition(b" ")
        self.number = int(number)
        self.content = files.decode_outline(content, path)
        values = outline.values
        self.generation = json.dumps([self.number, values["ranks"], values["token"], content.decode()])

    def read(self, name: str, memory: torch.Tensor) -> None:
        """Read the chunk of a leaf into contiguous memory on the host.

        Raises:
            CheckpointError: if the slot is written over meanwhile, for example by a process of an earlier start.
        """
        data = bytes_of(memory)
        with open_regular(self.path) as file:
            file.seek(self.starts[name])
            count = file.readinto(data)
            file.seek(self.mark.start)
            text = file.read(len(self._text))
        if count != len(data) or text != self._text:
            raise CheckpointError(f"{self.path}: was written over while {name} was read")


def list_parts(directory: Path) -> list[SlotPart]:
    """List the parts of generations that are in the slots of a directory; slots without a whole part are left out."""
    parts = []
    for path in directory.glob(SLOTS):
        with suppress(Exception):
            if not path.is_symlink():
                parts.append(SlotPart(path))
    return parts
