"""What agreement costs a rank: programs of real ranks that count it, for test_cost_laws.py and benchmarks/agreement.py.

Sockets and what they have sent are read from the system, so that the counts are the same whatever code sends.
"""

import json
import math
import os
import socket
import statistics
import sys
import time
from collections import Counter
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

import fshard as fs
from fshard import comm
from fshard._compat import collectives
from fshard.comm.agree import DIGEST_BYTES
from fshard.comm.links import HEADER
from fshard.comm.sockets import sockets_of_mesh
from tests.comm.counted_meetings import count_requests
from tests.forked_programs import run_on_ranks

# Fields of the kernel's `struct tcp_info`: bytes that have arrived, and segments with data that were sent.
TCP_INFO_SIZE = 232
BYTES_ACKED = slice(120, 128)
DATA_SEGMENTS_OUT = slice(156, 160)
# Seconds until the other end has acknowledged what was sent.
UNTIL_ACKNOWLEDGED = 0.2

# What decides a call with some leaves.
FACTS = json.dumps({f"leaf {number}": "dtype torch.float32" for number in range(100)})
COUNTED_COMPARISONS = 4
TIMED_COMPARISONS = 100


class Connection(NamedTuple):
    """One TCP socket of this process."""

    kind: str  # "store" for a client of the store, "listener", or "peer" for a connection with another rank
    segments: int  # segments with data that this end has sent
    bytes: int  # bytes that this end has sent


def list_connections(store_port: int) -> dict[int, Connection]:
    """List the TCP sockets of this process by their inodes."""
    connections = {}
    for descriptor, inode in collectives._open_sockets().items():
        _, peer_port = collectives._ports_of_socket(descriptor)
        kind = "listener" if peer_port is None else "store" if peer_port == store_port else "peer"
        with socket.socket(fileno=os.dup(descriptor)) as duplicate:
            if duplicate.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            information = duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_SIZE)
        segments = int.from_bytes(information[DATA_SEGMENTS_OUT], sys.byteorder)
        nbytes = int.from_bytes(information[BYTES_ACKED], sys.byteorder)
        connections[inode] = Connection(kind, segments, nbytes)
    return connections


def print_costs(store_port: int, is_timed: bool) -> None:
    """The program of a rank: make a mesh, compare calls, and print what both took."""
    os.environ |= {"MASTER_PORT": f"{store_port}", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    # A rank that waits for a late one looks what it does, by requests that are not counted here.
    collectives.FIRST_LOOK = math.inf
    already_open = list_connections(store_port)
    requests = Counter[str]()
    count_requests(requests)
    begin = time.monotonic()
    mesh = fs.init_mesh({"shard": -1}, device="cpu", timeout=60.0)
    end = time.monotonic()
    requests_of_start = dict(requests)
    axis = fs.axis_of(mesh)
    time.sleep(UNTIL_ACKNOWLEDGED)
    opened = {inode: each for inode, each in list_connections(store_port).items() if inode not in already_open}
    to_store = [each for each in opened.values() if each.kind == "store"]
    costs: dict[str, Any] = {
        "sockets": Counter(each.kind for each in opened.values()),
        "requests to the store": requests_of_start,
        "segments to the store": sum(each.segments for each in to_store),
        "bytes to the store": sum(each.bytes for each in to_store),
        "begin": begin,
        "end": end,
        **count_comparison(axis, store_port),
    }
    if is_timed:
        costs |= time_comparison(axis)
    print(json.dumps(costs), flush=True)
    dist.barrier()
    time.sleep(UNTIL_ACKNOWLEDGED)
    # Many processes that end as a program does take a small machine longer than all that is counted.
    os._exit(0)


def compare(axis: fs.Axis) -> None:
    """Compare a call whose facts are longer than what ranks send of them."""
    comm.check_same_facts("a call", {axis: FACTS})


def count_comparison(axis: fs.Axis, store_port: int) -> dict[str, float]:
    """Count what this rank sends to its peers in one comparison, on average."""
    compare(axis)
    time.sleep(UNTIL_ACKNOWLEDGED)
    before = list_connections(store_port)
    for _ in range(COUNTED_COMPARISONS):
        compare(axis)
    time.sleep(UNTIL_ACKNOWLEDGED)
    segments = 0
    nbytes = 0
    for inode, connection in list_connections(store_port).items():
        if connection.kind == "peer":
            segments += connection.segments - before[inode].segments
            nbytes += connection.bytes - before[inode].bytes
    return {
        "segments of a comparison": segments / COUNTED_COMPARISONS,
        "bytes of a comparison": nbytes / COUNTED_COMPARISONS,
    }


def time_comparison(axis: fs.Axis) -> dict[str, list[float]]:
    """Time comparisons, in milliseconds: by the clock, and on the processor of the main thread."""
    wall = []
    processor = []
    for _ in range(TIMED_COMPARISONS):
        begin, begin_of_thread = time.perf_counter(), time.thread_time()
        compare(axis)
        wall.append(1e3 * (time.perf_counter() - begin))
        processor.append(1e3 * (time.thread_time() - begin_of_thread))
    return {
        "comparison, ms": statistics.quantiles(wall, n=4),
        "comparison, ms of the main thread": statistics.quantiles(processor, n=4),
    }


def costs_by_law(ranks: int) -> dict[str, int]:
    """What a rank of so many opens and sends, for a mesh of one axis; between processors unless its name says more."""
    rounds = (ranks - 1).bit_length()
    return {
        "sockets": sockets_of_mesh([ranks], sends_itself=False),
        "sockets, accelerators": sockets_of_mesh([ranks], sends_itself=True),
        "requests to the store": 5,
        "messages of a comparison": rounds,
        "bytes of a comparison": rounds * (HEADER.size + DIGEST_BYTES),
    }


def costs_of_ranks(ranks: int, *, is_timed: bool = False) -> list[dict[str, Any]]:
    """Run `print_costs` on ranks that are processes, whose store this process holds, as a launcher does.

    Returns:
        What each rank counted.
    """
    # torch's server looks up the name of each client. Of its own socket, which takes IPv6 too, it has addresses such as
    # ::ffff:127.0.0.1, which no /etc/hosts names, and a name server may take seconds to say so.
    listening = socket.create_server(("127.0.0.1", 0), backlog=ranks)
    host, port = listening.getsockname()
    descriptor, seconds = listening.detach(), timedelta(seconds=60.0)
    store = dist.TCPStore(host, port, None, True, seconds, wait_for_workers=False, master_listen_fd=descriptor)
    costs = []
    for program in run_on_ranks(ranks, print_costs, store.port, is_timed):
        assert program.code == 0, program
        costs.append(json.loads(program.output))
    return costs
