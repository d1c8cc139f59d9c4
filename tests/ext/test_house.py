"""The public names of extensions are documented as those of the core are."""

import fshard as fs
from fshard import checkpoint, testing
from tests import house
from tests.test_house import check_public_names_are_documented, check_public_names_have_an_example

MODULES = (fs, checkpoint, testing)


def test_public_names_are_documented():
    check_public_names_are_documented(house.public_objects_of_extensions(*MODULES))


def test_public_names_have_an_example():
    check_public_names_have_an_example(house.public_objects_of_extensions(*MODULES), 20)


def test_every_name_of_an_extension_is_public():
    for module in MODULES:
        assert house.names_of_extensions(module) <= set(module.__all__)
