"""CAPABILITIES.md maps each public name of either ring to tests that exist."""

import fshard as fs
from fshard import checkpoint, testing
from tests import house
from tests.test_capabilities import ROOT, breaches, public_names


def test_every_capability_has_a_row_and_every_row_a_test():
    objects = [*house.public_objects(fs), *house.public_objects_of_extensions(fs, checkpoint, testing)]
    text = (ROOT / "tests/CAPABILITIES.md").read_text()
    assert list(breaches(text, set(public_names(objects)))) == []
