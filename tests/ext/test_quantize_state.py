"""Error feedback: what quantize leaves out of sums is explicit state, and no part of gradients is lost."""

import math

import pytest
import torch

import fshard as fs
from fshard.testing import assert_trees_close
from tests.bad_input import assert_all_refused
from tests.ranks import my_rank, on_ranks
from tests.test_law_purity import unchanged
from tests.test_unused import check_the_state_of_a_transform_stays
from tests.transforms import test_transform_state as core
from tests.transforms.laws import every_kind, grid, shard_kinds
from tests.transforms.rounding import full_tree, grads_of, joined, pieces, rounded
from tests.transforms.test_transform_state import bad_rows
from tests.trees import WORLD_SIZES, assert_same_bits, normal, one_axis, two_axes


def int8(mesh, **options):
    # Multiples of parameters that were rounded themselves would lose nothing.
    return fs.quantize(mesh, gather=False, scatter=True, block=4, **options)


@on_ranks(1, 2, 3, 4)
def test_accumulate_hands_the_state_from_microbatch_to_microbatch():
    core.check_accumulate_hands_the_state_from_microbatch_to_microbatch(int8)


@pytest.mark.parametrize("donate", (False, True))
@on_ranks(2)
def test_a_train_state_holds_it(donate):
    core.check_a_train_state_holds_it(int8, donate)


@pytest.mark.rows(1)
@on_ranks(2, 4)
def test_it_survives_a_round_trip_and_training_goes_on_with_the_same_bits(world_size):
    core.check_it_survives_a_round_trip_and_training_goes_on_with_the_same_bits(int8, world_size)


@on_ranks(2)
def test_without_feedback_there_is_none():
    plain = fs.quantize(one_axis(), scatter=True, error_feedback=False)
    core.check_without_a_stateful_transform_there_is_none(plain)


@on_ranks("2 processes")
def test_processes():
    return core.check_processes(int8)


@on_ranks(2)
def test_a_module_trains_with_it_by_units():
    core.check_a_module_trains_with_it_by_units(fs.quantize(one_axis(), scatter=True, block=4))


def test_bad_input_is_refused():
    assert_all_refused(bad_rows(int8, "QuantizeWithFeedback", (2, 3, 3), (2, 2)))


@pytest.mark.rows(1)
@on_ranks(*WORLD_SIZES[:-1])
def test_the_engine_and_the_verbs_make_the_same_gradients_and_states(world_size):
    core.check_the_engine_and_the_verbs_make_the_same_gradients_and_states(int8(one_axis()), stateless=world_size == 1)


@on_ranks(2)
def test_the_state_of_a_leaf_that_is_not_used_stays():
    check_the_state_of_a_transform_stays(fs.quantize(one_axis(), scatter=True, block=4, min_shard_elements=0))


def residual(state, params, world_size, axis="shard"):
    """What all ranks together have not sent yet, in full tensors."""
    whole = fs.unshard(state)
    out = {}
    for name, param in params.items():
        (rows,) = fs.tree_leaves(whole[name])
        rows = rows.sum(0)
        out[name] = joined(list(rows), torch.zeros(param.spec.shape, dtype=rows.dtype))
    return out


STEPS = 5


@pytest.mark.rows(2)
@pytest.mark.parametrize(
    "world_size, dtype", [*((size, torch.float64) for size in WORLD_SIZES[1:]), (3, torch.float32)]
)
@on_ranks()
def test_what_is_applied_and_what_is_left_are_all_gradients(world_size, dtype):
    """Over steps, to the rounding of sums; without feedback what is applied is far from them."""
    params = fs.shard(full_tree(dtype), fs.quantize(one_axis(), scatter=True, block=16))
    plain = fs.quantize(one_axis(), scatter=True, block=16, error_feedback=False)
    state, like = fs.transform_state(params), fs.reshard(params, plain)
    applied = lossy = fs.tree_map(torch.zeros_like, full_tree(dtype))
    true, magnitude = applied, applied
    for step in range(STEPS):
        local = grads_of(step, my_rank(), dtype)
        with unchanged(params, state, local):
            grads, new = fs.scatter_grads(local, like=params, reduce="sum", transform_state=state)
            again, same = fs.scatter_grads(local, like=params, reduce="sum", transform_state=state)
        assert_same_bits(fs.tree_leaves((grads, new)), fs.tree_leaves((again, same)))
        state = new
        applied = fs.tree_map(torch.add, applied, fs.unshard(grads))
        lossy = fs.tree_map(torch.add, lossy, fs.unshard(fs.scatter_grads(local, like=like, reduce="sum")))
        for rank in range(world_size):
            grad = grads_of(step, rank, dtype)
            true = fs.tree_map(torch.add, true, grad)
            magnitude = fs.tree_map(lambda m, g: m + g.abs().max() if g.numel() else m, magnitude, grad)
    left = residual(state, params, world_size)
    for name in true:
        # Each step adds, subtracts and sums a few numbers for each rank, none above the magnitudes so far.
        tolerance = 8 * STEPS * world_size * torch.finfo(dtype).eps * magnitude[name]
        assert ((applied[name] + left[name] - true[name]).abs() <= tolerance).all()
    apart = [(lossy[name] - true[name]).abs().max() for name in ("matrix", "vector")]
    assert min(apart) > 1e-3


