"""What the house asks of the core it asks of extensions: documents, a row of each name, a budget, faults."""

import re

import pytest

import fshard as fs
from fshard import checkpoint, testing
from tests import budget, house
from tests.mutants.test_faults import IN_EXTENSIONS, check_planted
from tests.test_capabilities import ROOT, breaches, public_names
from tests.test_house import check_public_names_are_documented, check_public_names_have_an_example

MODULES = (fs, checkpoint, testing)
PUBLIC = [*house.public_objects_of_extensions(*MODULES)]


def test_public_names_are_documented_and_have_an_example():
    check_public_names_are_documented(PUBLIC)
    check_public_names_have_an_example(PUBLIC, 50)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.rows(len(MODULES))
def test_the_reference_says_which_names_are_of_extensions(module):
    """In one paragraph or list, which says so."""
    parts = re.split(r"\n\n(?!- )", module.__doc__)
    (part,) = [part for part in parts if "of extensions" in part or "of an extension" in part]
    told = {name.rpartition(".")[2] for name in re.findall(r"`([\w.]+)`", part)}
    assert told - {"fs"} == house.names_of_extensions(module) <= set(module.__all__)


def test_every_capability_has_a_row_and_every_row_a_test():
    text = (ROOT / "tests/CAPABILITIES.md").read_text()
    assert list(breaches(text, set(public_names([*house.public_objects(fs), *PUBLIC])))) == []


def test_rooms_keep_their_budget():
    others = ["extensions", None]
    assert budget.breaches(budget.sizes(others), budget.rows(others), budget.limits()) == []


def test_faults_can_be_planted():
    for fault in IN_EXTENSIONS:
        check_planted(fault)
