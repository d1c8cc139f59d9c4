"""Error feedback: what quantize leaves out of sums is explicit state, and no part of gradients is lost."""

import pytest
import torch

import fshard as fs
from fshard.rounding import tolerance
from fshard.testing import assert_trees_close
from tests.bad_input import assert_all_refused
from tests.ranks import my_rank, on_ranks
from tests.test_law_purity import unchanged
from tests.test_unused import check_the_state_of_a_transform_stays
from tests.transforms import test_transform_state as core
from tests.transforms.rounding import full_tree, grads_of, joined
from tests.transforms.test_transform_state import bad_rows
from tests.trees import WORLD_SIZES, assert_same_bits, one_axis


def int8(mesh, **options):
    # Multiples of parameters that were rounded themselves would lose nothing.
    return fs.quantize(mesh, gather=False, scatter=True, block=4, **options)


@on_ranks(2)
def test_accumulate_hands_the_state_from_microbatch_to_microbatch():
    core.check_accumulate_hands_the_state_from_microbatch_to_microbatch(int8)


@on_ranks(2)
def test_a_train_state_holds_it():
    core.check_a_train_state_holds_it(int8, donate=False)
    core.check_a_train_state_holds_it(int8, donate=True)


@on_ranks(2)
def test_a_module_trains_with_it_by_units_and_through_a_round_trip(world_size):
    core.check_it_survives_a_round_trip_and_training_goes_on_with_the_same_bits(int8, world_size)
    core.check_a_module_trains_with_it_by_units(fs.quantize(one_axis(), scatter=True, block=4))


def test_bad_input_is_refused():
    assert_all_refused(bad_rows(int8, (2, 3, 3), (2, 2)))


@pytest.mark.rows(1)
@on_ranks(*WORLD_SIZES[:-1])
def test_the_engine_and_the_verbs_make_the_same_gradients_and_states(world_size):
    core.check_the_engine_and_the_verbs_make_the_same_gradients_and_states(int8(one_axis()), stateless=world_size == 1)


@on_ranks(2)
def test_the_state_of_a_leaf_that_is_not_used_stays():
    check_the_state_of_a_transform_stays(fs.quantize(one_axis(), scatter=True, block=4, min_shard_elements=0))


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


@on_ranks(2)
def test_a_small_signal_next_to_large_noise_arrives_with_feedback_alone():
    """Ranks' large gradients cancel; the small one is below half a step of them, and is always rounded away.

    A step of the noise is 1000 / 127 on each rank, of which half a one, twice, is all that the state ever keeps back.
    """
    rate, target, steps = 0.1, 3.0, 50
    tx = fs.sgd(rate)
    noise = torch.tensor([1000.0, 0.0, 1000.0, 0.0]) * (1 - 2 * my_rank())

    def loss(p):
        w = fs.gather(p)["w"]
        return (w * noise).sum() + (w[1::2] - target).square().sum() / 2

    def trained(feedback):
        layout = fs.quantize(one_axis(), gather=False, scatter=True, error_feedback=feedback)
        state = fs.TrainState.create(fs.shard({"w": torch.zeros(4)}, layout), tx)
        for _ in range(steps):
            kept = {"transform_state": state.transform_state} if feedback else {}
            _, grads, *after = fs.value_and_grad(loss, **kept)(state.params)
            state = fs.update(tx, state, grads, **({"transform_state": after[0]} if feedback else {}))
        return fs.unshard(state.params)["w"]

    apart = rate * 1000 / 127
    for feedback in (True, False):
        w = trained(feedback)
        assert_trees_close(w[::2], torch.zeros(2), rtol=0, atol=apart)
        # What was not applied is in the state, at most half a step; on top comes what is left to go.
        signal, left = (target, apart + target * (1 - rate) ** steps) if feedback else (0.0, 0.0)
        assert_trees_close(w[1::2], torch.full((2,), signal), rtol=0, atol=left)
