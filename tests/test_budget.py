"""The budget of code, and that the rules which hold it find what they should."""

from tests import budget
from tests.budget import Size

PACKAGE = budget.ROOT / "fshard"


def test_rooms_keep_their_budget():
    """Those of the core; the whole package's is a test of extensions."""
    sizes, rows = (
        {room: size for room, size in table.items() if not room.startswith("ext/")}
        for table in (budget.sizes(), budget.rows())
    )
    errors = budget.breaches(sizes, rows, budget.most_lines())
    assert not errors, "\n".join(errors)


def test_no_code_is_hidden_from_the_count():
    files = sorted(PACKAGE.rglob("*.py"))
    errors = [f"{path}:{error}" for path in files for error in budget.hidden_code(path.read_text())]
    others = {path.suffix or path.name for path in PACKAGE.rglob("*") if path.is_file()} - {".py", ".pyc"}
    assert not errors, "\n".join(errors)
    assert others == {".md", ".typed"}  # a file of data would be code that no row counts


def test_the_budget_finds_a_breach():
    row = Size(100, 1000, 1)
    for now, most, error in (
        (row, 100, ""),
        (Size(111, 1000, 1), 111, "mesh: expected at most 110 lines of code, a tenth over its row, got 111"),
        (Size(100, 1200, 1), 100, "mesh: expected at most 11.62 tokens a line, got 12"),
        (Size(100, 1000, 2), 100, "mesh: expected at most 1 functions of over 40 lines, got 2"),
        (Size(101, 1000, 1), 100, "fshard: expected at most 100 lines of code, got 101"),
    ):
        assert "".join(budget.breaches({"mesh": now}, {"mesh": row}, most)) == error
    assert budget.measure('def f():\n    """Return."""\n    # Two.\n    return """a\nb"""\n') == Size(3, 7, 0)
    assert budget.hidden_code('x = "' + "x" * 201 + '"\nexec("x")\n') == ["1: a string of 201 characters", "2: exec"]
