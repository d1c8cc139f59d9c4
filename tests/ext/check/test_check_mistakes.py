"""fs.check finds planted mistakes at their lines, and reports nothing of steps without one."""

from functools import cache

import pytest

from tests.ext.check import right_steps
from tests.ext.check.mistakes import KNOWN, NEW, mended, table
from tests.ext.check.results import GUIDE, SHOWN, as_numbers, check_table, find_alarms, read_numbers, write_report

ROWS = {row.name: row for row in table()}


@cache
def rows_that_are_mended():
    return {row.name: (row.make, row.mesh) for module in KNOWN + NEW for row in mended(module)}


def test_the_results_have_every_row():
    """Half of the rows are those of older tests."""
    assert len(ROWS) == len(table()) == 80
    assert len(table(KNOWN)) == len(table(NEW))
    assert list(read_numbers()) == list(ROWS)


def test_every_row_that_is_not_found_says_why():
    outcomes = read_numbers()
    missed = {name for name, row in ROWS.items() if not row.only_a_run and not outcomes[name]["is_found"]}
    assert missed == {name for name, row in ROWS.items() if row.missed}
    assert all(outcomes[name]["is_named"] for name, row in ROWS.items() if row.only_a_run)


@pytest.mark.parametrize("name", SHOWN)
def test_the_guide_shows_the_report_as_it_is(name):
    assert write_report(ROWS[name]) in GUIDE.read_text()


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.rows(8)
def test_a_mistake_is_found_as_the_results_say(name):
    """If more is found, or less, write the results anew: python -m tests.ext.check --write."""
    assert as_numbers(check_table([ROWS[name]])) == {name: read_numbers()[name]}


def test_state_that_a_step_forgets_to_return_is_found():
    name = "buffers_that_are_not_kept"
    assert as_numbers(check_table([ROWS[name]]))[name]["kind"] == "buffer differs"


@pytest.mark.parametrize("name", rows_that_are_mended())
@pytest.mark.rows(4)
def test_a_step_that_is_mended_has_no_problem(name):
    assert find_alarms({name: rows_that_are_mended()[name]}) == []


@pytest.mark.parametrize("name", right_steps.TABLE)
@pytest.mark.rows(4)
def test_a_step_without_a_mistake_has_no_problem(name):
    assert find_alarms({name: right_steps.TABLE[name]}) == []
