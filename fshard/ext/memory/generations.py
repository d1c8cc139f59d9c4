"""Generations: the last two states of a run, in the memory of the hosts that its ranks run on.

Each rank has two slots, and writes one generation to the first and the next one to the second. A generation counts when
all its ranks have written their parts. Nobody says so: a restart looks which parts there are.

Why two slots are enough, and ranks send nothing: a part counts from the moment in which `save` returns, because all
elements are in the slot by then, and its mark behind them. A rank that saves generation n + 1 has completed a step
after it saved generation n. The sums of this step have needed the gradients of all ranks, so all ranks have begun it:
each of them has returned from saving n. So n is whole on all ranks before the first of them writes over n - 1. A kill
at any moment leaves n - 1 or n whole, and never more than one step is lost. The memory of a host keeps what a killed
process has written, up to the instruction at which it was killed. The checksums guard what comes later, such as copies
to other hosts. A thread adds them while the next steps run; of a rank that was killed before, the mark counts alone.
With one host nothing waits for this thread, and a generation whose slot is written over first gets none. With several,
`save` waits for the checksums of the generation before, because only slots that have them are sent.

Steps in which ranks exchange nothing would let one rank go ahead of another by two generations. Then no generation may
be whole, and a restart reads the disk; it never reads parts of different generations.
"""

import json
import operator
import os
import secrets
import shutil
import threading
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fshard import Sharded
from fshard.checkpoint import CheckpointError
from fshard.ext.memory.job_directory import find_directory, make_private
from fshard.ext.memory.neighbours import Neighbours, fetch_part
from fshard.ext.memory.slots import VERSION, SlotPart, SlotWriter, locate_parts, slot_path
from fshard.extend import (
    JOB_VARIABLES,
    Exchange,
    choose_boxes,
    describe_state,
    files,
    flatten,
    ranks_on_host,
    tensor_of,
    without_padding,
)

# The public function that saves, for errors.
LABEL = "checkpoint.save"
# As nice as a thread can be.
LOWEST_PRIORITY = 19


def open_memory(exchange: Exchange, directory: Path, memory: Any) -> "Generations | None":
    """Return the generations of this job; None, with a warning, if no launcher names the job.

    Args:
        exchange: The ranks of the run.
        directory: The directory of checkpoints.
        memory: Where to keep them: True for /dev/shm, or the path of a directory of this user.
    """
    root = None if memory is True else exchange.path("memory", memory)
    path = find_directory(root, directory)
    if path is not None:
        return Generations(path, exchange)
    if not exchange.rank:
        warnings.warn(
            f"{exchange.label}: memory= has no effect, because a restart could not be told from a new run. Start the "
            f"program by torchrun, or set one of {', '.join(JOB_VARIABLES)}",
            stacklevel=4,
        )
    return None


class Generation(NamedTuple):
    """A generation that is whole.

    Attributes:
        number: The number of the generation, which counts on over restarts.
        step: The step of its state.
        parts: The parts of it that this rank can read, by the ranks that wrote them.
    """

    number: int
    step: int
    parts: Mapping[str, SlotPart]

    def manifest(self) -> files.Manifest:
        """Return a manifest with the chunks that this rank can read."""
        part, *_ = self.parts.values()
        tensors = {}
        for path, leaf in part.outline.tensors.items():
            # Each host has a box that ranks of several hosts hold.
            chunks = {}
            for other in self.parts.values():
                for chunk in other.outline.tensors[path].chunks:
                    chunks[chunk.box] = chunk
            tensors[path] = leaf._replace(chunks=tuple(chunks.values()))
        return part.content._replace(tensors=tensors)

    def read_chunk(self, path: str, chunk: files.Chunk, memory: torch.Tensor) -> None:
        """Read the chunk of a leaf into contiguous memory on the host."""
        self.parts[f"{chunk.file}"].read(path, memory)


def find_generations(exchange: Exchange, directory: Path) -> tuple[list[Generation], int]:
    """Find the generations that are whole, on every rank the same.

    Args:
        exchange: The ranks that ask, as many as there are now.
        directory: The job's directory on this host.

    Returns:
        The generations, that which was saved last first; and the largest number of any part.
    """
    parts, holders = locate_parts(exchange, directory)
    generations = []
    last = 0
    for name, ranks_of in holders.items():
        number, count, *_ = json.loads(name)
        last = max(last, number)
        readers = set[int]().union(*ranks_of.values())
        # Only generations that each rank sees a part of.
        if len(ranks_of) == count and len(readers) == exchange.ranks.size:
            part, *_ = parts[name].values()
            generations.append(Generation(number, part.content.step, parts[name]))
    return sorted(generations, reverse=True, key=operator.attrgetter("number")), last


