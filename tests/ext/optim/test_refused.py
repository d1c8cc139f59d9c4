"""Arguments, states and leaves that the optimizers of extensions refuse, each with the text of its error."""

import pytest
import torch
from torch import optim

import fshard as fs
from tests.bad_input import text_of
from tests.optim.test_refused import check_leaves_are_refused, refused_sums
from tests.trees import one_axis

TAKES_SUMS = {"scale_by_trust_ratio": {}, "scale_by_factored_rms": {}}
ARGUMENTS = [
    *refused_sums(TAKES_SUMS),
    (
        lambda: fs.whole(optim.Muon),
        "whole: expected tx to be an Optimizer, such as fs.from_torch(torch.optim.Muon), got a type",
    ),
]


def test_refusals():
    for call, text in ARGUMENTS:
        assert text_of(call) == text


# Chains of others.
CHECKED_BY = {"lamb": "scale_by_adam", "lars": "sgd"}


@pytest.mark.parametrize("name", CHECKED_BY)
def test_leaves_are_refused(name):
    check_leaves_are_refused(getattr(fs, name), CHECKED_BY[name], takes_complex=name == "lars")


def test_whole_refuses_a_leaf_that_was_frozen_so_far():
    transform, tx = fs.ddp(one_axis()), fs.whole(fs.adam(0.1))
    state = fs.TrainState.create(fs.shard({"a": torch.ones(3), "b": torch.ones(2)}, transform, frozen="a"), tx)
    state = fs.reshard(state, transform, frozen="b")
    grads = fs.shard({"a": torch.ones(3)}, transform) | {"b": None}
    assert text_of(lambda: fs.update(tx, state, grads)) == (
        "whole: leaves were frozen until now\n"
        "  ['a']: expected a state, got none\n"
        "To fix: make the state anew by fs.TrainState.create."
    )
