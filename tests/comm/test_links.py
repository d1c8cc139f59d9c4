"""Exchanges over links: their rounds and messages, and ranks that break in each round."""

import itertools
import json
import os
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from math import ceil, log2

import pytest
import torch
import torch.distributed as dist

import fshard as fs
from fshard import comm
from fshard.comm import failure, links
from fshard.comm.groups import ChainEntry, PendingCollective
from fshard.comm.links import HELLO, Links, Listener, list_peers, plan_rounds
from tests.forked_programs import run_on_ranks
from tests.ranks import my_rank, on_ranks
from tests.trees import one_axis, two_axes


@pytest.mark.parametrize("size", [*range(2, 20), 63, 64, 1000, 1024])
def test_every_rank_hears_of_all_in_few_rounds(size):
    plans = [plan_rounds(rank, size) for rank in range(size)]
    known = [1 << rank for rank in range(size)]
    for number in range(ceil(log2(size))):
        before = list(known)
        for rank, plan in enumerate(plans):
            to, source = plan[number]
            known[rank] |= before[source]
            # The rank that sends and the one that receives mean each other.
            assert plans[to][number][1] == rank
            assert rank in list_peers(to, range(size))
    assert {len(plan) for plan in plans} == {ceil(log2(size))}
    assert set(known) == {2**size - 1}


WORLDS = (3, 5, "3 processes", pytest.param("4 processes", marks=pytest.mark.slow))


@on_ranks(*WORLDS)
def test_values_of_any_size_reach_all_ranks(world_size):
    """Also those that are larger than what fits between two ranks, which all send at once."""
    axis = fs.axis_of(one_axis())
    for length in (0, 5, 3_000_000):
        values = comm.all_gather_object([my_rank(), "x" * (length + my_rank())], [axis], "example")
        assert [[rank, len(text)] for rank, text in values] == [[rank, length + rank] for rank in range(world_size)]
    flags = [True, False, my_rank() == 1, my_rank() == world_size - 1]
    assert comm.join_flags(flags, [axis], comm.Label("example")) == [True, False, True, True]


def test_ranks_that_all_send_long_messages_do_not_wait_for_each_other_where_the_system_keeps_little():
    """It may keep less than fshard asks for. As many ranks as a round has in a ring, then two that swap."""
    for size in (3, 2):
        ranks = [Links() for _ in range(size)]
        for rank, other in itertools.combinations(range(size), 2):
            ends = connect_with_small_buffers()
            ranks[rank].sockets[other], ranks[other].sockets[rank] = ends
        with ThreadPoolExecutor(size) as threads:
            messages = [bytes([rank]) * 2_000_000 for rank in range(size)]
            swaps = []
            for rank, message in enumerate(messages):
                issued = PendingCollective(None, None, None, ChainEntry(1, 1, ""))
                to, source = (rank + 1) % size, (rank - 1) % size
                swaps.append(threads.submit(ranks[rank].swap, issued, 0, to, source, message))
            assert [swap.result() for swap in swaps] == [messages[rank - 1] for rank in range(size)]


def connect_with_small_buffers():
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends = [socket.create_connection(server.getsockname()), server.accept()[0]]
    for end in ends:
        links.prepare_link(end, 10.0)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**15)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**15)
    return ends


@on_ranks(4, 6)
def test_each_row_of_a_mesh_merges_its_own(world_size):
    mesh = two_axes(world_size)
    for axis in (fs.axis_of(mesh, name) for name in mesh.mesh_dim_names):
        ranks = comm.merge_objects([my_rank()], lambda some, others: sorted({*some, *others}), [axis], "test")
        assert ranks == comm.all_gather_object(my_rank(), [axis], "test"), axis


