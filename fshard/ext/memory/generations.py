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

import math
import os
import secrets
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fshard.checkpoint import latest_step
from fshard.ext.memory.job_directory import (
    JOB_VARIABLES,
    find_directory,
    find_job,
    make_private,
    remove_unlocked_slots,
)
from fshard.ext.memory.neighbours import Neighbours, fetch_part
from fshard.ext.memory.search import Generation, search_generations
from fshard.ext.memory.slots import SLOTS, VERSION, SlotWriter
from fshard.extend import (
    Exchange,
    choose_boxes,
    describe_state,
    files,
    flatten,
    is_tracing,
    rank_state,
    ranks_on_host,
    read_environment,
    tensor_of,
    transforms_active,
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
    root = f"/dev/shm/fshard-{os.geteuid()}" if memory is True else memory
    path = find_directory(exchange.path("memory", root), directory)
    if path is not None:
        return Generations(path, exchange, directory)
    if exchange.rank == 0:
        warnings.warn(
            f"{exchange.label}: memory= has no effect, because a restart could not be told from a new run. Start the "
            f"program by torchrun, or set one of {', '.join(JOB_VARIABLES)}",
            stacklevel=4,
        )
    return None


class Generations:
    """The generations of a job: writes this rank's parts, and finds those that are whole."""

    def __init__(self, directory: Path, exchange: Exchange, checkpoints: Path) -> None:
        """Keep the job's directory on this host, which is made by the first save.

        Args:
            directory: The job's directory.
            exchange: The ranks of the run.
            checkpoints: The directory of checkpoints.
        """
        self._directory = directory
        self._checkpoints = checkpoints
        self._exchange = Exchange(LABEL, mesh=exchange.ranks)
        # How often the groups of ranks were made anew when ranks agreed on the layout of the slots.
        self._groups = 0
        # What the slots are laid out for: the number of leaves, and their kinds by path.
        self._kinds: Any = None
        # The paths of leaves that are no tensors.
        self._value_paths: list[str] = []
        self._outline: Any = None
        # By 0 for generations of even numbers, and 1 for those of odd ones.
        self._slots: dict[int, SlotWriter] = {}
        # The number of the next generation.
        self._number = 0
        # The last step at which the run did not go back; infinity where that is not known.
        self._last_step = math.inf
        self._neighbours: Neighbours | None = None

    def save(self, state: Any, step: int) -> None:
        """Write a generation, which counts when all ranks have returned.

        Ranks exchange messages only if leaves are of other kinds than in the save before.

        Args:
            state: As for `checkpoint.save`.
            step: The step.
        """
        flat = flatten(state)
        leaves = dict(flat.named_leaves)
        # Two leaves of one path are refused.
        kinds = len(flat.leaves), {path: _describe_kind(leaf) for path, leaf in leaves.items()}
        if kinds != self._kinds or is_tracing() or transforms_active():
            self._begin(state, step)
            self._kinds = kinds
        values = {path: leaves[path] for path in self._value_paths}
        content = files.encode(files.Manifest(step, {}, values))
        if len(content) + NUMBER_BYTES > self._outline.values["room"]:
            # A text of the state has grown.
            self._begin(state, step)
        slot = self._slots.get(self._number % 2) or self._open()
        slot.write(self._number, content, leaves)
        if self._neighbours is not None:
            self._neighbours.offer(partial(slot.read, self._number))
        self._number += 1

    def goes_back(self, step: int) -> bool:
        """Tell every rank whether a restart would read a state of a later step than the one that is saved next.

        Ranks exchange messages in the first save, where steps become smaller, and after a failure, when they may be a
        step apart.
        """
        exchange = self._exchange
        groups = rank_state().generation if exchange.ranks.size > 1 else 0
        if self._groups != groups:
            self._groups = groups
            self._kinds = None
            self._last_step = math.inf
        if step < self._last_step:
            newest = self._find_step_on_disk(exchange)
            for each in self._search(exchange):
                if each.is_readable:
                    newest = max(newest, each.step)
            if step < newest:
                return True
        self._last_step = step
        return False

    def find(self, exchange: Exchange, step: int | None) -> list[Generation]:
        """Find the whole generations of a step, or with None those not older than the checkpoint saved last.

        Args:
            exchange: The ranks that read.
            step: The step.

        Returns:
            The generations, the newest first, on every rank the same.
        """
        # All ranks have come here, and write to no slot any more, before any of them looks into the slots.
        on_disk = self._find_step_on_disk(exchange)
        ranks = exchange.ranks.size
        generations = self._search(exchange)
        readable = [each for each in generations if each.is_readable]
        # As torchrun says.
        is_restart = read_environment().get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        if ranks_on_host(ranks) < ranks:
            is_lost = generations or is_restart
            cause = "hosts are lost together with those that had copies of theirs"
        else:
            # A kill in the first save leaves parts of one generation, and loses nothing.
            is_lost = generations[1:]
            cause = "ranks saved different numbers or texts in it, or exchanged nothing between two saves"
        if is_lost and not readable and exchange.rank == 0:
            warnings.warn(
                f"{exchange.label}: no state in memory is whole, because {cause}. The disk is read", stacklevel=4
            )
        return [each for each in readable if each.step == step or (step is None and each.step >= on_disk)]

    def remove(self) -> None:
        """Remove the job's directory when all ranks have come here, unless another manager still saves there.

        Every rank must call this.
        """
        if self._neighbours is not None:
            self._neighbours.close()
            self._neighbours = None
        self._kinds = None
        self._leave_slots()
        self._exchange.take_first(None)
        remove_unlocked_slots(self._directory)

    def _search(self, exchange: Exchange) -> list[Generation]:
        """Find the generations that there are, the newest first, and fetch what other hosts have of them."""
        ranks = exchange.ranks.size
        if ranks_on_host(ranks) < ranks:
            fetch_part(exchange, self._directory)
        return search_generations(exchange, self._directory)

    def _find_step_on_disk(self, exchange: Exchange) -> int:
        """Find the step of the checkpoint that was saved last; the first rank looks for all."""
        return exchange.take_first(None if exchange.rank else latest_step(self._checkpoints)) or 0

    def _begin(self, state: Any, step: int) -> None:
        """Agree with all ranks on the layout of the slots, and on the number of the next generation."""
        exchange = self._exchange
        rank, ranks = exchange.rank, exchange.ranks.size
        tensors, manifest = describe_state(exchange, state, step)
        same = {"(step)": step, "(job)": find_job(), **manifest.values}
        holders = exchange.find_holders(tensors, {path: repr(value) for path, value in same.items()})
        with exchange.raise_on_all_ranks(self._directory):
            make_private(self._directory)
        generations = search_generations(exchange, self._directory)
        self._number = 1 + max((each.number for each in generations), default=0)
        for each in generations:
            if each.is_readable:
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
        room = 2 * len(files.encode(manifest._replace(tensors={}))) + NUMBER_BYTES
        values = {"token": exchange.take_first(secrets.token_hex(8)), "rank": rank, "ranks": ranks, "room": room}
        self._outline = files.Manifest(VERSION, stored, values)
        self._value_paths = list(manifest.values)
        self._leave_slots()

    def _leave_slots(self) -> None:
        """Write to the slots of before no more."""
        for slot in self._slots.values():
            slot.unlock()
        self._slots = {}

    def _open(self) -> SlotWriter:
        """Make the slot of the next generation."""
        exchange = self._exchange
        with exchange.raise_on_all_ranks():
            if self._slots:
                # The generation before is whole, and ranks that are no more have nothing to give.
                for path in self._directory.glob(SLOTS):
                    if int(path.stem[5:]) >= exchange.ranks.size:
                        path.unlink(missing_ok=True)
            name = f"rank-{exchange.rank:05d}.{self._number % 2}"
            slot = SlotWriter(self._directory / name, self._outline)
        self._slots[self._number % 2] = slot
        return slot


def _describe_kind(leaf: Any) -> Any:
    """Describe what decides whether a leaf can be saved, and where, also where one rank has a parameter.

    This is all that saves compare, thousands of times.
    """
    tensor = tensor_of(leaf)
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return type(leaf)
    return tensor is leaf or leaf.spec, tensor.dtype, tensor.shape, tensor.is_meta, tensor.layout
