"""The budget of code of the whole package."""

from tests import budget


def test_rooms_keep_their_budget():
    errors = budget.breaches(budget.sizes(), budget.rows(), budget.most_lines())
    assert not errors, "\n".join(errors)
