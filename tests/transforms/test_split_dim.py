"""split_dim and own_dim: leaves that stay split over an axis, alone and next to fully_shard."""

import itertools

import pytest
import torch

import fshard as fs
from fshard.testing import check_adjoint
from tests.ranks import on_ranks
from tests.test_law_purity import unchanged
from tests.transforms.laws import grid
from tests.trees import WORLD_SIZES, assert_same_bits, normal, one_axis

# (shape, dim that stays split, dim that is gathered): alike and not, uneven in the axis gathered over, empty.
CASES = (((10, 3), 0, 0), ((5, 4), 1, 0), ((5, 4), -1, -1), ((2, 7, 4), 2, 1), ((18,), 0, -1), ((0, 4), 1, 0))
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
        kept, gathered = kept % len(shape), gathered % len(shape)
        names = [None] * (max(kept, gathered) + 1)
        names[gathered] = "shard"
        names[kept] = ("tp", "shard") if kept == gathered else "tp"
        for dtype in DTYPES if case in CASES[:2] else DTYPES[:1]:
            full = {"w": (normal()(*shape) * 9).to(dtype)}
            params = fs.shard(full, transform)
            spec = params["w"].spec
            assert (spec.roles, spec.scattered_axes) == ({shard: "gathered", tp: "owned"}, (shard,))
            assert spec.partition == fs.P(*names)
            mine = full["w"].chunk(tp.size, kept)[fs.comm.rank(tp)] if shape[kept] else full["w"]
            with unchanged(full, params):
                assert_same_bits(fs.gather(params), {"w": mine})
                assert spec.gathered_shape == tuple(mine.shape)
                assert_same_bits(fs.unshard(params), full)
                moved = fs.reshard(params, line)
                assert_same_bits(fs.unshard(moved), full)
                assert_same_bits(fs.reshard(moved, transform)["w"].local, params["w"].local)
        # Of a leaf without elements there is nothing to compare.
        if 0 not in shape:
            check_adjoint(transform, [shape])


@on_ranks(4)
def test_a_piece_that_another_axis_has_cut_must_divide_too():
    mesh = grid(4)
    twice = fs.compose(*[fs.split_dim(fs.axis_of(mesh, name), dim=0) for name in ("shard", "tp")])
    assert fs.shard({"w": torch.ones(8)}, twice)["w"].local.shape == (2,)
    with pytest.raises(ValueError, match="expected a multiple of 2, the size of 'shard', got size 3 of dim 0"):
        fs.shard({"w": torch.ones(6)}, twice)
