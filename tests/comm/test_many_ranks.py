"""What grows with the number of ranks: keys of the store, and what a rank asks of it."""

from datetime import timedelta

import torch.distributed as dist

from fshard import _compat
from fshard.comm import failure
from fshard.comm.groups import RankState

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
    failure._make_group(RankState(7, store), "12", bool, lambda make: make(store))
    assert 0 < max(lengths) < LONGEST_KEY / 50


def test_descriptions_of_groups_are_short_and_tell_rows_apart():
    texts = {_compat.collectives._description(rows) for rows in ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 2, 3]])}
    assert len(texts) == 3
    assert len(_compat.collectives._description([list(range(MANY))])) < 100
