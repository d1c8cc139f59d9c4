"""quantize: what gathers of int8 blocks lose, and what they do not."""

import pytest
import torch
from torch.func import vjp

import fshard as fs
from tests.ranks import my_rank, on_ranks
from tests.test_law_purity import unchanged
from tests.transforms.laws import SMALL, gradients, squares, told
from tests.transforms.rounding import gather_bound, gathered, largest, pieces
from tests.trees import (
    WORLD_SIZES,
    assert_same_bits,
    every_bit,
    exotic_dtypes,
    frozen,
    mixed_dtypes,
    normal,
    one_axis,
    uneven,
)

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
BLOCKS = (1, 3, 64, 256)


def floats(dtype, scale=1.0):
    """Leaves of magnitudes that differ a lot within and between blocks, with zeros among them."""
    draw = normal(1)
    spread = lambda *shape: draw(*shape) * 10 ** draw(*shape).clamp(-2, 2) * scale  # noqa: E731
    full = {"matrix": spread(37, 11), "vector": spread(300), "scalar": spread(), "cube": spread(2, 3, 5)}
    full["matrix"][3:5], full["vector"][::7] = 0, 0
    return {name: leaf.to(dtype) for name, leaf in (full | {"empty": spread(0, 3), "row": spread(1, 9)}).items()}


@pytest.mark.rows(1)
@on_ranks(*WORLD_SIZES[1:])
def test_elements_are_off_by_at_most_half_a_step(world_size):
    """By what the oracle says, to the bit; the same on all ranks. Magnitudes are small for float16, whose are few."""
    runs = []
    for dtype in DTYPES:
        for block, dim, scale in ((1, 0, 1.0), (3, -1, 1e-6), (64, 0, 1.0), (256, 0, 1e-6)):
            full = floats(dtype, scale)
            params = fs.shard(full, fs.quantize(one_axis(), block=block, dim=dim))
            with unchanged(params):
                found = fs.gather(params)
                assert_same_bits(fs.unshard(params), full)
            for name, leaf in full.items():
                off = (found[name].double() - leaf.double()).abs()
                along = dim if leaf.dim() else 0
                assert (off <= gather_bound(leaf, world_size, block, along)).all(), (name, dtype, block)
                assert (found[name][leaf == 0] == 0).all()
                assert_same_bits(found[name], gathered(leaf, world_size, block, along))
            runs.append(found)
    return every_bit(runs)


@pytest.mark.parametrize("dtype", DTYPES)
@on_ranks(2)
def test_what_is_not_finite_makes_its_block_nan_and_nothing_else(dtype):
    """A rank's 12 elements are blocks of 4, 4 and 4."""
    full = normal()(24).to(dtype)
    full[1], full[9], full[12] = torch.inf, torch.nan, -torch.inf
    bad = [0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 15]
    found = fs.gather(fs.shard([full], fs.quantize(one_axis(), block=4)))[0]
    assert found.isnan().nonzero().flatten().tolist() == bad
    good = ~found.isnan()
    assert ((found - full).abs()[good].double() <= gather_bound(full, 2, 4)[good]).all()


@pytest.mark.parametrize("dtype", DTYPES[1:])
@on_ranks(2)
def test_the_largest_numbers_stay_finite(dtype):
    """Those of float64 have no scale in float32, and are NaN rather than wrong."""
    full = torch.full((6,), torch.finfo(dtype).max, dtype=dtype) * torch.tensor([1, -1, 0.5, 0, 1, -1], dtype=dtype)
    found, huge = fs.gather(fs.shard([full, full.double() * 0 + 1e300], fs.quantize(one_axis(), block=3)))
    assert ((found.double() - full.double()).abs() <= gather_bound(full, 2, 3)).all()
    assert huge.isnan().all()


