"""fs.check finds planted mistakes at their lines, and reports nothing of steps without one."""

import pytest

from tests.ext.check.mistakes import check, table
from tests.ext.check.results import GUIDE, SHOWN, list_mended, read_numbers, write_report
from tests.ext.check.right_steps import TABLE as WITHOUT_MISTAKES

ROWS = {row.name: row for row in table()}
WITHOUT_THEIRS = list_mended()
# One row of each rule, small ones; the others are slow.
MISTAKES = (
    *("layer_without_a_cast", "layer_without_a_sum", "psum_of_what_agrees", "cast_of_a_permuted_value"),
    *("buffers_that_are_not_kept", "loss_summed_over_ranks", "mean_over_the_tokens_of_each_rank"),
    *("tokens_counted_twice", "norm_of_the_features_of_each_rank", "penalty_of_shards", "noise_that_differs_over_tp"),
    *("dropout_without_the_rank", "rate_divided_by_ranks", "clipping_by_the_norm_of_shards", "gradient_of_one_rank"),
    *("gradients_averaged_again", "weights_that_are_forgotten", "mean_of_perplexities", "accuracies_added_up"),
    *("labels_shifted_by_the_rank", "pcast_of_a_split_leaf", "leaf_that_is_frozen"),
    *("right_rows_over_the_rows_of_one_rank", "mean_of_the_parts_of_a_product"),
)
MENDED = ("psum_of_what_agrees", "clipping_by_the_norm_of_shards")
RIGHT = (
    *("hsdp", "sgd with momentum", "weighted", "tree sums", "merged", "summed penalty", "private", "codebook"),
    *("members with counts", "smoothed labels", "logged term", "means weighted again"),
)


def of_tiers(names, fast):
    """Rows, of which all but some are slow."""
    assert set(fast) <= set(names)
    return [pytest.param(name, marks=[] if name in fast else pytest.mark.slow) for name in names]


def test_the_results_have_every_row():
    assert len(ROWS) == len(table()) == 98
    assert list(read_numbers()) == list(ROWS)


def test_every_row_that_is_not_found_says_why():
    outcomes = read_numbers()
    missed = {name for name, row in ROWS.items() if not row.only_a_run and not outcomes[name]["is_found"]}
    assert missed == {name for name, row in ROWS.items() if row.missed}


@pytest.mark.parametrize("name", of_tiers(ROWS, MISTAKES))
@pytest.mark.rows(len(ROWS))
def test_a_mistake_is_found_as_the_results_and_the_guide_say(name):
    """If more is found, or less, write the results anew: python -m tests.ext.check --write."""
    row = ROWS[name]
    report = check(row.make, row.mesh)
    assert row.judge(report)._asdict() == read_numbers()[name]
    assert row.word in str(report)
    if name in SHOWN:
        assert write_report(row, report) in GUIDE.read_text()


@pytest.mark.parametrize("name", of_tiers(WITHOUT_THEIRS, MENDED))
@pytest.mark.rows(len(ROWS))
def test_a_step_that_is_mended_has_no_problem(name):
    row = WITHOUT_THEIRS[name]
    assert check(row.make, row.mesh).problems == ()


@pytest.mark.parametrize("name", of_tiers(WITHOUT_MISTAKES, RIGHT))
@pytest.mark.rows(len(ROWS))
def test_a_step_without_a_mistake_has_no_problem(name):
    assert check(*WITHOUT_MISTAKES[name]).problems == ()
