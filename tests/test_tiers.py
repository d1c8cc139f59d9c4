"""The sample of a table's rows that `make test` runs."""

from itertools import product

from tests.tiers import sample


def test_a_sample_has_every_value_then_every_pair():
    table = list(product(range(3), range(2), range(2)))
    three = [table[i] for i in sample(table, 3, "seed")]
    assert [{row[column] for row in three} for column in range(3)] == [{0, 1, 2}, {0, 1}, {0, 1}]
    rows = [table[i] for i in sample(table, 7, "seed")]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert len({(row[a], row[b]) for row in rows}) == len({(row[a], row[b]) for row in table})


def test_a_sample_is_the_same_in_every_run_and_holds_a_short_table_whole():
    table = list(product(range(9), range(9)))
    assert sample(table, 5, "one") == sample(table, 5, "one") != sample(table, 5, "other")
    assert sample(table[:3], 4, "one") == [0, 1, 2]
