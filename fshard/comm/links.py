"""Links: connections of this rank to a few others of an axis, by which all of them agree in few messages.

In round k a rank sends what it has heard so far to the rank 2^k places further, so that after log2 W rounds it has
heard of all W ranks. What ranks know is merged on the way. Data of tensors goes over other connections.
"""

import errno
import fcntl
import hmac
import json
import math
import secrets
import select
import socket
import struct
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from fshard import _compat
from fshard.comm.groups import PendingCollective

__all__ = ["LONGEST_WAIT", "Listener", "connect_to", "prepare_link", "receive"]

# Of a message: its tag, its round, and its bytes.
HEADER = struct.Struct("!IBQ")
# What a rank that connects says first: the secret of the other rank, and its own number.
HELLO = struct.Struct("!16sI")
# Seconds that a listener waits for each part of this hello, while others wait.
HELLO_TIME = 2.0
# Seconds of a wait at most.
LONGEST_WAIT = 1e6
# How many connections may wait until this rank looks at them.
BACKLOG = 128
# Bytes of a part of a message, and those that the system keeps for a link at least.
PART_BYTES = 2**15
BUFFER_BYTES = 2**18
# Seconds that a listener waits for a connection.
ACCEPT_TIME = 0.5
# The request by which Linux tells the address of an interface, and where in the answer that is.
SIOCGIFADDR = 0x8915
ADDRESS_BYTES = slice(20, 24)
# When TCP asks whether an idle peer is there still, in seconds, and how often in vain.
KEEPALIVE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))

# Merges what two ranks know. It is associative and commutative, and merging what is known already changes nothing.
Merge = Callable[[bytes, bytes], bytes]


def plan_rounds(rank: int, size: int) -> list[tuple[int, int]]:
    """List for each round the rank to send to, and the one to receive from.

    >>> plan_rounds(1, 4), plan_rounds(1, 3)
    ([(0, 0), (3, 3)], [(2, 0), (0, 2)])
    """
    steps = [1 << k for k in range((size - 1).bit_length())]
    if size & (size - 1) == 0:
        # Both directions of each connection are used.
        return [(rank ^ step, rank ^ step) for step in steps]
    return [((rank + step) % size, (rank - step) % size) for step in steps]


def list_peers(rank: int, ranks: Sequence[int]) -> list[int]:
    """List those of some ranks that one of them has a link with."""
    places = set[int]().union(*plan_rounds(ranks.index(rank), len(ranks)))
    return sorted(map(ranks.__getitem__, places))


def receive(link: socket.socket, size: int) -> bytes:
    """Receive so many bytes.

    Raises:
        OSError: if the connection ends before, or nothing comes within its timeout.
    """
    received = b""
    while len(received) < size:
        data = link.recv(size - len(received))
        if not data:
            raise ConnectionResetError("it has ended")
        received += data
    return received