@pytest.mark.rows(1)
@on_ranks(*WORLD_SIZES)
def test_other_leaves_are_exact_and_so_is_storage(world_size):
    for transform in (fs.quantize(one_axis(), block=4), fs.quantize(one_axis(), scatter=True, dim=-1)):
        for make in (*SMALL.values(), mixed_dtypes, frozen, exotic_dtypes):
            full = make()
            params = fs.shard(full, transform)
            assert_same_bits(fs.unshard(params), full)
            moved = fs.reshard(params, fs.fully_shard(one_axis()))
            assert_same_bits(fs.unshard(fs.reshard(moved, transform)), full)
            found = fs.gather(params)
            if world_size == 1:
                assert_same_bits(found, full)
            for name in full if make is exotic_dtypes else ():
                if not full[name].is_floating_point() or full[name].element_size() == 1:
                    assert_same_bits(found[name], full[name])
    small = fs.shard(uneven(), fs.quantize(one_axis(), min_shard_elements=10**6))
    assert_same_bits(fs.gather(small), uneven())


@pytest.mark.rows(1)
@on_ranks(2, 3, 8)
def test_a_gather_sends_a_quarter_of_the_bytes(world_size):
    """A byte for each element of a padded shard and 4 for each of its blocks, from every rank."""
    for block in BLOCKS:
        full = {"w": torch.ones(67, 65), "alone": torch.ones(1024, 300), "v": torch.ones(9, dtype=torch.float64)}
        params = fs.shard(full, fs.quantize(one_axis(), block=block))
        with fs.comm.record() as record:
            fs.gather(params)
        sizes = [leaf.local.numel() for leaf in params.values()]
        n = world_size * sum(size + 4 * -(-size // block) for size in sizes)
        assert told(record) == [("all_gather", "shard", "gather", 2, n)]
        assert record.bytes_sent() == pytest.approx(n * (world_size - 1) / world_size, rel=1e-12)
        with fs.comm.record() as plain:
            fs.gather(fs.reshard(params, fs.fully_shard(one_axis())))
        # The float64 leaf is cut to an eighth, the others to a quarter and 4 bytes in a block.
        (_, _, _, _, whole) = told(plain)[-1]
        if block == 256:
            assert 0.25 < n / whole < 0.25 + 1 / 256 + 0.001


@pytest.mark.rows(1)
@on_ranks(*WORLD_SIZES)
def test_gradients_pass_straight_through():
    """Those at rounded parameters, reduced exactly; the engine and the verbs agree bit for bit."""
    mesh = one_axis()
    params, plain = (fs.shard(uneven(), t) for t in (fs.quantize(mesh, block=4), fs.fully_shard(mesh)))
    draw = normal(my_rank())
    cotangents = fs.tree_map(lambda full: draw(*full.shape), uneven())
    (pulled,) = vjp(fs.gather, params)[1](cotangents)
    assert_same_bits(fs.tree_leaves(pulled), fs.tree_leaves(vjp(fs.gather, plain)[1](cotangents)))
    for transform in (
        fs.quantize(mesh, block=4),
        fs.zero3(mesh, layout=fs.quantize(mesh, min_shard_elements=6)),
        fs.quantize(mesh, block=4, scatter=True, error_feedback=False),
    ):
        gradients(transform)


@on_ranks(1)
def test_one_rank_communicates_nothing():
    params = fs.shard({"float64": normal()(5, 3)}, fs.quantize(one_axis(), scatter=True, error_feedback=False))
    with fs.comm.record() as record:
        fs.value_and_grad(squares)(params)
        assert fs.gather(params)["float64"].data_ptr() == params["float64"].local.data_ptr()
    assert list(record) == []


@on_ranks("2 processes")
def test_processes_agree():
    full = floats(torch.float32)
    found = fs.gather(fs.shard(full, fs.quantize(one_axis(), block=64)))
    assert_same_bits(found, {name: gathered(leaf, 2, 64) for name, leaf in full.items()})


def test_the_oracle_bounds_by_blocks():
    assert largest(torch.tensor([1.0, -4, 2, 0, 3]), 2).tolist() == [4, 4, 2, 2, 3]
    assert [piece.tolist() for piece in pieces(torch.tensor([1.0, 2, 3]), 2)] == [[1, 2], [3, 0]]
