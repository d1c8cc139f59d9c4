"""quantize with int8 reductions: how far sums are off and what they send."""

import pytest
import torch

import fshard as fs
from tests.ranks import my_rank, on_ranks
from tests.test_law_purity import unchanged
from tests.transforms.laws import told
from tests.transforms.rounding import bound, full_tree, gathered, grads_of, joined, pieces
from tests.trees import WORLD_SIZES, assert_same_bits, one_axis

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    "world_size, dtype", [*((size, torch.float64) for size in WORLD_SIZES), *((3, dtype) for dtype in DTYPES[1:])]
)
@on_ranks()
def test_sums_are_off_by_at_most_half_a_step_of_each_rank(world_size, dtype):
    """And are what the oracle says, added in rank order; with one rank they are exact."""
    for block, dim in ((1, 0), (7, -1), (256, 0))[world_size // 8 :]:
        rough = fs.quantize(one_axis(), block=block, scatter=True, error_feedback=False, dim=dim)
        params, local = fs.shard(full_tree(dtype), rough), grads_of(0, my_rank(), dtype)
        with unchanged(params, local):
            found = fs.unshard(fs.scatter_grads(local, like=params, reduce="sum"))
        for name, total in found.items():
            ranks = [grads_of(0, rank, dtype)[name] for rank in range(world_size)]
            along = dim if total.dim() else 0
            sent = [gathered(grad, world_size, block, along) for grad in ranks]
            expected = sent[0]
            for other in sent[1:]:
                expected = expected + other
            assert_same_bits(total, expected)
            if world_size > 1:
                off = sum(
                    joined([bound(p, block) for p in pieces(g, world_size, along)], g.double(), along) for g in ranks
                )
                magnitude = sum(grad.double().abs() for grad in sent)
                off = off + magnitude * torch.finfo(dtype).eps * world_size
                assert ((total.double() - sum(grad.double() for grad in ranks)).abs() <= off).all()


@on_ranks(2, 3, 8)
def test_a_reduction_sends_a_quarter_of_the_bytes(world_size):
    """To each rank a row of codes and scales."""
    full = {"w": torch.ones(67, 65), "large": torch.ones(1024, 300), "whole": torch.ones(3)}
    for feedback in (False, True):
        for block in (16, 256):
            transform = fs.quantize(
                one_axis(), scatter=True, error_feedback=feedback, block=block, min_shard_elements=4
            )
            params = fs.shard(full, transform)
            state = {"transform_state": fs.transform_state(params)} if feedback else {}
            with fs.comm.record() as record:
                fs.scatter_grads(full, like=params, **state)
            sizes = [params[name].local.numel() for name in ("w", "large")]
            n = world_size * sum(size + 4 * -(-size // block) for size in sizes)
            leaving = n * (world_size - 1) // world_size
            assert ("all_to_all", "shard", "scatter", 1, leaving) in told(record)
            assert [entry[0] for entry in told(record) if entry[-1] != leaving] == ["all_reduce"]
            plain = sum(world_size * size * 4 for size in sizes)
            assert 0.25 < n / plain < 0.25 + 1 / block + 32 / min(sizes)


@on_ranks(2)
def test_what_is_not_finite_reaches_every_rank_in_its_block():
    """Of rank 1's gradient; the state forgets it."""
    local = [torch.ones(16), torch.ones(16)]
    local[1][5] = torch.inf
    for feedback in (False, True):
        transform = fs.quantize(one_axis(), scatter=True, error_feedback=feedback, block=4)
        params = fs.shard([torch.zeros(16)], transform)
        state = {"transform_state": fs.transform_state(params)} if feedback else {}
        found = fs.scatter_grads([local[my_rank()]], like=params, reduce="sum", **state)
        grads, state = found if feedback else (found, None)
        full = fs.unshard(grads)[0]
        assert full.isnan().nonzero().flatten().tolist() == [4, 5, 6, 7]
        assert_same_bits(full[:4], torch.full((4,), 2.0))
        assert state is None or all(row.isfinite().all() for row in fs.tree_leaves(state))


@on_ranks("2 processes")
def test_processes():
    params = fs.shard(full_tree(torch.float32), fs.quantize(one_axis(), scatter=True, block=64))
    local, state = grads_of(0, my_rank(), torch.float32), fs.transform_state(params)
    found = fs.unshard(fs.scatter_grads(local, like=params, reduce="sum", transform_state=state)[0])
    for name, grad in found.items():
        expected = sum(gathered(grads_of(0, rank, torch.float32)[name], 2, 64) for rank in range(2))
        assert_same_bits(grad, expected)
