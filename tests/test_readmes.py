"""READMEs of rooms have a table of all files of the room, and name functions, methods and attributes that are there."""

import re

import pytest

from tests.test_guide import ROOT, dead_links, tables

# Names of other rooms that each README has.
ROOMS = {"comm": [], "engine": ["_run_by_units", "min_shard_elements"], "jit": []}


@pytest.mark.rows(len(ROOMS))
@pytest.mark.parametrize("room", ROOMS)
def test_what_a_readme_names_is_there(room):
    readme = ROOT / f"fshard/{room}/README.md"
    text, files = readme.read_text(), sorted(readme.parent.glob("*.py"))
    source = "".join(path.read_text() for path in files)
    named = {name for rows in tables(text) if rows[0][0] == "file" for name, *_ in rows[1:] if "/" not in name}
    assert named == {path.name for path in files} - {"__init__.py"}
    assert list(dead_links(readme)) == []
    names = set(re.findall(r"`(?:[A-Za-z]\w*\.)?(_?[a-z]+_\w+|_[a-z]+)`", text))
    assert sorted(name for name in names if not re.search(rf"\b{name}\b", source)) == ROOMS[room]
    pairs = re.findall(r"\b([A-Z]\w+)\.(\w+)", text)
    assert len(pairs) > 5
    for owner, name in pairs:
        (body,) = re.findall(rf"^class {owner}\b.*?(?=^\S|\Z)", source, re.MULTILINE | re.DOTALL)
        assert re.search(rf"(def |self\.|    ){name}\b", body), f"{owner}.{name}"
