"""What grows with the number of ranks: keys of the store, and what a rank asks of it."""

import json
import math
import re
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from fshard import _compat
from fshard.comm import CollectiveError, Meeting, connect
from fshard.comm.failure import NOTE
from fshard.comm.groups import RankState
from fshard.comm.meeting import ANSWER, ASKERS, COUNT, END, ENTRY
from fshard.comm.sockets import sockets_of_mesh
from tests.comm.counted_meetings import print_costs_of_meshes, print_limits
from tests.forked_programs import run_on_ranks

# torch's server ends the connection of a client that sends a longer key.
LONGEST_KEY = 8192
MANY = 4096


def agree_alone(meeting, *_):
    """Come to a meeting of thousands, as each of them would."""
    meeting.board.set(ENTRY.format(MANY - 1), "")
    meeting.client = _compat.StoreClient(meeting.store)


def test_keys_of_a_group_of_thousands_of_ranks_fit_in_the_store(monkeypatch):
    """gloo puts keys of its own behind those of the group; the name of the group is a number."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20))
    lengths = []

    def make_pair(name, run):
        run(lambda board: board.set("an address", ""))
        lengths.extend(len(key) for key in store.list_keys())

    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: list(range(MANY)))
    monkeypatch.setattr(_compat, "group_size", lambda _: MANY)
    monkeypatch.setattr(_compat, "resolve_process_group", lambda _: None)
    monkeypatch.setattr(_compat, "timeout_of", lambda _: 20.0)
    monkeypatch.setattr(_compat, "make_pair", make_pair)
    monkeypatch.setattr(_compat, "served_accelerators", lambda _: [])
    monkeypatch.setattr(connect, "swap_in_rounds", lambda *_: b"")
    monkeypatch.setattr(Meeting, "agree", agree_alone)
    connect.connect_groups(RankState(7, store, watcher="none"), ["12"])
    assert 0 < max(lengths) < LONGEST_KEY / 50


def test_descriptions_of_groups_are_short_and_tell_rows_apart():
    names = {_compat.collectives._name_of_groups(ranks) for ranks in ([0, 1], [0, 2], range(2, 3))}
    assert len(names) == 3
    assert len(_compat.collectives._name_of_groups(range(MANY))) < 100


SHAPES = [{"a": 2, "b": 2}, {"a": 2}, {"a": 3}, {"a": 6}, {"a": 8}, {"a": 2, "b": 4}, {"a": 16}]


@pytest.mark.parametrize("shape", [SHAPES[0], *(pytest.param(shape, marks=pytest.mark.slow) for shape in SHAPES[1:])])
def test_sockets_and_requests_to_the_store_follow_their_laws(shape):
    """The holder of the store has three more sockets for each rank, and listens.

    Each rank asks five times for a mesh, whether it has groups of its own or not.
    """
    ranks = math.prod(shape.values())
    expected = sockets_of_mesh(list(shape.values()), sends_itself=False)
    for rank, program in enumerate(run_on_ranks(ranks, print_costs_of_meshes, json.dumps(shape))):
        assert program.code == 0, program
        sockets, *requests = map(int, program.output.split())
        assert sockets == expected + (0 if rank else 3 * ranks + 1)
        assert requests == [5, 5, 5]


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20))


def meet(store, rank, timeout=20.0):
    return Meeting(store, rank, range(MANY), "1", timeout)


def come(store, absent=()):
    """Let thousands of ranks come to a meeting but for the last, and those that are absent."""
    board = meet(store, 0).board
    for rank in range(MANY - 1):
        if rank not in absent:
            board.set(ENTRY.format(rank), json.dumps([f"address {rank}", "the same"]))
            board.add(COUNT, 1)
    return board


def test_thousands_of_ranks_meet(store):
    """The last of them compares for all, and any may read where a few others are."""
    come(store)
    last = meet(store, MANY - 1)
    end = last.agree("the same", lambda texts: f"{len(texts)} {set(texts)}", bool)
    assert end == last.board.get(END).decode() == f"{MANY} {{'the same'}}"
    first = meet(store, 0)
    first.peers = [1, 2048]
    assert first.agree("the same", "".join, bool) == end
    assert first.entries[2048].address == "address 2048"
    for meeting in (last, first):
        meeting.__exit__(None, None, None)


def test_another_rank_concludes_for_the_last_one_if_that_has_died(store):
    """It has counted itself, and written nothing more."""
    come(store, absent=[0])
    # By a client of its own, as the first rank waits.
    board = meet(store.clone(), MANY - 1).board

    def come_and_die():
        board.set(ENTRY.format(MANY - 1), json.dumps(["", "the last"]))
        board.add(COUNT, 1)

    last = threading.Timer(0.2, come_and_die)
    last.start()
    end = meet(store, 0).agree("the first", lambda texts: f"{len(texts)} {texts[-1]}", bool)
    last.join()
    assert end == f"{MANY} the last"


def test_one_rank_finds_out_which_of_thousands_have_not_come(store, monkeypatch):
    """The others, and those that come too late, read what it has found out."""
    monkeypatch.setattr("fshard.comm.failure.LINGER_TIME", 0.01)
    checks = []
    have_come = Meeting.have_come
    monkeypatch.setattr(Meeting, "have_come", lambda *args, key: checks.append(1) or have_come(*args, key=key))
    board = come(store, absent=[7, 1000, 3001])
    # It comes at the same time as the rank that finds out.
    board.set(ENTRY.format(7), "")
    texts = []
    for rank in (MANY - 1, 7, 1000):
        with pytest.raises(CollectiveError) as caught, meet(store, rank, timeout=0.1) as meeting:
            meeting.agree("the same", "".join, bool)
        texts.append(str(caught.value))
    assert texts[0].startswith("init_mesh: ranks 1000 and 3001 did not call it within 0.1 s. ")
    late = meet(store, 3001)
    assert [*texts, late.find_reason()] == texts[:1] * 4
    # All of them, and both halves of each part that lacks one of three.
    assert len(checks) <= 1 + 3 * 2 * math.log2(MANY)


def test_a_rank_that_may_not_open_enough_files_is_named_on_every_rank():
    """Before any of them waits for another inside gloo; a limit that may be raised is raised."""
    expected = r"init_mesh: rank 1 needs about \d+ open files for this mesh, and may open 70\. Raise .*ulimit -n"
    for rank, program in enumerate(run_on_ranks(2, print_limits, 1, 70, [70, 4096])):
        assert program.code == 0, program
        refused, error, limits = program.output.splitlines()
        assert re.match(expected, refused)
        assert error == "none"
        soft, hard = map(int, limits.split())
        assert rank == 0 or 70 < soft < hard == 4096


def test_a_rank_waits_while_another_one_finds_out_who_has_not_come(store, monkeypatch):
    searches = []
    monkeypatch.setattr(Meeting, "_find_missing", lambda *_: searches.append(1) or [0])
    monkeypatch.setattr("fshard.comm.failure.LINGER_TIME", 0.01)
    # By a client of its own, as the other one waits.
    board = meet(store.clone(), 0).board
    board.add("askers", 1)
    other = threading.Timer(0.5, board.set, (NOTE, "the others' reason"))
    other.start()
    with pytest.raises(CollectiveError, match=r"^the others' reason$"), meet(store, 7, timeout=0.1) as meeting:
        meeting.agree("the same", "".join, bool)
    other.join()
    assert not searches


def test_a_rank_that_stops_once_it_has_come_is_named_and_those_that_wait_for_it_are_not(store, monkeypatch):
    """They answer the rank that has waited too long, by a thread where they are inside a constructor."""
    monkeypatch.setattr("fshard.comm.meeting.ANSWER_TIME", 0.5)
    monkeypatch.setattr("fshard.comm.failure.LINGER_TIME", 0.01)
    text = r"^init_mesh: rank 1000 did not make process groups within 0.1 s\. "
    board = come(store, absent=[7])
    board.set(ENTRY.format(MANY - 1), "")
    other = Meeting(store.clone(), 9, range(MANY), "1", 20.0)
    asked = threading.Timer(0.3, other._answer)
    for rank in set(range(MANY)) - {7, 9, 1000}:
        board.set(ANSWER.format(rank), "")
    asked.start()
    with pytest.raises(CollectiveError, match=text), meet(store, 7, timeout=0.1) as meeting:
        meeting.agree("the same", "".join, bool)
    asked.join()


def test_a_rank_answers_one_that_looks_for_late_ones_only_while_it_waits(store, monkeypatch):
    """One that hangs elsewhere is to be named."""
    looks = threading.Semaphore(0)
    monkeypatch.setattr("fshard.comm.meeting.LOOK_INTERVAL", 0.01)
    monkeypatch.setattr(Meeting, "find_reason", lambda _: looks.release() or "")
    answer = ANSWER.format(7)
    with meet(store, 7) as meeting:
        meeting.client = _compat.StoreClient(store)
        meeting.board.add(ASKERS, 1)
        meeting.run(lambda client: dist.PrefixStore(meeting.prefix, client).wait([answer], timedelta(seconds=20)))
        # The thread may be about to answer once more.
        for _ in range(2):
            meeting.board.delete_key(answer)
            while looks.acquire(blocking=False):
                pass
            assert all(looks.acquire(timeout=20) for _ in range(2))
        assert not meeting.board.check([answer])
