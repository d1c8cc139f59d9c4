"""The budget of code: how much there is, and how it reads."""

from tests import budget, readability

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


def test_the_package_reads_no_worse_than_the_table_says():
    errors = readability.excesses(readability.readings(), readability.limits(budget.TABLE.read_text()))
    assert not errors, "\n".join(errors)
