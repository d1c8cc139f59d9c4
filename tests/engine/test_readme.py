"""The program in the engine's README runs as printed, and the README names files and functions that are there."""

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


def test_every_file_is_in_the_table_of_files_and_in_the_table_of_symptoms():
    """A reader who looks for a fault finds each file that may have it; a wrong plan shows as a wrong order."""
    text = README.read_text()
    files = {path.name for path in ENGINE.glob("*.py")} - {"__init__.py"}
    order, symptoms = text.split("| symptom | file |")
    assert set(re.findall(r"^\| `(\w+\.py)` \|", order, re.MULTILINE)) == files
    assert set(re.findall(r"`(\w+\.py)`", symptoms)) >= files - {"plan.py", "microbatch.py"}


def test_methods_and_attributes_in_the_readme_are_there():
    code = "".join(path.read_text() for path in ENGINE.glob("*.py"))
    named = re.findall(r"\b([A-Z]\w+)\.(\w+)", README.read_text())
    assert len(named) > 30
    for owner, name in named:
        (body,) = re.findall(rf"^class {owner}\b.*?(?=^\S|\Z)", code, re.MULTILINE | re.DOTALL)
        assert re.search(rf"(def |self\.|    ){name}\b", body), f"{owner}.{name}"
