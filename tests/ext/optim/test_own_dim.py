"""Adafactor of leaves that ranks own, next to every other role."""

import pytest

import fshard as fs
from tests.ranks import on_ranks
from tests.transforms.test_own_dim import check_training_is_that_of_one_process


@pytest.mark.rows(2)
@on_ranks(1, 2, 4, 8, "2 processes")
def test_training_is_that_of_one_process(world_size):
    check_training_is_that_of_one_process(fs.adafactor(0.01), world_size, reduced=True)
