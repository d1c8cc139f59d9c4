"""Arguments, leaves and states that the optimizers of extensions refuse, each with the text of its error."""

import pytest
import torch
from torch import optim

import fshard as fs
from tests.bad_input import text_of
from tests.optim.test_refused import check_leaves_are_refused, refused_sums
from tests.test_bad_arguments import (
    RATE,
    check_hyperparameters_out_of_range_are_refused_by_name,
    check_the_ends_of_ranges_tensors_and_schedules_are_taken,
    out_of_range,
)
from tests.trees import one_axis

OUT_OF_RANGE = [
    *out_of_range(
        {
            fs.lamb: ("lr", "eps", "weight_decay"),
            fs.lars: ("lr", "momentum", "weight_decay", "trust_coefficient", "eps"),
            fs.adafactor: ("lr", "weight_decay"),
        },
        with_betas=(fs.lamb,),
    ),
    (fs.adafactor, {"beta2_decay": 0.5}, "adafactor: expected beta2_decay to be a number, 0 or less, got 0.5"),
    (fs.adafactor, {"d": 0.5}, "adafactor: expected d to be a finite number, 1 or more, got 0.5"),
    (fs.adafactor, {"eps": (-1, 1)}, f"adafactor: expected eps[0] to be {RATE}, got -1"),
    (fs.adafactor, {"eps": 1}, "adafactor: expected eps to be two numbers, got 1"),
    (fs.scale_by_factored_rms, {"eps": -1}, f"scale_by_factored_rms: expected eps to be {RATE}, got -1"),
]


def test_arguments_are_refused_by_name():
    for row in OUT_OF_RANGE:
        check_hyperparameters_out_of_range_are_refused_by_name(row)
    for make in (fs.lamb, fs.lars, fs.adafactor):
        check_the_ends_of_ranges_tensors_and_schedules_are_taken(make)
    for call, text in refused_sums({"scale_by_trust_ratio": {}, "scale_by_factored_rms": {}}):
        assert text_of(call) == text
    needed = "whole: expected tx to be an Optimizer, such as fs.from_torch(torch.optim.Muon), got a type"
    assert text_of(lambda: fs.whole(optim.Muon)) == needed


@pytest.mark.parametrize(("name", "checked_by"), [("lamb", "scale_by_adam"), ("lars", "sgd")])
def test_leaves_are_refused(name, checked_by):
    check_leaves_are_refused(getattr(fs, name), checked_by, takes_complex=name == "lars")


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
