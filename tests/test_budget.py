"""The budget of code, and that the rules which hold it find what they should."""

import pytest

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


@pytest.mark.rows(20)
@pytest.mark.parametrize(
    ("text", "size"),
    [
        ('"""Two\n\nlines."""\n\nx = 1\n# A comment.\n', Size(1, 3, 0)),
        ("x = [\n    1,\n\n    2,\n]\n", Size(4, 8, 0)),
        ('def f():\n    """Return."""\n    return """a\nb"""\n', Size(3, 7, 0)),
        ("def f():\n" + "    x = 1\n" * 39, Size(40, 122, 0)),
        ("def f():\n" + "    x = 1\n" * 40, Size(41, 125, 1)),
    ],
)
def test_a_file_is_measured(text, size):
    assert budget.measure(text) == size


@pytest.mark.rows(20)
@pytest.mark.parametrize(
    ("now", "most", "errors"),
    [
        ({"mesh": Size(100, 1000, 1)}, 100, []),
        ({"mesh": Size(109, 1250, 1)}, 109, []),
        (
            {"mesh": Size(111, 1000, 1)},
            111,
            ["mesh: expected at most 110 lines of code, a tenth over its row, got 111"],
        ),
        ({"mesh": Size(100, 1200, 1)}, 100, ["mesh: expected at most 11.5 tokens a line, got 12.0"]),
        ({"mesh": Size(100, 1000, 2)}, 100, ["mesh: expected at most 1 functions of over 40 lines, got 2"]),
        (
            {"mesh": Size(99, 990, 1)},
            100,
            ["mesh: is smaller than its row; lower it by `python -m tests.budget --lower`"],
        ),
        ({"mesh": Size(101, 1000, 1)}, 100, ["fshard: expected at most 100 lines of code, got 101"]),
        (
            {"mesh": Size(100, 1000, 1), "attic": Size(5, 5, 0)},
            200,
            ["attic: has no row in BUDGET.md"],
        ),
        ({}, 100, ["mesh: has a row in BUDGET.md and no files"]),
    ],
)
def test_the_budget_finds_a_breach(now, most, errors):
    assert budget.breaches(now, {"mesh": Size(100, 1000, 1)}, most) == errors


@pytest.mark.rows(20)
@pytest.mark.parametrize(
    ("text", "errors"),
    [
        ('"""' + "x" * 300 + '"""\nx = "' + "x" * 200 + '"\n', []),
        ('x = "' + "x" * 201 + '"\n', ["1: a string of 201 characters"]),
        ('exec("x = 1")\n', ["1: exec"]),
        ("re.compile('x')\n", []),
    ],
)
def test_hidden_code_is_found(text, errors):
    assert budget.hidden_code(text) == errors
