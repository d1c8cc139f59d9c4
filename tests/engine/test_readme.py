"""The program in the engine's README runs as printed, and a fault is looked for in any of its files."""

import doctest
import re
from pathlib import Path

import fshard

ENGINE = Path(fshard.__file__).parent / "engine"
README = ENGINE / "README.md"


def test_the_events_of_three_blocks():
    results = doctest.testfile(str(README), module_relative=False)
    assert results.attempted > 5
    assert results.failed == 0


def test_every_file_is_in_the_table_of_symptoms():
    """A reader who looks for a fault finds each file that may have it; a wrong plan shows as a wrong order."""
    files = {path.name for path in ENGINE.glob("*.py")} - {"__init__.py"}
    _, symptoms = README.read_text().split("| symptom | file |")
    assert set(re.findall(r"`(\w+\.py)`", symptoms)) >= files - {"plan.py", "microbatch.py"}
