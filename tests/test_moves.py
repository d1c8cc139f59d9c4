"""Collectives that move pieces between ranks: their values, bytes, graphs, and what is refused where it runs."""

import pytest
import torch
from torch.func import jvp, vmap

import fshard as fs
from fshard.testing import check_varying
from tests.ranks import on_ranks
from tests.trees import assert_same_bits, one_axis

WORLDS = (1, 3, "2 processes", pytest.param("4 processes", marks=pytest.mark.slow))


def row(rank, size=3):
    return torch.arange(size, dtype=torch.float64) + 10 * rank


@on_ranks(*WORLDS)
def test_values():
    axis = fs.axis_of(one_axis())
    own, size = fs.axis_index(axis), axis.size
    ranks = range(size)
    x = row(own)
    around = fs.ppermute({"x": x, "n": torch.tensor([own])}, axis, [(rank, (rank + 1) % size) for rank in ranks])
    assert_same_bits(around, {"x": row((own - 1) % size), "n": torch.tensor([(own - 1) % size])})
    along = fs.ppermute(x, axis, [(rank, rank + 1) for rank in ranks[:-1]])
    assert_same_bits(along, row(own - 1) if own else torch.zeros_like(x))
    assert_same_bits(fs.ppermute(x, axis, []), torch.zeros_like(x))
    assert_same_bits(fs.ppermute(-0.0 * x, axis, [(0, 0)]), -0.0 * x if own == 0 else torch.zeros_like(x))
    assert_same_bits(fs.ppermute(x, axis, [(rank, 0) for rank in ranks]), sum(map(row, ranks)) * (own == 0))
    # On one rank: of several, one that failed a moment later than others would break the mesh.
    for move, bad in ((fs.ppermute, [(0, 1)]), (fs.broadcast, 1)) if size == 1 else ():
        with pytest.raises(IndexError, match="out of range"):
            move(x, axis, bad)
    to_all = fs.all_to_all(row(own, 2 * size).view(size, 2), axis, 0, 1)
    assert_same_bits(to_all, torch.cat([row(rank, 2 * size)[2 * own : 2 * own + 2] for rank in ranks])[None])
    send, receive = [(own + 2 * rank) % 3 for rank in ranks], [(rank + 2 * own) % 3 for rank in ranks]
    rows = torch.cat([row(own)[None] + 100 * rank for rank in ranks for _ in range(send[rank])] or [x[:0].view(0, 3)])
    expected = [row(rank)[None] + 100 * own for rank in ranks for _ in range(receive[rank])]
    assert_same_bits(fs.ragged_all_to_all(rows, axis, send, receive), torch.cat([*expected, x.new_empty(0, 3)]))
    assert_same_bits(fs.broadcast({"x": x}, axis, root=size - 1), {"x": row(size - 1)})
    assert_same_bits(fs.pmax({"x": x, "y": -x}, axis), {"x": row(size - 1), "y": -row(0)})
    assert fs.pmax(torch.tensor([own, -own]), axis).tolist() == [size - 1, 0]
    assert fs.pmax(torch.tensor(float("nan") if own == size - 1 else 1.0), axis).isnan()
    assert_same_bits(jvp(lambda x: fs.pmax(x, axis), (x,), (x,)), (fs.pmax(x, axis), fs.pmax(x, axis)))
    batch = torch.stack([x, x + 1])
    assert_same_bits(vmap(lambda x: fs.pmax(x, axis), in_dims=1)(batch.T), fs.pmax(batch, axis))


@on_ranks(2, 4)
def test_bytes_are_those_that_leave():
    """float64: 8 bytes an element."""
    axis = fs.axis_of(one_axis())
    own, size = fs.axis_index(axis), axis.size
    x = row(own, 4 * size)
    for move, arguments, times in (
        (fs.ppermute, [[(0, 1)]], own == 0),
        (fs.ppermute, [[(rank, rank) for rank in range(size)]], 0),
        (fs.all_to_all, [0, 0], (size - 1) / size),
        (fs.ragged_all_to_all, [[4] * size, [4] * size], (size - 1) / size),
        (fs.broadcast, [], (size - 1) * (own == 0)),
        (fs.pmax, [], size - 1),
    ):
        with fs.comm.record() as record:
            move(x, axis, *arguments)
        assert [entry.sent for entry in record] == [x.nbytes * times]


def of_data(x, axis):
    sizes = (x > 0).sum().reshape(1).expand(2).tolist()
    return fs.ragged_all_to_all(x, axis, sizes, sizes)


@on_ranks(2)
def test_what_varies_is_told_from_what_agrees():
    """And sizes that are data are refused in a graph."""
    axis = fs.axis_of(one_axis())
    with pytest.raises(Exception, match="capacity"):
        fs.jit(lambda x: of_data(x, axis))(torch.ones(2))
    params = fs.shard({"w": row(0, 4)}, fs.zero3(one_axis(), min_shard_elements=0))
    moves = {
        "ppermute": lambda w: fs.ppermute(w, axis, [(0, 1)]),
        "all_to_all": lambda w: fs.all_to_all(w, axis, 0, 0),
        "ragged_all_to_all": lambda w: fs.ragged_all_to_all(w, axis, [2, 2], [2, 2]),
        "broadcast": lambda w: fs.broadcast(w, axis),
    }
    for name, move in moves.items():
        moved = lambda p, f=move: f(fs.gather(p)["w"]).sum()  # noqa: E731
        typed = lambda p, f=move: fs.pcast(f(fs.gather(p)["w"]), axis, to="varying").sum()  # noqa: E731
        right, wrong = (typed, moved) if name == "broadcast" else (moved, typed)
        check_varying(right, params)
        with pytest.raises(AssertionError, match=f"{name} over 'shard', whose result (varies|agrees)"):
            check_varying(wrong, params)