@on_ranks(2)
def test_gradients_in_bfloat16_leave_a_residual_in_the_stored_dtype():
    """Which rounding to bfloat16 would lose again: what is left is far below a step of the numbers it is left from."""
    layout = fs.quantize(one_axis(), scatter=True, block=16)
    params = fs.shard(full_tree(torch.float32), fs.compose(layout, fs.cast(scatter=torch.bfloat16)))
    state, total = fs.transform_state(params), 0.0
    true = 0.0
    for step in range(20):
        local = {name: g.bfloat16() for name, g in grads_of(step, my_rank(), torch.float32).items()}
        grads, state = fs.scatter_grads(local, like=params, reduce="sum", transform_state=state)
        total = total + fs.unshard(grads)["matrix"]
        true = true + sum(grads_of(step, r, torch.float32)["matrix"].bfloat16().float() for r in range(2))
    assert {row.dtype for row in fs.tree_leaves(state)} == {torch.float32}
    left = residual(state, params, 2)["matrix"]
    tops = max(grads_of(s, r)["matrix"].abs().max() for s in range(20) for r in range(2))
    tolerance = 8 * 20 * 2 * torch.finfo(torch.float32).eps * tops * 2
    assert ((total + left - true).abs() <= tolerance).all()


@on_ranks(4)
def test_each_ranks_rows_are_its_own_and_as_large_as_full_gradients():
    mesh = two_axes(4)
    inner = fs.quantize(mesh["shard"], scatter=True, block=4)
    params = shard_kinds(fs.compose(fs.replicate(mesh["replicate"]), inner))
    state = fs.transform_state(params)
    for name in ("float32", "bfloat16", "scalar", "cube"):
        (_, row), spec = state[name], params[name].spec
        shard = fs.axis_of(mesh, "shard")
        shape = (2, *pieces(every_kind()[name], 2)[0].shape)
        assert (row.local.shape, row.spec.shape) == ((1, *shape), (4, *shape))
        assert row.local.dtype == params[name].local.dtype
        assert row.spec.partition == fs.P(tuple(axis.name for axis in spec.axes))
        assert shard in row.spec.axes


@on_ranks(4)
def test_leaves_that_other_stages_have_made_small_keep_their_feedback():
    """Whether a leaf stays whole goes by its global size: 64 elements here, of which a rank gathers 32."""
    mesh = grid(4)
    rough = fs.quantize(mesh["shard"], scatter=True, block=4, min_shard_elements=40)
    halves = fs.compose(rough, fs.masked(fs.split_dim(mesh["tp"], dim=1), "w"))
    params = fs.shard({"w": normal()(8, 8), "b": normal()(3)}, halves)
    state, rank = fs.transform_state(params), fs.comm.rank(fs.axis_of(mesh, "shard"))
    assert math.prod(params["w"].spec.gathered_shape) == 32
    local = {"w": normal(rank)(8, 4), "b": normal(rank)(3)}
    grads, after = fs.scatter_grads(local, like=params, reduce="sum", transform_state=state)
    sums = sum(joined([rounded(p, 4) for p in pieces(normal(r)(8, 4), 2)], local["w"]) for r in range(2))
    assert_same_bits(fs.unshard(grads)["w"][:, :4], sums)
    assert fs.tree_leaves(after["w"])[0].any()
    assert_same_bits(fs.unshard(grads)["b"], normal(0)(3) + normal(1)(3))
    assert not fs.tree_leaves(after["b"])[0].any()


@pytest.mark.parametrize("feedback", (True, False))
@on_ranks(2)
def test_a_small_signal_next_to_large_noise_arrives_with_feedback_alone(feedback):
    """Ranks' large gradients cancel; the small one is below half a step of them, and is always rounded away.

    A step of the noise is 1000 / 127 on each rank, of which half a one, twice, is all that the state ever keeps back.
    """
    rate, target, steps = 0.05, 3.0, 100
    layout = fs.quantize(one_axis(), gather=False, scatter=True, error_feedback=feedback)
    tx = fs.from_torch(torch.optim.SGD, lr=rate)
    state = fs.TrainState.create(fs.shard({"w": torch.zeros(4)}, layout), tx)
    noise = torch.tensor([1000.0, 0.0, 1000.0, 0.0]) * (1 - 2 * my_rank())

    def loss(p):
        w = fs.gather(p)["w"]
        return (w * noise).sum() + (w[1::2] - target).square().sum() / 2

    for _ in range(steps):
        if feedback:
            _, grads, after = fs.value_and_grad(loss, transform_state=state.transform_state)(state.params)
            state = fs.update(tx, state, grads, transform_state=after)
        else:
            _, grads = fs.value_and_grad(loss)(state.params)
            state = fs.update(tx, state, grads)
    w = fs.unshard(state.params)["w"]
    assert_trees_close(w[::2], torch.zeros(2), rtol=0, atol=rate * 1000 / 127)
    if feedback:
        # What was not applied is in the state, at most half a step, and gradients are taken that far away; on top comes
        # what is left to go.
        apart = rate * 1000 / 127 + target * (1 - rate) ** steps
        assert_trees_close(w[1::2], torch.full((2,), target), rtol=0, atol=apart)
    else:
        assert not w[1::2].any()
