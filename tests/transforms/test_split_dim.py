"""split_dim and own_dim: leaves that stay split over an axis, alone, next to fully_shard, and in training."""

import itertools

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.testing import check_adjoint
from tests.ranks import my_rank, on_ranks
from tests.test_law_purity import unchanged
from tests.transforms.laws import grid
from tests.trees import WORLD_SIZES, assert_same_bits, exotic_dtypes, normal, one_axis

# (shape, dim that stays split, dim that is gathered): alike and not, uneven in the axis gathered over, empty, exotic.
CASES = [
    *(((10, 3), 0, 0), ((5, 4), 1, 0), ((4, 5), 0, 1), ((5, 4), -1, -1), ((2, 7, 4), 2, 1)),
    *(((2,), 0, 0), ((18,), 0, -1), ((0, 4), 1, 0), ((4, 0), 0, 1), ((0,), 0, 0), ((6, 1), -2, 0)),
]


def leaf(case, dtype):
    shape, *_ = case
    return (normal()(*shape, dtype=torch.float32) * 9).to(dtype)


def piece_of(full, dim, axis):
    """This rank's piece of a dim that divides."""
    return full.chunk(axis.size, dim)[fs.comm.rank(axis)] if full.shape[dim] else full


DTYPES = (torch.float64, torch.bfloat16, torch.complex64, torch.int32, torch.bool, torch.float8_e4m3fn)


@pytest.mark.rows(1)
@on_ranks(*WORLD_SIZES)
def test_pieces_round_trips_and_adjoint(world_size):
    mesh, line = grid(world_size), fs.fully_shard(one_axis())
    shard, tp = fs.axis_of(mesh, "shard"), fs.axis_of(mesh, "tp")
    for case, split in itertools.product(CASES, (fs.split_dim, fs.own_dim)):
        shape, kept, gathered = case
        transform = fs.compose(fs.fully_shard(shard, dim=gathered), split(tp, dim=kept))
        assert transform.axes == ((shard, tp) if split is fs.own_dim else (shard,))
        for dtype in DTYPES if case in CASES[:2] else DTYPES[:1]:
            full = {"w": leaf(case, dtype)}
            params = fs.shard(full, transform)
            spec = params["w"].spec
            assert (spec.roles, spec.scattered_axes) == ({shard: "gathered", tp: "owned"}, (shard,))
            kept_dim, gathered_dim = kept % len(shape), gathered % len(shape)
            names = [None] * (max(kept_dim, gathered_dim) + 1)
            names[gathered_dim] = "shard"
            names[kept_dim] = ("tp", "shard") if kept_dim == gathered_dim else "tp"
            assert spec.partition == fs.P(*names)
            mine = piece_of(full["w"], kept_dim, tp)
            with unchanged(full, params):
                assert_same_bits(fs.gather(params), {"w": mine})
                assert spec.gathered_shape == tuple(mine.shape)
                # This rank's rows of what it gathers, padded at the end.
                size = -(-mine.shape[gathered_dim] // shard.size)
                start = min(fs.comm.rank(shard) * size, mine.shape[gathered_dim])
                rows = mine.narrow(gathered_dim, start, min(size, mine.shape[gathered_dim] - start))
                local = params["w"].local.narrow(gathered_dim, 0, rows.shape[gathered_dim])
                assert_same_bits(local, rows)
                assert_same_bits(fs.unshard(params), full)
                moved = fs.reshard(params, line)
                assert_same_bits(fs.unshard(moved), full)
                assert_same_bits(fs.reshard(moved, transform)["w"].local, params["w"].local)
        check_adjoint(transform, [shape])


@on_ranks(2)
def test_alone_it_keeps_pieces_and_communicates_nothing():
    full = {"w": normal()(4, 6), "special": exotic_dtypes()["special"][1:]}
    for split in (fs.split_dim, fs.own_dim):
        params = fs.shard(full, split(one_axis(), dim=-1))
        with fs.comm.record() as record:
            pieces = fs.gather(params)
            grads = fs.scatter_grads(pieces, like=params, reduce="sum")
        assert [entry for entry in record if split is fs.split_dim or not entry.about.is_comparison] == []
        rank = my_rank()
        assert_same_bits(pieces, {name: leaf.chunk(2, -1)[rank] for name, leaf in full.items()})
        assert_same_bits(fs.unshard(grads), full)


WIDTH, ROWS = 8, 24


class Perceptron(nn.Module):
    """Megatron's: the first layer by columns, the second by rows; with no axis one process's."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3, bias=False)
        self.bias = nn.Parameter(torch.ones(3))

    def forward(self, x, axis=None):
        hidden = self.second(torch.tanh(self.first(x)))
        return (hidden if axis is None else fs.psum_invariant(hidden, axis)) + self.bias


def perceptron():
    module, draw = Perceptron().double(), normal()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(draw(*parameter.shape) / WIDTH**0.5)
    return module


def megatron(mesh, strategy):
    rows = fs.masked(fs.split_dim(mesh["tp"], dim=1), "second.weight")
    return fs.compose(strategy, fs.masked(fs.split_dim(mesh["tp"], dim=0), "first.*", otherwise=rows))
