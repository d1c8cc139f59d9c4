"""assert_same_bits passes a step of sums in a tree, and names the first step, leaf and cause of other bits."""

import math
import re
from functools import partial

import numpy as np
import pytest
import torch

import fshard as fs
from fshard.ext.testing.same_bits import _describe_difference
from fshard.testing import assert_same_bits
from tests.ranks import my_rank
from tests.trees import normal

SGD = fs.sgd(0.1, momentum=0.9)
# The form that torch vectorizes along a shard, and finishes one by one.
FUSED = fs.from_torch(torch.optim.AdamW, lr=1e-3, fused=True)
BATCHES = [list(normal(step)(8, 5, 50, dtype=torch.float32)) for step in range(4)]


def state(mesh, tx=SGD, of=lambda mesh: 0.0):
    params = {"v": torch.ones(3), "w": normal(9)(50, 3, dtype=torch.float32) + of(mesh)}
    return fs.TrainState.create(fs.shard(params, fs.zero3(mesh, min_shard_elements=0)), tx)


def loss_fn(params, x):
    full = fs.gather(params)
    return torch.tanh(x @ full["w"] * full["v"]).mean()


def step(state, microbatches, tx=SGD, reduction_order="tree", aux=False, loss_fn=loss_fn):
    make = fs.accumulate(loss_fn, reduction_order=reduction_order)
    loss, grads = make(state.params, microbatches)
    return fs.update(tx, state, grads), loss, *([grads] if aux else [])


def by_rank(params, x):
    return loss_fn(params, x + (my_rank() == 3))


def with_a_leaf_more(state, microbatches):
    """A step whose third result has a leaf on several ranks alone."""
    return *step(state, microbatches), {"count": 1} if len(microbatches) < len(BATCHES[0]) else {}


def with_an_array(state, microbatches):
    """A step whose third result is an array, of which its text leaves the middle out."""
    array = np.zeros(2000)
    array[1000] = len(microbatches)
    return *step(state, microbatches), array


def with_loss_of_rank_1(state, microbatches):
    after, loss = step(state, microbatches)
    return after, loss + (my_rank() == 1) * (after.step == 3)


def with_buffers(state, microbatches):
    """A step whose buffers stay each rank's own until the last step, when rank 0 has others too."""
    after, loss = step(state, microbatches)
    return after._replace(buffers={"mean": torch.tensor(float(my_rank() + (after.step == 4) * loss))}), loss


def whole_step(params, microbatches):
    return params, torch.stack(microbatches).sum()


DIFFERENT = {
    "sums in turn": (
        partial(step, reduction_order=None, aux=True),
        state,
        r"assert_same_bits: step 0 \(counted from 0\) has other bits on rank 0 of 4 than on rank 0 of 1\n"
        r"  aux\['v'\]: Mismatched elements: \d / 3 \(.*\n"
        r"  leaves that differ: \d of 2 in aux, (\d of 2 in state.params, )?\d of 5 in state.opt_state\n"
        r"  the state before and the loss are equal: the backward, the sums of gradients, or what else aux holds\n"
        r'To fix: pass reduction_order="tree" to accumulate or value_and_grad, and take one thread '
        "and kernels whose bits depend ",
    ),
    "data by rank": (partial(step, loss_fn=by_rank), state, r"\n  loss: .*\n.*\n  the state before is equal: the data"),
    "an update by the length of a shard": (
        partial(step, tx=FUSED, aux=True),
        partial(state, tx=FUSED),
        "or the update\nTo",
    ),
    "a loss of one rank in one step": (
        with_loss_of_rank_1,
        state,
        r"^assert_same_bits: step 2 \(counted from 0\) has other bits on rank 1 of 4 than on rank 0 of 1\n"
        r"  loss: Expected 0\.\d+ but got 1\.\d+\. .*\n"
        r"  leaves that differ: 1 of 1 in loss\n"
        r"  rank 0 has the bits that are expected: the step computes this of the rank, or of its part of the batch\n"
        r"To fix: return what agrees between ranks, as after fs.objective, fs.pmean or fs.sync_buffers\.$",
    ),
    "buffers of each rank": (
        with_buffers,
        state,
        r"step 0 .* on rank 1 of 4 .*\n  state.buffers\['mean'\]: Expected 0.0 but got 1.0",
    ),
    "a beginning of rank 1": (
        step,
        lambda mesh: state(mesh)._replace(buffers={"b": torch.tensor(my_rank())}),
        "states to start from have other bits on rank 1 of 4 than on rank 0 of 1",
    ),
    "another beginning": (step, partial(state, of=lambda mesh: mesh.size()), "states to start from have other bits"),
    "an array": (
        with_an_array,
        state,
        r"\n  aux: Mismatched elements: 1 / 2000 .* difference: 6.0 at index \(1000,\)",
    ),
    "a leaf of one world size": (
        with_a_leaf_more,
        state,
        r"\n  aux\['count'\]: expected no such leaf, got 1\n  leaves that differ: 1 of 1 in aux\n",
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
@pytest.mark.rows(len(DIFFERENT))
def test_other_bits_are_named(name):
    step, state, text = DIFFERENT[name]
    with pytest.raises(AssertionError, match=text):
        assert_same_bits(step, state, BATCHES, (1, 4))


@pytest.mark.rows(1)
def test_ranks_of_the_first_world_size_are_compared_too():
    def only_there(state, microbatches):
        return *step(state, microbatches), {"there": my_rank() * (len(microbatches) == 2)}

    text = r"has other bits on rank 1 of 4 than on rank 0 of 4\n  aux\['there'\]: expected 0, got 1"
    with pytest.raises(AssertionError, match=text):
        assert_same_bits(only_there, state, BATCHES, (4, 2))
    assert_same_bits(step, state, BATCHES, (2, 4))


def test_differences_of_leaves():
    for a, b, text in (
        (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]), "other bits, as those of 0.0 and -0.0 are"),
        (torch.tensor([torch.nan]), torch.tensor([torch.nan]), ""),
        (
            torch.ones(2, dtype=torch.complex64),
            torch.ones(2, 2),
            "'shape' do not match: torch.Size([2, 2]) != torch.Size([2])",
        ),
        (None, torch.tensor(0), "expected None, got tensor(0)"),
        (1, 1.0, "expected 1, got 1.0"),
        (0.0, -0.0, "expected 0.0, got -0.0"),
        (math.nan, float("nan"), ""),
        (frozenset([0, 8]), frozenset([8, 0]), ""),
    ):
        difference = _describe_difference(a, b)
        assert text in difference
        assert bool(text) == bool(difference)


def test_what_makes_no_sense_is_refused():
    for arguments, text in (
        ((None, state, BATCHES), "expected step to be a function, got None"),
        ((step, state, []), "expected batches of one step or more, got none"),
        ((step, state, BATCHES, (4,)), "expected two or more different world_sizes, got (4,)"),
        ((step, state, BATCHES, (2, 2)), "expected two or more different world_sizes, got (2, 2)"),
        # Without shards, every rank has all microbatches, and so the bits of one rank.
        ((whole_step, lambda mesh: {"w": torch.ones(3)}, BATCHES, (1, 2)), "expected state to return Sharded leaves"),
        ((lambda state, batch: state, state, BATCHES, (1, 2)), "expected step to return (state, loss) or (state, loss"),
    ):
        with pytest.raises((TypeError, ValueError, RuntimeError), match=re.escape(f"assert_same_bits: {text}")):
            assert_same_bits(*arguments)
