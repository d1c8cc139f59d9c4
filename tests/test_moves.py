"""Collectives that move pieces between ranks: their values, bytes, graphs, and what is refused where it runs."""

import pytest
import torch
from torch.func import jvp, vmap

import fshard as fs
from tests.ranks import on_ranks
from tests.trees import assert_same_bits, one_axis

WORLDS = (1, 3, "2 processes", pytest.param("4 processes", marks=pytest.mark.slow))


def row(rank, size=3):
    """A row of numbers that tells the rank."""
    return torch.arange(size, dtype=torch.float64) + 10 * rank


def check_ppermute(x, axis, rank):
    ranks, zeros = range(axis.size), torch.zeros_like(x)
    ring = [(source, (source + 1) % axis.size) for source in ranks]
    before = (rank - 1) % axis.size
    around = fs.ppermute({"x": x, "n": torch.tensor([rank])}, axis, ring)
    assert_same_bits(around, {"x": row(before), "n": torch.tensor([before])})
    assert_same_bits(fs.ppermute(x, axis, ring[:-1]), row(before) if rank else zeros)
    assert_same_bits(fs.ppermute(x, axis, []), zeros)
    assert_same_bits(fs.ppermute(-0.0 * x, axis, [(0, 0)]), zeros if rank else -0.0 * x)
    # A rank that several send to adds up what comes.
    assert_same_bits(fs.ppermute(x, axis, [(source, 0) for source in ranks]), sum(map(row, ranks)) * (rank == 0))


def check_all_to_all(x, axis, rank):
    pieces = fs.all_to_all(row(rank, 2 * axis.size).view(axis.size, 2), axis, 0, 1)
    expected = [row(source, 2 * axis.size)[2 * rank : 2 * rank + 2] for source in range(axis.size)]
    assert_same_bits(pieces, torch.cat(expected)[None])


def check_ragged_all_to_all(x, axis, rank):
    """Rank i sends (i + 2 j) % 3 rows to rank j, each of which tells both."""
    sent, received = [], []
    for other in range(axis.size):
        sent += [row(rank) + 100 * other] * ((rank + 2 * other) % 3)
        received += [row(other) + 100 * rank] * ((other + 2 * rank) % 3)
    send_sizes = [(rank + 2 * other) % 3 for other in range(axis.size)]
    recv_sizes = [(other + 2 * rank) % 3 for other in range(axis.size)]
    moved = fs.ragged_all_to_all(torch.cat([x.new_empty(0), *sent]).view(-1, 3), axis, send_sizes, recv_sizes)
    assert_same_bits(moved, torch.cat([x.new_empty(0), *received]).view(-1, 3))


def check_broadcast(x, axis, rank):
    assert_same_bits(fs.broadcast({"x": x}, axis, root=axis.size - 1), {"x": row(axis.size - 1)})


def check_pmax(x, axis, rank):
    last = axis.size - 1
    assert_same_bits(fs.pmax({"x": x, "y": -x}, axis), {"x": row(last), "y": -row(0)})
    assert fs.pmax(torch.tensor([rank, -rank]), axis).tolist() == [last, 0]
    assert fs.pmax(torch.tensor(float("nan") if rank == last else 1.0), axis).isnan()
    assert_same_bits(jvp(lambda x: fs.pmax(x, axis), (x,), (x,)), (row(last), row(last)))
    batch = torch.stack([x, x + 1])
    assert_same_bits(vmap(lambda x: fs.pmax(x, axis), in_dims=1)(batch.T), fs.pmax(batch, axis))


@on_ranks(*WORLDS)
def test_values():
    axis = fs.axis_of(one_axis())
    rank = fs.axis_index(axis)
    for check in (check_ppermute, check_all_to_all, check_ragged_all_to_all, check_broadcast, check_pmax):
        check(row(rank), axis, rank)


@on_ranks(1)
def test_ranks_that_are_not_there_are_out_of_range():
    """On one rank: of several, one that failed a moment later than others would break the mesh."""
    axis = fs.axis_of(one_axis())
    for move, bad, name in ((fs.ppermute, [(0, 1)], "ppermute"), (fs.broadcast, 1, "broadcast")):
        with pytest.raises(IndexError, match=f"^{name}: coordinate 1 is out of range. 'shard' has 1 ranks, 0 to 0.$"):
            move(row(0), axis, bad)


@on_ranks(2, 4)
def test_bytes_are_those_that_leave(world_size):
    axis = fs.axis_of(one_axis())
    rank = fs.axis_index(axis)
    x = row(rank, 4 * world_size)
    of_others = (world_size - 1) / world_size
    for move, arguments, times in (
        (fs.ppermute, [[(0, 1)]], rank == 0),
        (fs.ppermute, [[(n, n) for n in range(world_size)]], 0),
        (fs.all_to_all, [0, 0], of_others),
        (fs.ragged_all_to_all, [[4] * world_size, [4] * world_size], of_others),
        (fs.broadcast, [], (world_size - 1) * (rank == 0)),
        (fs.pmax, [], world_size - 1),
    ):
        with fs.comm.record() as record:
            move(x, axis, *arguments)
        assert [entry.sent for entry in record] == [x.nbytes * times]


@on_ranks(2)
def test_sizes_that_are_data_are_refused_in_a_graph():
    axis = fs.axis_of(one_axis())

    def move(x):
        sizes = (x > 0).sum().reshape(1).expand(2).tolist()
        return fs.ragged_all_to_all(x, axis, sizes, sizes)

    with pytest.raises(Exception, match="capacity"):
        fs.jit(move)(torch.ones(2))
