"""quantize: what gathers and sums of int8 blocks lose, what they do not, and what they send."""

from functools import reduce

import pytest
import torch

import fshard as fs
from fshard.rounding import tolerance
from tests.ranks import my_rank, on_ranks
from tests.test_law_purity import unchanged
from tests.transforms.rounding import bound, full_tree, gather_bound, gathered, grads_of, joined, pieces
from tests.trees import WORLD_SIZES, assert_same_bits, every_bit, exotic_dtypes, frozen, mixed_dtypes, normal, one_axis

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Dtypes with the size of blocks, the dim that they run along, and the scale of values, of which float16 has few.
SETTINGS = list(zip(DTYPES, ((1, 0, 1.0), (3, -1, 1e-6), (64, 0, 1.0), (256, 0, 1e-6)), strict=True))


def floats(dtype, scale):
    """Leaves of magnitudes that differ a lot within and between blocks, with zeros among them."""
    draw = normal(1)
    shapes = {"matrix": (37, 11), "vector": (300,), "scalar": (), "cube": (2, 3, 5), "empty": (0, 3), "row": (1, 9)}
    full = {name: draw(*shape) * 10 ** draw(*shape).clamp(-2, 2) * scale for name, shape in shapes.items()}
    full["matrix"][3:5] = 0
    full["vector"][::7] = 0
    return {name: leaf.to(dtype) for name, leaf in full.items()}


@pytest.mark.rows(1)
@on_ranks(*WORLD_SIZES[1:])
def test_elements_are_off_by_at_most_half_a_step(world_size):
    """By what the oracle says, to the bit; the same on all ranks."""
    runs = []
    for dtype, (block, dim, scale) in SETTINGS:
        full = floats(dtype, scale)
        params = fs.shard(full, fs.quantize(one_axis(), block=block, dim=dim))
        with unchanged(params):
            rounded = fs.gather(params)
            assert_same_bits(fs.unshard(params), full)
        for name, leaf in full.items():
            off = (rounded[name].double() - leaf.double()).abs()
            along = dim if leaf.dim() else 0
            assert (off <= gather_bound(leaf, world_size, block, along)).all(), (name, dtype, block)
            assert (rounded[name][leaf == 0] == 0).all()
            assert_same_bits(rounded[name], gathered(leaf, world_size, block, along))
        runs.append(rounded)
    return every_bit(runs)


@on_ranks(2)
def test_numbers_at_both_ends_of_a_dtype():
    """A float32 has no scale for the largest and the smallest numbers of float64."""
    for dtype in DTYPES:
        limits = torch.finfo(dtype)
        ends = torch.tensor([limits.max, -limits.max, limits.max / 2, 1.0, limits.smallest_normal, 0.0], dtype=dtype)
        full = torch.cat([ends, ends.flip(0)])
        rounded = fs.gather(fs.shard([full], fs.quantize(one_axis(), block=2)))[0]
        off = (rounded.double() / 2 - full.double() / 2).abs()
        assert (off <= gather_bound(full / 2, 2, 2)).all(), dtype


@on_ranks(2)
def test_what_is_not_finite_makes_its_block_nan_and_nothing_else():
    """Of leaves, where a rank's 12 elements are blocks of 4; and of rank 1's gradient, which the state forgets."""
    for dtype in DTYPES:
        full = normal()(24).to(dtype)
        full[1], full[9], full[12] = torch.inf, torch.nan, -torch.inf
        rounded = fs.gather(fs.shard([full], fs.quantize(one_axis(), block=4)))[0]
        assert rounded.isnan().nonzero().flatten().tolist() == [0, 1, 2, 3, *range(8, 16)]
        good = ~rounded.isnan()
        assert ((rounded - full).abs()[good].double() <= gather_bound(full, 2, 4)[good]).all()
    local = torch.ones(16)
    if my_rank() == 1:
        local[5] = torch.inf
    params = fs.shard([torch.zeros(16)], fs.quantize(one_axis(), scatter=True, block=4))
    state = fs.transform_state(params)
    grads, state = fs.scatter_grads([local], like=params, reduce="sum", transform_state=state)
    (full,) = fs.unshard(grads)
    assert full.isnan().nonzero().flatten().tolist() == [4, 5, 6, 7]
    assert_same_bits(full[:4], torch.full((4,), 2.0))
    assert all(row.isfinite().all() for row in fs.tree_leaves(state))


