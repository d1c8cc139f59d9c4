"""Neighbours: each rank's generations also go to a rank of the next host, while the next steps run.

The launcher starts `LOCAL_WORLD_SIZE` ranks on each host, one host after another. So a rank sends to the one that comes
so many ranks later, modulo all ranks. As soon as its slot has checksums, it sends the slot: for each generation the
bytes of its shards and a few kilobytes, over a connection of processors, with a thread at each end. The neighbour keeps
them beside its own host's slots, under the name that they have at home, once they match their checksums. So a host
takes memory for two slots of each rank of the host before it, and for one more of each while that comes in.

A restart reads the parts that its host has, whoever wrote them. A host that has taken the place of another one first
fetches the parts of its ranks.

A neighbour that is slow or gone holds up and raises nothing: the newest generation takes the place of one that waits.
But if a copy takes longer than the time from one generation to the next, the loss of a host may leave no generation
whole. Then, as when neighbours are lost together, a restart reads the disk.
"""

import json
import operator
import queue
import socket
import struct
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from fshard.checkpoint import CheckpointError
from fshard.ext.memory.job_directory import make_private
from fshard.ext.memory.slots import SlotPart, locate_parts, slot_path
from fshard.extend import Exchange, is_restart, links, name_ranks, rank_state, ranks_on_host, this_process

# What a rank that connects to another one's listener comes for.
COPIES = b"copies of a slot"
# Of a slot that is sent: its rank, which of the two of this rank it is, and its bytes.
HEADER = struct.Struct("!IBQ")
PART_BYTES = 2**20
# Seconds to wait for a connection.
CONNECT_TIME = 60.0
# Seconds until a thread has noticed that a connection has ended.
END_TIME = 5.0


class Neighbours:
    """This rank's connections to the rank that keeps its copies, and to the one whose copies it keeps."""

    def __init__(self, exchange: Exchange, directory: Path) -> None:
        """Let the ranks of an exchange, all of which call this, connect in the background.

        Args:
            exchange: The ranks.
            directory: The job's directory on this host, which exists.
        """
        rank, ranks = exchange.rank, exchange.ranks.size
        on_host = ranks_on_host(ranks)
        source = (rank - on_host) % ranks
        self._listener = links.Listener(rank_state().store)
        # The newest slot that has not been sent, or None at the end.
        self._waiting: queue.Queue[Path | None] = queue.Queue(1)
        self._is_over = threading.Event()
        status = directory.stat()
        place = [this_process().machine.partition(" ")[0], status.st_dev, status.st_ino]
        addresses = exchange.all_gather_object([self._listener.address, place])
        address, target_place = addresses[(rank + on_host) % ranks]
        self._threads = []
        if target_place != place:
            slots = iter(self._waiting.get, None)
            self._threads.append(start_thread(send_slots, address, rank, slots))
        if addresses[source][1] != place:
            receive = partial(receive_slots, is_sealed=True)
            self._threads.append(start_thread(receive, self._listener, source, directory, self._is_over.is_set))

    def offer(self, slot: Path | None) -> None:
        """Have a slot sent, in place of one that still waits; None ends the connection behind what is being sent."""
        with suppress(queue.Empty):
            self._waiting.get_nowait()
        self._waiting.put(slot)

    def close(self) -> None:
        """End both connections."""
        self._is_over.set()
        self.offer(None)
        for thread in self._threads:
            thread.join(END_TIME)
        self._listener.close()


def start_thread(call: Callable[..., object], *arguments: object) -> threading.Thread:
    """Call a function in a thread that no exit waits for."""
    thread = threading.Thread(target=call, args=arguments, daemon=True)
    thread.start()
    return thread


def send_slots(address: str, rank: int, slots: Iterable[Path]) -> None:
    """Send slots to another rank as long as it is there; a rank may write over one meanwhile."""
    with suppress(OSError, RuntimeError), links.connect_to(address, COPIES, rank, CONNECT_TIME) as link:
        links.prepare_link(link, links.LONGEST_WAIT)
        for slot in slots:
            data = slot.read_bytes()
            link.sendall(HEADER.pack(int(slot.stem[5:]), int(slot.suffix[1:]), len(data)) + data)


