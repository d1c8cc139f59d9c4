"""A jitted update is the eager one, bit for bit: the optimizers of extensions."""

from tests.ext.optim.test_table import TABLE
from tests.jit.steps import (
    check_no_optimizer_begins_with_shared_memory_that_it_writes_to,
    check_what_looks_at_values_is_refused_and_nothing_has_changed,
)
from tests.ranks import on_ranks


@on_ranks(2)
def test_what_looks_at_values_is_refused_and_nothing_has_changed():
    """It branches on values within torch's own class."""
    check_what_looks_at_values_is_refused_and_nothing_has_changed(TABLE["whole Adafactor"].make)


@on_ranks(1)
def test_no_optimizer_begins_with_shared_memory_that_it_writes_to():
    for row in TABLE.values():
        check_no_optimizer_begins_with_shared_memory_that_it_writes_to(row.make)
