"""Generations: the last two states of a run, in the memory of the hosts that its ranks run on.

Each rank has two slots, and writes one generation to the first and the next one to the second. A generation counts when
all its ranks have written their parts. Nobody says so: a restart looks which parts there are.

Why two slots are enough, and ranks send nothing: a part counts from the moment in which `save` returns, because all
elements are in the slot by then, and its mark behind them. A rank that saves generation n + 1 has completed a step
after it saved generation n. The sums of this step have needed the gradients of all ranks, so all ranks have begun it:
each of them has returned from saving n. So n is whole on all ranks before the first of them writes over n - 1. A kill
at any moment leaves n - 1 or n whole, and never more than one step is lost.

Steps in which ranks exchange nothing would let one rank go ahead of another by two generations. Then no generation may
be whole, and a restart reads the disk; it never reads parts of different generations.
"""

import secrets
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fshard import Sharded
from fshard.checkpoint import CheckpointError
from fshard.ext.memory.job_directory import find_directory, make_private
from fshard.ext.memory.neighbours import Neighbours, fetch_part
from fshard.ext.memory.search import Generation, search_generations
from fshard.ext.memory.slots import VERSION, SlotWriter, slot_path
from fshard.extend import (
    JOB_VARIABLES,
    Exchange,
    choose_boxes,
    describe_state,
    files,
    find_job,
    is_restart,
    ranks_on_host,
    without_padding,
)

# The public function that saves, for errors.
LABEL = "checkpoint.save"
# The bytes of a mark before the text of a state: a number and a space.
NUMBER_BYTES = 32


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
        self._neighbours: Neighbours | None = None

    def save(self, state: Any, step: int) -> None:
        """Write a generation, which counts when all ranks have returned.

        Ranks exchange messages only if the layout of the state is another one than in the save before.

        Args:
            state: As for `checkpoint.save`.
            step: The step.
        """
        tensors, manifest = describe_state(self._exchange, state, step)
        content = files.encode(manifest._replace(tensors={}))
        layout = manifest.tensors, [getattr(leaf, "spec", None) for leaf in tensors.values()]
        if layout != self._layout or len(content) + NUMBER_BYTES > self._outline.values["room"]:
            self._begin(tensors, manifest, len(content))
            self._layout = layout
        slot = self._slots[self._number % 2] or self._open()
        elements = []
        for path in slot.starts:
            _, shape = slot.kinds[path]
            elements.append(_elements_of(tensors[path], shape))
        slot.write(self._number, content, elements)
        if self._neighbours:
            self._neighbours.offer(slot, self._number)
        self._number += 1

    def find(self, exchange: Exchange) -> list[Generation]:
        """Find the generations that are whole, the newest first, and fetch what other hosts have of them.

        Args:
            exchange: The ranks that read.
        """
        ranks = exchange.ranks.size
        is_alone = ranks_on_host(ranks) >= ranks
        if not is_alone:
            try:
                fetch_part(exchange, self._directory)
            except CheckpointError as error:
                warnings.warn(f"a state in the memory of another host cannot be read: {error}", stacklevel=4)
        generations = search_generations(exchange, self._directory)
        readable = [each for each in generations if each.is_readable(ranks)]
        if not (readable or is_alone or exchange.rank) and (generations or is_restart()):
            problem = (
                "no state in memory is whole, because hosts are lost together with those that had copies of theirs"
            )
            warnings.warn(f"{exchange.label}: {problem}. The disk is read", stacklevel=4)
        return readable

    def remove(self) -> None:
        """Remove the job's directory when all ranks have come to the end of the run. Every rank must call this."""
        if self._neighbours:
            self._neighbours.close()
            self._neighbours = None
        self._exchange.take_first(None)
        self._layout = None
        shutil.rmtree(self._directory, ignore_errors=True)

    def _begin(self, tensors: Mapping[str, Any], manifest: files.Manifest, content_bytes: int) -> None:
        """Agree with all ranks on a layout, and on the number of the next generation."""
        exchange = self._exchange
        rank, ranks = exchange.rank, exchange.ranks.size
        with exchange.raise_on_all_ranks(self._directory):
            make_private(self._directory)
        same = {"(step)": manifest.step, "(job)": find_job(), **manifest.values}
        holders = exchange.find_holders(tensors, {path: repr(value) for path, value in same.items()})
        generations = search_generations(exchange, self._directory)
        self._number = 1 + max((each.number for each in generations), default=0)
        for each in generations:
            if each.is_readable(ranks):
                # Not in the slots of the generation that is whole: those are the last to be written over.
                self._number += (self._number - each.number + 1) % 2
                break
        on_host = ranks_on_host(ranks)
        if self._neighbours is None and on_host < ranks:
            self._neighbours = Neighbours(exchange, self._directory)
        for path, holding in holders.items():
            # Each host has what its ranks hold.
            holders[path] = [other for other in holding if other // on_host == rank // on_host]
        stored = dict(manifest.tensors)
        for path, box in choose_boxes(rank, tensors, holders).items():
            stored[path] = stored[path]._replace(chunks=(files.Chunk(rank, *box.box, 0),))
        # Texts of the state may grow, but only so far.
        room = 2 * content_bytes + NUMBER_BYTES
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


def _elements_of(leaf: Any, shape: tuple[int, ...]) -> torch.Tensor:
    """This rank's elements of a leaf, a view of it; one element that is split is stored with a dim."""
    return without_padding(leaf).detach().reshape(shape) if isinstance(leaf, Sharded) else leaf.detach()