class Generations:
    """The generations of a job: writes this rank's parts, and finds those that are whole."""

    def __init__(self, directory: Path, exchange: Exchange) -> None:
        """Keep the job's directory on this host, which is made by the first save."""
        self._directory = directory
        self._exchange = Exchange(LABEL, mesh=exchange.ranks)
        # What the slots are laid out for, as this rank alone can tell from one step to the next.
        self._layout: Any = None
        self._outline = files.Manifest(VERSION, {}, {})
        self._slots: list[SlotWriter | None] = [None, None]
        self._number = 0
        self._thread = ThreadPoolExecutor(1, LABEL, _lower_priority)
        self._sealed: Future[None] | None = None
        self._neighbours: Neighbours | None = None

    def save(self, state: Any, step: int) -> None:
        """Write a generation. It counts when all ranks have returned; checksums follow in a thread.

        Ranks exchange messages only if the layout of the state is another one than in the save before.

        Args:
            state: As for `checkpoint.save`.
            step: The step.
        """
        flat = flatten(state)
        leaves = dict(zip(flat.paths, flat.leaves, strict=True))
        layout: list[Any] = [flat.treedef]
        values = {}
        for path, leaf in leaves.items():
            local = tensor_of(leaf)
            if isinstance(local, torch.Tensor):
                layout.append(
                    (isinstance(leaf, Sharded) and leaf.spec, type(local), local.dtype, local.shape, local.device)
                )
            else:
                layout.append(type(leaf))
                values[path] = leaf
        # Texts may grow, but only so far.
        size = len(repr(values)).bit_length()
        layout.append(size)
        if self._neighbours:
            self.settle()
        if layout != self._layout:
            self._begin(state, step, room=16 * 2**size)
            self._layout = layout
        slot = self._slots[self._number % 2] or self._open()
        content = files.encode(files.Manifest(step, {}, dict(sorted(values.items()))))
        with torch.no_grad():
            slot.write(self._number, content, [_elements_of(leaves[path], slot.kinds[path][1]) for path in slot.starts])
        self._sealed = self._thread.submit(self._seal, slot, self._number)
        self._number += 1

    def _seal(self, slot: SlotWriter, number: int) -> None:
        """Write checksums, and let the neighbour have a copy."""
        if slot.seal(number) and self._neighbours:
            self._neighbours.offer(slot.path)

    def settle(self) -> None:
        """Wait for the checksums of the generation before."""
        if self._sealed:
            self._sealed.result()

    def find(self, exchange: Exchange) -> list[Generation]:
        """Find the generations that are whole, the newest first, and fetch what other hosts have of them.

        Args:
            exchange: The ranks that read.
        """
        try:
            fetch_part(exchange, self._directory)
        except CheckpointError as error:
            warnings.warn(f"a state in the memory of another host cannot be read: {error}", stacklevel=4)
        return find_generations(exchange, self._directory)[0]

    def remove(self) -> None:
        """Remove the job's directory when all ranks have come to the end of the run. Every rank must call this."""
        self.settle()
        if self._neighbours:
            self._neighbours.close()
        self._exchange.take_first(None)
        self._layout = None
        shutil.rmtree(self._directory, ignore_errors=True)

    def _begin(self, state: Any, step: int, room: int) -> None:
        """Agree with all ranks on a layout, and on the number of the next generation."""
        exchange = self._exchange
        rank, ranks = exchange.rank, exchange.ranks.size
        with exchange.raise_on_all_ranks(self._directory):
            tensors, manifest = describe_state(exchange, state, step)
            make_private(self._directory)
        same = {"(step)": step, "(job)": self._directory.name, **manifest.values}
        holders = exchange.find_holders(tensors, {path: repr(value) for path, value in same.items()})
        generations, self._number = find_generations(exchange, self._directory)
        self._number += 1
        if generations:
            # Not in the slots of the generation that is whole: those are the last to be written over.
            self._number += (self._number - generations[0].number + 1) % 2
        on_host = ranks_on_host(ranks)
        if self._neighbours is None and on_host < ranks:
            self._neighbours = Neighbours(exchange, self._directory)
        for path, holding in holders.items():
            # Each host has what its ranks hold.
            holders[path] = [other for other in holding if other // on_host == rank // on_host]
        stored = dict(manifest.tensors)
        for path, box in choose_boxes(rank, tensors, holders).items():
            chunk = files.Chunk(rank, *box.box, 0)
            stored[path] = stored[path]._replace(chunks=(chunk,))
        room += 1024 + len(files.encode(manifest))
        values = {"token": exchange.take_first(secrets.token_hex(8)), "rank": rank, "ranks": ranks, "room": room}
        self._outline = files.Manifest(VERSION, stored, values)
        self._slots = [None, None]

    def _open(self) -> SlotWriter:
        """Make the slot of the next generation."""
        exchange = self._exchange
        with exchange.raise_on_all_ranks():
            if any(self._slots):
                # The generation before is whole, and ranks that are no more have nothing to give.
                for path in self._directory.glob("rank-*"):
                    if int(path.stem[5:]) >= exchange.ranks.size:
                        path.unlink(missing_ok=True)
            slot = SlotWriter(slot_path(self._directory, exchange.rank, self._number), self._outline)
        self._slots[self._number % 2] = slot
        return slot


def _lower_priority() -> None:
    """Let this thread take only what the steps leave of the processor."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)


def _elements_of(leaf: Any, shape: tuple[int, ...]) -> torch.Tensor:
    """This rank's elements of a leaf, a view of it; one element that is split is stored with a dim."""
    return without_padding(leaf).reshape(shape) if isinstance(leaf, Sharded) else leaf
