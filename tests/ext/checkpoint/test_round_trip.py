"""Law: restore(save(x)) is x bitwise, for the states of extensions."""

from functools import partial

import pytest
import torch

import fshard as fs
from tests.checkpoint import test_round_trip as core
from tests.ranks import on_ranks
from tests.trees import one_axis


def muon():
    return fs.partition({("w", "even"): fs.whole(fs.from_torch(torch.optim.Muon, lr=0.1)), "*": fs.adam(0.1)})


@pytest.mark.parametrize(("layout", "world_size"), [("ddp", 1), ("ddp", 2), ("zero3", 3), ("two dims", 2)])
@on_ranks()
def test_training_goes_on_as_if_nothing_had_happened(layout, tmp_path):
    core.check_training_goes_on_as_if_nothing_had_happened(fs.adafactor(0.1), layout, tmp_path)


@pytest.mark.parametrize(("layout", "world_size"), [("ddp", 1), ("ddp", 2), ("zero3", 3)])
@on_ranks()
def test_training_of_whole_leaves_goes_on_as_if_nothing_had_happened(layout, tmp_path):
    core.check_training_goes_on_as_if_nothing_had_happened(muon(), layout, tmp_path)


def test_training_goes_on_at_another_world_size(tmp_path):
    core.check_training_goes_on_at_another_world_size(partial(fs.adafactor, 0.1), tmp_path, rtol=1e-12)


@on_ranks(3)
def test_state_of_transforms_that_ranks_have_of_their_own(tmp_path):
    transform = fs.quantize(one_axis(), scatter=True, block=16)
    core.check_state_of_transforms_that_ranks_have_of_their_own(transform, tmp_path)