def break_in_round(victim, number, fault, timeout):
    """Compare calls on all ranks, of which the victim breaks in a round; print the error, and the seconds."""
    axis = fs.axis_of(fs.init_mesh({"shard": -1}, device="cpu", timeout=timeout))
    params = fs.shard({"w": torch.ones(4)}, fs.zero3(axis, min_shard_elements=0))
    rank, size = dist.get_rank(), dist.get_world_size()
    swap = Links.swap

    def broken_swap(self, issued, step, *args):
        if step == number:
            if fault == "raise":
                raise ValueError("bad sample")
            if fault == "stop":
                # The others wait for the timeout, and hear of each other then.
                subprocess.Popen(["sh", "-c", f"sleep {timeout + 6}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        return swap(self, issued, step, *args)

    if rank == victim:
        Links.swap = broken_swap
    begin = time.monotonic()
    try:
        fs.gather(params)
    except Exception as error:
        text = str(error).splitlines()[0]
        print(json.dumps([type(error).__name__, text, time.monotonic() - begin, len(list_peers(rank, range(size)))]))


NAMED = {
    "kill": "rank {} was killed or has ended",
    "raise": "rank {} failed in gather: ValueError: bad sample",
    "stop": "rank {} did not join a collective within {:.0f} s. " + failure.LOOK_FOR_HANG,
}
# Ranks, the one that breaks, and the round; of the others two rows find each fault and way to connect.
BREAKS = [(2, 1, 0), (4, 3, 0), (4, 2, 1), (3, 1, 0), (3, 2, 1), (8, 5, 0), (8, 5, 1), (8, 5, 2), (7, 4, 2)]
FAST = [("kill", 4, 3, 0), ("raise", 3, 2, 1)]
SLOW = [(fault, *row) for fault in NAMED for row in BREAKS if (fault, *row) not in FAST]


@pytest.mark.parametrize(
    "fault, size, victim, number", [*FAST, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW)]
)
def test_a_rank_that_breaks_in_a_round_is_named_on_all(fault, size, victim, number):
    """Also by ranks that have no link with it."""
    timeout = 2.0 if fault == "stop" else 60.0
    programs = run_on_ranks(size, break_in_round, victim, number, fault, timeout)
    for rank, program in enumerate(programs):
        if rank == victim:
            if fault == "kill":
                assert program.code == -signal.SIGKILL
            continue
        if not program.output:
            # It had heard of all ranks before the victim broke.
            assert number > 0, programs
            continue
        kind, text, seconds, _ = json.loads(program.output)
        assert (kind, text) == ("CollectiveError", NAMED[fault].format(victim, timeout)), programs
        assert seconds < timeout + 13.0 if fault == "stop" else seconds < 15.0, programs


@on_ranks("3 processes")
def test_a_rank_that_waits_over_links_and_one_that_waits_for_rows_are_told_of_each_other(world_size):
    axis = fs.axis_of(fs.init_mesh({"shard": -1}, device="cpu", timeout=60.0))
    comm.all_gather([torch.ones(2)], axis, "before")

    def differ():
        if my_rank() == world_size - 1:
            comm.all_reduce([torch.ones(2)], axis, "sums")
        else:
            comm.all_gather_object(my_rank(), [axis], "values")

    begin = time.monotonic()
    with pytest.raises(comm.CollectiveError) as caught:
        differ()
    first, *lines = str(caught.value).splitlines()
    assert first == "ranks differ in a collective"
    assert any(f"  rank {world_size - 1}: all_reduce number 2 (sums) over 'shard' of" in line for line in lines), lines
    assert any("all_gather number 2 (values) over 'shard' of a value of each rank" in line for line in lines), lines
    assert time.monotonic() - begin < 20.0


@on_ranks("2 processes")
def test_ranks_whose_exchanges_differ_are_named():
    axis = fs.axis_of(fs.init_mesh({"shard": -1}, device="cpu", timeout=60.0))
    with pytest.raises(comm.CollectiveError) as caught:
        comm.all_gather_object(1, [axis], f"of rank {my_rank()}")
    first, *lines = str(caught.value).splitlines()
    assert first == "ranks differ in a collective"
    for rank in range(2):
        assert f"  rank {rank}: all_gather number 1 (of rank {rank}) over 'shard' of a value of each rank" in lines


def listener():
    """A listener of this process, and where it listens."""
    made = Listener(dist.HashStore())
    host, port, secret = json.loads(made.address)
    return made, (host, port), bytes.fromhex(secret)


def test_strangers_neither_join_nor_hold_up_a_rank(monkeypatch):
    monkeypatch.setattr(links, "HELLO_TIME", 0.05)
    monkeypatch.setattr(links, "ACCEPT_TIME", 0.02)
    made, place, secret = listener()
    silent, short, wrong, other, right = (socket.create_connection(place) for _ in range(5))
    hello = HELLO.pack(secret, 1)
    short.sendall(hello[:7])
    wrong.sendall(HELLO.pack(b"w" * 16, 1))
    # A rank that waits for this one asks whether it lives.
    other.sendall(HELLO.pack(secret, 2))
    # What follows is left to the one who reads the link.
    right.sendall(hello + b"message")
    begin = time.monotonic()
    assert [made.accept(0, 1) for _ in range(4)] == [{}] * 4
    link = made.accept(0, 1)[1]
    assert made.accept(0) == {}
    assert time.monotonic() - begin < 5.0
    assert link.getpeername() == right.getsockname()
    assert link.recv(100) == b"message"
    for stranger in (silent, short, wrong, other):
        stranger.settimeout(5.0)
        assert stranger.recv(1) == b""
    made.close()
    for each in (silent, short, wrong, other, right, link):
        each.close()


def test_an_interface_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    made, (host, _), _ = listener()
    assert host == "127.0.0.1"
    made.close()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing0")
    with pytest.raises(OSError, match=r"^GLOO_SOCKET_IFNAME names the network interface 'nothing0', which has no"):
        Listener(dist.HashStore())
