"""The public names of extensions are documented as those of the core are."""

import re

import pytest

import fshard as fs
from fshard import checkpoint, testing
from tests import house
from tests.test_house import check_public_names_are_documented, check_public_names_have_an_example

MODULES = (fs, checkpoint, testing)


def test_public_names_are_documented():
    check_public_names_are_documented(house.public_objects_of_extensions(*MODULES))


def test_public_names_have_an_example():
    check_public_names_have_an_example(house.public_objects_of_extensions(*MODULES), 20)


@pytest.mark.parametrize("module", MODULES)
def test_the_reference_says_which_names_are_of_extensions(module):
    """In one paragraph or list, which says so."""
    parts = re.split(r"\n\n(?!- )", module.__doc__)
    (part,) = [part for part in parts if "of extensions" in part or "of an extension" in part]
    told = {name.rpartition(".")[2] for name in re.findall(r"`([\w.]+)`", part)}
    assert told - {"fs"} == house.names_of_extensions(module)


def test_every_name_of_an_extension_is_public():
    for module in MODULES:
        assert house.names_of_extensions(module) <= set(module.__all__)
