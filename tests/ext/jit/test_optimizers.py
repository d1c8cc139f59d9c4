"""A jitted update is the eager one, bit for bit: the optimizers of extensions."""

import pytest

from tests.ext.optim.test_table import TABLE
from tests.jit.test_donation import check_no_optimizer_begins_with_shared_memory_that_it_writes_to
from tests.jit.test_optimizers import check_what_looks_at_values_is_refused_and_nothing_has_changed
from tests.ranks import on_ranks


@on_ranks(2)
def test_what_looks_at_values_is_refused_and_nothing_has_changed():
    """It branches on values within torch's own class."""
    check_what_looks_at_values_is_refused_and_nothing_has_changed(TABLE["whole Adafactor"].make)


@pytest.mark.parametrize("name", TABLE)
@on_ranks(1)
def test_no_optimizer_begins_with_shared_memory_that_it_writes_to(name):
    check_no_optimizer_begins_with_shared_memory_that_it_writes_to(TABLE[name])
