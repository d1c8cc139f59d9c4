"""What the documents say of extensions is there."""

import re

import fshard as fs
from tests.test_guide import BY_NAME, FROM_FSDP2, FROM_JAX, dead_links, section, tables
from tests.test_migration import ROWS


def test_the_guide_names_the_calls_of_the_migration_test():
    (head, *found), *_ = tables(section(FROM_FSDP2, "From FSDP2"))
    assert head == ["FSDP2", "fshard"]
    assert [row for row in ([call, row.equivalent] for call, row in ROWS.items()) if row not in found] == []


def test_the_guide_names_what_there_is():
    names = set(re.findall(r"fs\.(\w+)", section(FROM_JAX, "From JAX and Optax")))
    assert names
    assert {name for name in names if not hasattr(fs, name)} == set()


@BY_NAME
def test_links_lead_somewhere(document):
    assert list(dead_links(document)) == []