def receive_slots(
    listener: links.Listener, sender: int, directory: Path, is_over: Callable[[], bool], *, is_sealed: bool
) -> int:
    """Keep the slots that another rank sends, as long as it is there.

    Args:
        listener: Where it connects.
        sender: The rank.
        directory: The job's directory on this host.
        is_over: Whether to wait for its connection no longer.
        is_sealed: As for `receive_slot`.

    Returns:
        How many were whole.
    """
    link = None
    while link is None:
        if is_over():
            return 0
        link = listener.accept(COPIES, sender)
    count = 0
    with suppress(OSError, struct.error), link:
        links.prepare_link(link, CONNECT_TIME if not is_sealed else links.LONGEST_WAIT)
        while True:
            count += receive_slot(link, directory, is_sealed=is_sealed)
    return count


def receive_slot(link: socket.socket, directory: Path, *, is_sealed: bool) -> bool:
    """Receive a slot, and keep it in a directory if it is whole.

    Args:
        link: The connection.
        directory: The job's directory on this host.
        is_sealed: Whether it must have checksums, because its rank may write over it while it is sent.

    Returns:
        Whether it is whole.

    Raises:
        OSError: if the connection ends, or there is no room.
    """
    rank, index, size = HEADER.unpack(link.recv(HEADER.size, socket.MSG_WAITALL))
    path = directory / f"copy-{rank:05d}"
    try:
        with path.open("wb") as file:
            while size:
                data = link.recv(min(size, PART_BYTES))
                if not data:
                    raise ConnectionResetError("the connection has ended")
                size -= file.write(data)
        with suppress(ValueError, LookupError, TypeError, CheckpointError):
            SlotPart(path).check(is_sealed=is_sealed)
            path.replace(slot_path(directory, rank, index))
            return True
        return False
    finally:
        path.unlink(missing_ok=True)


def fetch_part(exchange: Exchange, directory: Path) -> None:
    """Fetch this rank's part of the newest generation from another host, if this host does not have it.

    Ranks that are as many as those that wrote it get their own parts. If there are more or fewer, each reads what its
    host has.

    Args:
        exchange: The ranks that restart, all of which call this.
        directory: The job's directory on this host.

    Raises:
        CheckpointError: on every rank, if a part cannot be fetched.
    """
    ranks = exchange.ranks.size
    if ranks_on_host(ranks) >= ranks:
        return
    parts, holders = locate_parts(exchange, directory)
    order = {}
    for name, ranks_of in holders.items():
        number, count, *_ = json.loads(name)
        if count == ranks:
            # Those that are whole come last, and the newest of these.
            order[name] = len(ranks_of) == ranks, number
    newest = max(order, key=order.__getitem__, default="")
    lost = [rank for rank in range(ranks) if newest and f"{rank}" not in holders[newest]]
    if lost:
        text = f"the parts of {name_ranks(lost)} are lost with their hosts and those of their neighbours"
        _warn_once(exchange, f"no state in memory is whole, because {text}")
    elif newest:
        with exchange.raise_on_all_ranks(directory):
            _trade_slots(exchange, directory, holders[newest], parts.get(newest, {}))
    elif is_restart():
        _warn_once(exchange, "no host has a state in memory")


def _warn_once(exchange: Exchange, text: str) -> None:
    """Warn on one rank that the disk is read, in the program's call of the manager."""
    if not exchange.rank:
        warnings.warn(f"{exchange.label}: {text}. The disk is read", stacklevel=6)


def _trade_slots(
    exchange: Exchange, directory: Path, holders: Mapping[str, list[int]], parts: Mapping[str, SlotPart]
) -> None:
    """Send the slots that others lack, and receive this rank's if its host lacks it.

    Args:
        exchange: The ranks.
        directory: The job's directory on this host.
        holders: The ranks that can send the slot of each rank; the first one does.
        parts: The parts that this host has.
    """
    rank = f"{exchange.rank}"
    listener = None if rank in parts else links.Listener(rank_state().store)
    wanted = {} if listener is None else {rank: listener.address}
    for other, address in exchange.merge_objects(wanted, operator.or_).items():
        if holders[other][0] == exchange.rank:
            start_thread(send_slots, address, exchange.rank, [parts[other].path])
    if listener is None:
        return
    make_private(directory)
    deadline = time.monotonic() + CONNECT_TIME
    sender = holders[rank][0]
    count = receive_slots(listener, sender, directory, lambda: time.monotonic() > deadline, is_sealed=False)
    listener.close()
    if not count:
        raise CheckpointError(f"{directory}: the part of rank {rank} did not come whole from rank {sender}")
