"""A jitted update is the eager one, bit for bit: the optimizers of extensions."""

import pytest

import fshard as fs
from tests.ext.optim.test_table import TABLE
from tests.jit.steps import WORLDS, assert_on_ranks
from tests.jit.test_donation import check_no_optimizer_begins_with_shared_memory_that_it_writes_to
from tests.jit.test_optimizers import check_what_looks_at_values_is_refused_and_nothing_has_changed, halving, updating
from tests.ranks import on_ranks, world_of

OPTIMIZERS = {name: row.make for name, row in TABLE.items()} | {"lamb, halved": lambda: fs.lamb(halving)}
# It branches on values within torch's own class.
LOOKING = "whole Adafactor"


@pytest.mark.rows(1)
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != LOOKING])
def test_updates(name, world_size, workers):
    assert_on_ranks(updating(OPTIMIZERS[name]), world_of(world_size, workers))


@on_ranks(2)
def test_what_looks_at_values_is_refused_and_nothing_has_changed():
    check_what_looks_at_values_is_refused_and_nothing_has_changed(OPTIMIZERS[LOOKING])


@pytest.mark.parametrize("name", TABLE)
@on_ranks(1)
def test_no_optimizer_begins_with_shared_memory_that_it_writes_to(name):
    check_no_optimizer_begins_with_shared_memory_that_it_writes_to(TABLE[name])