@on_ranks(3)
def test_other_leaves_are_exact_and_so_is_storage():
    for transform in (fs.quantize(one_axis(), block=4), fs.quantize(one_axis(), scatter=True, dim=-1)):
        for make in (mixed_dtypes, frozen, exotic_dtypes):
            full = make()
            params = fs.shard(full, transform)
            assert_same_bits(fs.unshard(params), full)
            moved = fs.reshard(params, fs.fully_shard(one_axis()))
            assert_same_bits(fs.unshard(fs.reshard(moved, transform)), full)
            for name, leaf in fs.gather(params).items():
                if not leaf.is_floating_point() or leaf.element_size() == 1:
                    assert_same_bits(leaf, full[name])
    small = fs.shard(mixed_dtypes(), fs.quantize(one_axis(), min_shard_elements=10**6))
    assert_same_bits(fs.gather(small), mixed_dtypes())


@on_ranks(3)
def test_gathers_and_reductions_send_a_quarter_of_the_bytes(world_size):
    """A byte for each element of a padded shard and 4 for each of its blocks, from every rank."""
    full = {"w": torch.ones(67, 65), "large": torch.ones(1024, 300), "whole": torch.ones(3)}
    for block in (1, 256):
        params = fs.shard(full, fs.quantize(one_axis(), block=block, scatter=True, min_shard_elements=4))
        sizes = [params[name].local.numel() for name in ("w", "large")]
        n = world_size * sum(size + 4 * -(-size // block) for size in sizes)
        with fs.comm.record() as record:
            fs.gather(params)
            fs.scatter_grads(full, like=params, transform_state=fs.transform_state(params))
        sent = {(entry.op, str(entry.label)): entry.sent for entry in record if not entry.about.is_comparison}
        assert sent["all_gather", "gather"] == sent["all_to_all", "scatter"] == n * (world_size - 1) / world_size
        if block == 256:
            plain = sum(world_size * size * 4 for size in sizes)
            assert 0.25 < n / plain < 0.25 + 1 / block + 32 / min(sizes)


@pytest.mark.rows(1)
@pytest.mark.parametrize("world_size, dtype", [(1, torch.float64), (3, torch.bfloat16), (8, torch.float32)])
@on_ranks()
def test_sums_are_off_by_at_most_half_a_step_of_each_rank(world_size, dtype):
    """And are what the oracle says, added in rank order; with one rank they are exact."""
    for block, dim in ((7, -1), (256, 0)):
        rough = fs.quantize(one_axis(), block=block, scatter=True, error_feedback=False, dim=dim)
        params, local = fs.shard(full_tree(dtype), rough), grads_of(0, my_rank(), dtype)
        with unchanged(params, local):
            totals = fs.unshard(fs.scatter_grads(local, like=params, reduce="sum"))
        for name, total in totals.items():
            grads = [grads_of(0, rank, dtype)[name] for rank in range(world_size)]
            along = dim if total.dim() else 0
            sent = [gathered(grad, world_size, block, along) for grad in grads]
            assert_same_bits(total, reduce(torch.add, sent))
            if world_size > 1:
                magnitude = sum(grad.double().abs() for grad in sent)
                most = magnitude * tolerance(dtype, terms=world_size)
                for grad in grads:
                    steps = [bound(piece, block) for piece in pieces(grad, world_size, along)]
                    most = most + joined(steps, grad.double(), along)
                assert ((total.double() - sum(grad.double() for grad in grads)).abs() <= most).all()


@on_ranks(2)
def test_sums_of_one_tree_are_refused():
    params = fs.shard({"w": torch.ones(4)}, fs.zero3(one_axis(), layout=fs.quantize(one_axis())))
    run = fs.accumulate(lambda p, x: fs.gather(p)["w"].sum(), reduction_order="tree")
    with pytest.raises(ValueError, match=r'reduction_order="tree": expected fully_shard, .*, got Quantize'):
        run(params, [0, 1])