class Links:
    """This rank's links to its peers on the axes of a mesh.

    Attributes:
        sockets: The connections, by the ranks of the peers.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self.sockets: dict[int, socket.socket] = {}
        weakref.finalize(self, _close_all, self.sockets.values())

    def swap(self, issued: PendingCollective, number: int, to: int, source: int, data: bytes) -> bytes:
        """Send one rank a message, and receive one from another or the same.

        A rank sends and receives parts of both by turns. The system takes two parts that nobody has read, so that ranks
        which all send at once do not wait for each other.

        Args:
            issued: The exchange, whose `awaits` others follow that look for the cause of a wait.
            number: The round.
            to: The rank to send to.
            source: The rank to receive from.
            data: The message.

        Returns:
            The message that came.

        Raises:
            DistBackendError: if a link ends, or lets nothing pass within the timeout.
        """
        place = [issued.entry.chain_hash, number]
        message = memoryview(HEADER.pack(*place, len(data)) + data)
        received = bytearray()
        # How many bytes come; more once the header has said so.
        size = HEADER.size
        try:
            while message or len(received) < size:
                if message:
                    issued.awaits = number, [to]
                    self.sockets[to].sendall(message[:PART_BYTES])
                    message = message[PART_BYTES:]
                issued.awaits = number, [source]
                received += receive(self.sockets[source], min(size - len(received), PART_BYTES))
                if len(received) == HEADER.size:
                    *place_of_source, nbytes = HEADER.unpack(received)
                    # If it does something else, read until the thread that watches knows what, and ends the links.
                    size += nbytes if place_of_source == place else sys.maxsize
        except OSError as error:
            raise dist.DistBackendError(f"the link to rank {issued.awaits[1][0]} failed: {error}") from error
        return bytes(received[HEADER.size :])

    def find_ended_peers(self) -> list[int]:
        """Find the ranks that have ended their links, as far as this rank has not ended them itself."""
        poll = select.poll()
        peer_of = {}
        # A thread may look while links are made.
        for peer, link in list(self.sockets.items()):
            # Linux tells of an end only if asked, also behind data that has not been read.
            poll.register(link, getattr(select, "POLLRDHUP", 0))
            peer_of[link.fileno()] = peer
        return sorted(peer_of[number] for number, _ in poll.poll(0))

    def cut(self) -> None:
        """End all links."""
        for link in list(self.sockets.values()):
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)


def swap_in_rounds(issued: PendingCollective, known: bytes, merge: Merge) -> bytes:
    """Merge what all ranks of a group know, of more of them in every round.

    Args:
        issued: The exchange, for which this rank waits.
        known: What this rank knows.
        merge: Merges what two ranks know.

    Returns:
        What all ranks know together.

    Raises:
        DistBackendError: if a link ends, or lets nothing pass within the timeout.
    """
    group = issued.group
    ranks = group.ranks
    for number, (to, source) in enumerate(plan_rounds(group.local_rank, len(ranks))):
        known = merge(known, group.links.swap(issued, number, ranks[to], ranks[source], known))
    issued.awaits = math.inf, ()
    return known


class Listener:
    """Where other ranks connect to this one in a meeting; the links of all its axes come there.

    Args:
        store: By which ranks found each other. Others reach this rank by the interface that leads there, unless
            GLOO_SOCKET_IFNAME names another one.
    """

    def __init__(self, store: Any) -> None:
        host = find_host(store)
        self._secret = secrets.token_bytes(16)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        self._socket.settimeout(ACCEPT_TIME)
        # What other ranks need to connect.
        self.address = json.dumps([*self._socket.getsockname()[:2], self._secret.hex()])

    def accept(self, *ranks: int) -> dict[int, socket.socket]:
        """Take the connection of one of some ranks, for which this one waits a little; nothing if none has come.

        A connection is closed if it does not know the secret, comes from another rank, or takes too long to say so.
        """
        with suppress(TimeoutError, ConnectionAbortedError):
            link, _ = self._socket.accept()
            link.settimeout(HELLO_TIME)
            with suppress(OSError):
                secret, rank = HELLO.unpack(receive(link, HELLO.size))
                if hmac.compare_digest(secret, self._secret) and rank in ranks:
                    return {rank: link}
            link.close()
        return {}

    def close(self) -> None:
        """Let nobody connect any more."""
        self._socket.close()


def connect_to(address: str, rank: int, timeout: float) -> socket.socket:
    """Connect to the listener of another rank.

    Args:
        address: The listener's.
        rank: This rank.
        timeout: Seconds to wait.

    Raises:
        TimeoutError: if nobody answers.
        RuntimeError: if it cannot be reached.
    """
    host, port, secret = json.loads(address)
    try:
        link = socket.create_connection((host, port), timeout=min(timeout, LONGEST_WAIT))
        link.sendall(HELLO.pack(bytes.fromhex(secret), rank))
    except OSError as error:
        if isinstance(error, TimeoutError) or error.errno == errno.EMFILE:
            raise
        raise RuntimeError(
            f"no connection to {host}:{port} ({error}). Set GLOO_SOCKET_IFNAME on each rank to a network interface by "
            "which the others reach it"
        ) from error
    return link


def prepare_link(link: socket.socket, timeout: float) -> None:
    """Let small messages go at once, waits end, and the end of a machine that says nothing be noticed in a minute."""
    link.settimeout(min(timeout, LONGEST_WAIT))
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE:
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def find_host(store: Any) -> str:
    """Find the address by which other ranks reach this one."""
    interfaces = _compat.interfaces_of_gloo()
    if interfaces:
        return _address_of_interface(interfaces[0])
    # Where ranks found each other by a file, by the name of this host, as gloo does.
    server = _compat.server_of(store) or (socket.gethostname(), 1)
    try:
        family, _, _, _, place = socket.getaddrinfo(*server, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # This sends nothing.
            probe.connect(place)
            return str(probe.getsockname()[0])
    except socket.gaierror:
        return "127.0.0.1"


def _address_of_interface(name: str) -> str:
    """Read the address of a network interface."""
    request = struct.pack("256s", name.encode()[:15])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            return socket.inet_ntop(socket.AF_INET, fcntl.ioctl(probe, SIOCGIFADDR, request)[ADDRESS_BYTES])
    except OSError as error:
        text = f"GLOO_SOCKET_IFNAME names the network interface {name!r}, which has no IPv4 address here"
        raise OSError(text) from error


def _close_all(sockets: Iterable[socket.socket]) -> None:
    for each in sockets:
        each.close()
