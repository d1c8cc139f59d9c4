"""The planted mistakes are mistakes: run on ranks, each changes numbers, or fshard refuses the step."""

import pytest

from tests.ext.check.ground_truth import EQUAL, run_both
from tests.ext.check.mistakes import table
from tests.ext.check.results import list_mended, read_effects

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

ROWS = {row.name: row for row in table()}
MENDED = list_mended()


def test_every_row_has_the_code_that_mends_it():
    """But those that only a run can find, of which most are no mistake in another program."""
    assert ROWS.keys() - MENDED.keys() == {name for name, row in ROWS.items() if row.only_a_run}
    assert read_effects().keys() == MENDED.keys()


@pytest.mark.parametrize("name", MENDED)
@pytest.mark.rows(len(MENDED))
def test_a_mistake_changes_numbers_or_is_refused(name):
    effect = run_both(ROWS[name], MENDED[name].make)
    assert effect == read_effects()[name] != EQUAL


@pytest.mark.parametrize("name", ("rate_divided_by_ranks", "accuracy_of_one_rank"))
def test_a_step_without_its_mistake_changes_nothing(name):
    """The comparison itself has no false alarm."""
    assert run_both(MENDED[name], MENDED[name].make) == EQUAL
