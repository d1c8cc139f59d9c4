"""What the documents say of extensions is there."""

import re

import fshard as fs
from tests.ext.interop import test_migration
from tests.test_guide import BY_NAME, MIGRATION, dead_links, section, tables
from tests.test_migration import ROWS


def test_guide_and_migration_test_name_the_same_calls():
    (head, *found), *_ = tables(section(MIGRATION, "From FSDP2"))
    assert head == ["FSDP2", "fshard"]
    rows = ROWS | test_migration.ROWS
    assert sorted(found) == sorted([call, row.equivalent] for call, row in rows.items())


def test_the_guide_names_what_there_is():
    names = set(re.findall(r"fs\.(\w+)", section(MIGRATION, "From JAX and Optax")))
    assert names
    assert {name for name in names if not hasattr(fs, name)} == set()


@BY_NAME
def test_links_lead_somewhere(document):
    assert list(dead_links(document)) == []
