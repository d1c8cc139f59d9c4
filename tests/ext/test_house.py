"""Extensions keep the rules of the house: documents of public names, their rows of capabilities, the budget, faults."""

import re

import pytest

import fshard as fs
from fshard import checkpoint, testing
from tests import budget, house
from tests.mutants.faults import Fault
from tests.mutants.test_faults import IN_EXTENSIONS, check_planted
from tests.test_capabilities import ROOT, breaches, public_names
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


def test_rooms_keep_their_budget():
    errors = budget.breaches(budget.sizes(), budget.rows(), budget.most_lines())
    assert not errors, "\n".join(errors)


def test_every_capability_has_a_row_and_every_row_a_test():
    objects = [*house.public_objects(fs), *house.public_objects_of_extensions(*MODULES)]
    text = (ROOT / "tests/CAPABILITIES.md").read_text()
    assert list(breaches(text, set(public_names(objects)))) == []


@pytest.mark.rows(len(IN_EXTENSIONS))
@pytest.mark.parametrize("fault", IN_EXTENSIONS, ids=lambda fault: fault.name)
def test_planted(fault: Fault) -> None:
    check_planted(fault)
