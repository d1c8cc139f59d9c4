"""The budget of code, and that the rules which hold it find what they should."""

from tests import budget, readability
from tests.budget import Row, Size

PACKAGE = budget.ROOT / "fshard"


def test_rooms_keep_their_budget():
    """Those of the core; a test of extensions has the others."""
    errors = budget.breaches(budget.sizes(["core"]), budget.rows(["core"]), budget.limits())
    assert not errors, "\n".join(errors)


def test_no_code_is_hidden_from_the_count():
    files = sorted(PACKAGE.rglob("*.py"))
    errors = [f"{path}:{error}" for path in files for error in budget.hidden_code(path.read_text())]
    others = {path.suffix or path.name for path in PACKAGE.rglob("*") if path.is_file()} - {".py", ".pyc"}
    assert not errors, "\n".join(errors)
    assert others == {".md", ".typed"}  # a file of data would be code that no row counts


def test_the_budget_finds_a_breach():
    row = Row(1000, 12.0, 1)
    for size, most, error in (
        (Size(1000, 100, 1), 1000, ""),
        (Size(1000, 80, 1), 1000, "mesh: expected at most 12.05 tokens a line, got 12.5"),
        (Size(1000, 100, 2), 1000, "mesh: expected at most 1 functions of over 40 lines, got 2"),
        (Size(1001, 100, 1), 1000, "core: expected at most 1,000 tokens, got 1,001"),
        (
            Size(880, 100, 1),
            1000,
            "mesh: has 880 tokens, and its row 1,000; write the table anew by `python -m tests.budget --write`",
        ),
    ):
        assert "".join(budget.breaches({"mesh": size}, {"mesh": row}, {"core": most})) == error
    assert budget.measure('def f():\n    """Return."""\n    # Two.\n    return """a\nb"""\n') == Size(7, 3, 0)
    assert budget.hidden_code('x = "' + "x+" * 101 + '"\nexec("x")\n') == ["1: a string of 202 characters", "2: exec"]


def test_the_package_reads_no_worse_than_the_table_says():
    errors = readability.excesses(readability.readings(), readability.limits(budget.TABLE.read_text()))
    assert not errors, "\n".join(errors)
