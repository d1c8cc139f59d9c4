"""What grows with the number of ranks: keys of the store, and what a rank asks of it."""

import json
import math
from datetime import timedelta

import pytest
import torch.distributed as dist

from fshard import _compat
from fshard.comm import failure
from fshard.comm.groups import RankState
from fshard.comm.sockets import sockets_of_axis, sockets_of_mesh
from tests.comm.counted_meetings import print_sockets
from tests.forked_programs import run_on_ranks

# torch's server ends the connection of a client that sends a longer key.
LONGEST_KEY = 8192
MANY = 4096


def test_keys_of_a_group_of_thousands_of_ranks_fit_in_the_store(monkeypatch):
    """gloo puts keys of its own behind those of the group; the name of the group is a number."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20))
    lengths = []

    def make_pair(name, board, *_):
        board.set(_compat.collectives.HERE.format(MANY - 1), "")
        lengths.extend(len(key) for key in store.list_keys())
        return None, {}

    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: list(range(MANY)))
    monkeypatch.setattr(_compat, "resolve_process_group", lambda _: None)
    monkeypatch.setattr(_compat, "timeout_of", lambda _: 20.0)
    monkeypatch.setattr(_compat, "make_pair", make_pair)
    monkeypatch.setattr(_compat, "serves_accelerator", lambda _: False)
    monkeypatch.setattr(failure, "_connect_links", lambda *_: None)
    failure._make_group(RankState(7, store), "12", bool, lambda make: make(store))
    assert 0 < max(lengths) < LONGEST_KEY / 50


def test_descriptions_of_groups_are_short_and_tell_rows_apart():
    texts = {_compat.collectives._description(rows) for rows in ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 2, 3]])}
    assert len(texts) == 3
    assert len(_compat.collectives._description([list(range(MANY))])) < 100


SHAPES = [
    {"a": 2},
    {"a": 4},
    pytest.param({"a": 2, "b": 2}, marks=pytest.mark.slow),
    pytest.param({"a": 8}, marks=pytest.mark.slow),
    pytest.param({"a": 2, "b": 4}, marks=pytest.mark.slow),
    pytest.param({"a": 16}, marks=pytest.mark.slow),
]


@pytest.mark.rows(2)
@pytest.mark.parametrize("shape", SHAPES)
def test_sockets_of_a_mesh_follow_their_law(shape):
    """Exactly, on a rank that does not hold the store; there others may still be closing some."""
    ranks = math.prod(shape.values())
    holder, *others = [int(program.output) for program in run_on_ranks(ranks, print_sockets, json.dumps(shape))]
    expected = sockets_of_mesh(list(shape.values()), sends_itself=False)
    assert others == [expected] * (ranks - 1)
    assert expected + 2 * ranks < holder <= expected + 4 * ranks + 2


def test_sockets_of_thousands_of_ranks():
    """Beside a backend that sends itself, fshard's own are a number of the logarithm."""
    for ranks, links in ((64, 6), (1000, 20), (1024, 10), (4096, 12)):
        assert sockets_of_axis(ranks, sends_itself=True) == ranks + links
        assert sockets_of_axis(ranks, sends_itself=False) == 3 * ranks + links
