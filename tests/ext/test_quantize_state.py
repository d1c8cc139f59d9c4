"""Error feedback: what quantize leaves out of sums is explicit state, and no part of gradients is lost."""

import pytest
import torch

import fshard as fs
from fshard.rounding import tolerance
from tests.bad_input import assert_all_refused
from tests.ranks import my_rank, on_ranks
from tests.test_law_purity import unchanged
from tests.transforms import test_transform_state as core
from tests.transforms.rounding import full_tree, grads_of, joined
from tests.transforms.test_transform_state import bad_rows
from tests.trees import WORLD_SIZES, assert_same_bits, one_axis


def int8(mesh, **options):
    # Multiples of parameters that were rounded themselves would lose nothing.
    return fs.quantize(mesh, gather=False, scatter=True, block=4, **options)


@on_ranks(2)
def test_each_rank_has_its_piece_of_the_full_state(world_size):
    core.check_each_rank_has_its_piece_of_the_full_state(int8, world_size)


def test_bad_input_is_refused():
    assert_all_refused(bad_rows(int8, (2, 3, 3), (2, 2)))


@pytest.mark.rows(1)
@on_ranks(*WORLD_SIZES[:-1])
def test_the_engine_and_the_verbs_make_the_same_gradients_and_states(world_size):
    core.check_the_engine_and_the_verbs_make_the_same_gradients_and_states(int8(one_axis()), stateless=world_size == 1)


STEPS = 5


@pytest.mark.rows(1)
@pytest.mark.parametrize("world_size, dtype", [(2, torch.float64), (3, torch.float32), (8, torch.float64)])
@on_ranks()
def test_what_is_applied_and_what_is_left_are_all_gradients(world_size, dtype):
    """Over steps, to the rounding of sums; without feedback what is applied is far from them."""
    params = fs.shard(full_tree(dtype), fs.quantize(one_axis(), scatter=True, block=16))
    plain = fs.reshard(params, fs.quantize(one_axis(), scatter=True, block=16, error_feedback=False))
    state = fs.transform_state(params)
    applied = lossy = true = magnitude = fs.tree_map(torch.zeros_like, full_tree(dtype))
    for step in range(STEPS):
        local = grads_of(step, my_rank(), dtype)
        with unchanged(params, state, local):
            results = [fs.scatter_grads(local, like=params, reduce="sum", transform_state=state) for _ in range(2)]
        assert_same_bits(fs.tree_leaves(results[0]), fs.tree_leaves(results[1]))
        grads, state = results[0]
        applied = fs.tree_map(torch.add, applied, fs.unshard(grads))
        lossy = fs.tree_map(torch.add, lossy, fs.unshard(fs.scatter_grads(local, like=plain, reduce="sum")))
        for rank in range(world_size):
            grad = grads_of(step, rank, dtype)
            true = fs.tree_map(torch.add, true, grad)
            magnitude = fs.tree_map(lambda m, g: m + g.abs().max() if g.numel() else m, magnitude, grad)
    kept = fs.unshard(state)
    for name in true:
        # Each step adds, subtracts and sums a few numbers for each rank, none above the magnitudes so far.
        rounding = tolerance(dtype, terms=STEPS * world_size) * magnitude[name]
        # What all ranks together have not sent yet.
        rows = list(fs.tree_leaves(kept[name])[0].sum(0))
        left = joined(rows, torch.zeros(params[name].spec.shape, dtype=rows[0].dtype))
        assert ((applied[name] + left - true[name]).abs() <= rounding).all()
    apart = [(lossy[name] - true[name]).abs().max() for name in ("matrix", "vector")]
    # Without feedback each sum is off by up to half a step of 127, of gradients of about 1.
    assert min(apart) > 1 / 127
