"""Leaves whose gradient is None, by the optimizers of extensions."""

from functools import partial

import pytest
from torch import optim

import fshard as fs
from tests.optim import test_unused as core
from tests.optim.test_unused import torch_sgd
from tests.ranks import on_ranks

AGAINST_TORCH = {
    "adafactor": (fs.adafactor, partial(optim.Adafactor, foreach=False), {"lr": 0.1, "weight_decay": 0.1}),
    "adafactor by other numbers": (
        *(fs.adafactor, partial(optim.Adafactor, foreach=False)),
        {"lr": 0.1, "beta2_decay": -0.6, "eps": (1.0, 3.0), "d": 1.5},
    ),
}
TABLE = {
    "lamb": lambda: fs.lamb(0.1, weight_decay=0.1),
    "lars": lambda: fs.lars(0.1, weight_decay=0.1),
    "adafactor": lambda: fs.adafactor(0.1),
    "whole": lambda: fs.whole(fs.adam(0.1)),
    "whole from_torch": lambda: fs.whole(torch_sgd()),
}


@pytest.mark.parametrize("name", AGAINST_TORCH)
def test_our_own_are_torch_s_within_rounding(name):
    core.check_our_own_are_torch_s_within_rounding(AGAINST_TORCH[name])


@pytest.mark.rows(1)
@pytest.mark.parametrize("name", TABLE)
@on_ranks(2)
def test_a_leaf_is_as_if_the_updates_without_it_had_not_been(name):
    core.check_a_leaf_is_as_if_the_updates_without_it_had_not_been(TABLE[name])


@pytest.mark.rows(1)
@pytest.mark.parametrize("name", TABLE)
@on_ranks(2)
def test_a_leaf_that_is_frozen_for_some_steps_is_as_one_without_a_gradient(name):
    core.check_a_leaf_that_is_frozen_for_some_steps_is_as_one_without_a_gradient(TABLE[name], begun="whole" in name)
