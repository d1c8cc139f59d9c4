"""Neighbours: each rank's generations also go to a rank of the next host, while the next steps run.

The launcher starts `LOCAL_WORLD_SIZE` ranks on each host, one host after another. So a rank sends to the one that comes
so many ranks later, modulo all ranks. A thread reads each slot that has been written, and sends it if no other
generation has begun to take its place meanwhile: for each generation the bytes of its shards and a few kilobytes. The
neighbour keeps them beside its own host's slots, under the name that they have at home, once all of them have come. So
a host takes memory for two slots of each rank of the host before it, and for one more of each while that comes in.

A restart reads the parts that its host has, whoever wrote them. A host that has taken the place of another one first
fetches the parts of its ranks.

A neighbour that is slow or gone holds up and raises nothing: the newest generation takes the place of one that waits.
But if a copy takes longer than the time from one generation to the next, the loss of a host may leave no generation
whole. Then, as when neighbours are lost together, a restart reads the disk.
"""

import operator
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from fshard.ext.memory.job_directory import make_private
from fshard.ext.memory.search import Generation, search_generations
from fshard.extend import Exchange, find_machine, links, rank_state, ranks_on_host

# Reads a slot: its name, and its content unless another generation takes its place meanwhile.
ReadSlot = Callable[[], tuple[str, memoryview | None]]
# Of a slot that is sent: its name, and its bytes.
HEADER = struct.Struct("!12sQ")
PART_BYTES = 2**18
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
        self._listener = links.Listener(rank_state().store)
        # Reads the newest slot that has not been sent; None at the end.
        self._waiting: queue.Queue[ReadSlot | None] = queue.Queue(1)
        status = directory.stat()
        place = [find_machine().partition(" ")[0], status.st_dev, status.st_ino]
        address, target_place = exchange.all_gather_object([self._listener.address, place])[(rank + on_host) % ranks]
        source = (rank - on_host) % ranks
        self._threads = [start_thread(receive_slots, self._listener, source, directory, links.LONGEST_WAIT)]
        # Not to itself, where the launcher's hosts share one memory.
        if target_place != place:
            newest = map(operator.call, iter(self._waiting.get, None))
            self._threads.append(start_thread(send_slots, address, rank, newest))

    def offer(self, newest: ReadSlot | None) -> None:
        """Have a generation read and sent, in place of one that still waits; None ends this."""
        with suppress(queue.Empty):
            self._waiting.get_nowait()
        self._waiting.put(newest)

    def close(self) -> None:
        """End both connections, behind what is being sent."""
        self.offer(None)
        self._listener.close()
        for thread in self._threads:
            thread.join(END_TIME)


def start_thread(call: Callable[..., object], *arguments: object) -> threading.Thread:
    """Call a function in a thread that no exit waits for."""
    thread = threading.Thread(target=call, args=arguments, daemon=True)
    thread.start()
    return thread


def send_slots(address: str, rank: int, slots: Iterable[tuple[str, bytes | memoryview | None]]) -> None:
    """Send the content of slots by their names, where there is any, to another rank as long as it is there."""
    with suppress(OSError, RuntimeError), links.connect_to(address, rank, CONNECT_TIME) as link:
        links.prepare_link(link, links.LONGEST_WAIT)
        for name, data in slots:
            if data is not None:
                link.sendall(HEADER.pack(name.encode(), len(data)))
                link.sendall(data)


def receive_slots(listener: links.Listener, sender: int, directory: Path, timeout: float) -> None:
    """Keep the slots that another rank sends, as long as it is there.

    Args:
        listener: Where it connects, until this is closed.
        sender: The rank.
        directory: The job's directory on this host.
        timeout: Seconds to wait for it.
    """
    deadline = time.monotonic() + timeout
    link = None
    with suppress(OSError, struct.error):
        while link is None and time.monotonic() < deadline:
            link = listener.accept(sender).get(sender)
        if link is None:
            return
        with link:
            links.prepare_link(link, timeout)
            while True:
                receive_slot(link, directory)


def receive_slot(link: socket.socket, directory: Path) -> None:
    """Receive a slot, and keep it in a directory if all of it comes.

    Args:
        link: The connection.
        directory: The job's directory on this host.

    Raises:
        OSError: if the connection ends, or there is no room.
    """
    name, size = HEADER.unpack(links.receive(link, HEADER.size))
    path = directory / f"copy-{name.decode()}"
    try:
        with path.open("wb") as file:
            while size:
                size -= file.write(links.receive(link, min(size, PART_BYTES)))
        path.replace(directory / name.decode())
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
        CheckpointError: on every rank, if one of them cannot listen, or the directory is not of this user alone.
    """
    for generation in search_generations(exchange, directory):
        if len(generation.holders) == generation.ranks == exchange.ranks.size:
            with exchange.raise_on_all_ranks(directory):
                _trade_slots(exchange, directory, generation)
            return


def _trade_slots(exchange: Exchange, directory: Path, generation: Generation) -> None:
    """Send the slots that others lack, of which the first rank that can does, and receive this rank's if need be."""
    rank = f"{exchange.rank}"
    listener = None if rank in generation.parts else links.Listener(rank_state().store)
    for other, address in enumerate(exchange.all_gather_object(listener and listener.address)):
        if address and generation.holders[f"{other}"][0] == exchange.rank:
            path = generation.parts[f"{other}"].path
            start_thread(send_slots, address, exchange.rank, [(path.name, path.read_bytes())])
    if listener is None:
        return
    make_private(directory)
    # A part that does not come is missing when ranks look which generations are whole.
    receive_slots(listener, generation.holders[rank][0], directory, CONNECT_TIME)
    listener.close()
