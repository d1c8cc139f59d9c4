"""The README of communication names the fields and the keys of the store that are there."""

import dataclasses
import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import fshard as fs
from fshard import comm
from fshard.comm.groups import RankState
from tests.ranks import my_rank, on_ranks
from tests.test_guide import ROOT, tables
from tests.trees import one_axis

README = ROOT / "fshard/comm/README.md"
TEXT = README.read_text()
TABLES = {rows[0][0]: rows[1:] for rows in tables(TEXT)}
# Written only where a rank fails in init_mesh, or waits there for long; see test_meeting.py.
KEYS = ("note", "askers", "stand-ins", "read/<rank>", "answer/<rank>")
OF_FAILED_MEETINGS = {f"fshard/meeting <meeting>/{key}" for key in KEYS}


def test_every_field_has_its_writer():
    (heading,) = [heading for heading in TABLES if heading == "field of RankState"]
    named = {name for row in TABLES[heading] for name in row[0].split(", ") if "." not in name}
    assert named == {field.name for field in dataclasses.fields(RankState)}


def pattern_of(key: str) -> re.Pattern[str]:
    """The keys of the store that a row of the table means."""
    return re.compile(re.sub(r"<\w+>", ".+", re.escape(key).replace(r"\<", "<")))


@on_ranks("2 processes")
def test_every_key_of_the_store_is_there():
    """Those that a call leaves which fails on one rank, and the ranks' meeting after it."""
    axis = fs.axis_of(one_axis())
    params = fs.shard({"w": torch.ones(4)}, fs.fully_shard(axis, min_shard_elements=0))

    def loss(params):
        if my_rank() == 1:
            raise ArithmeticError
        return fs.gather(params)["w"].sum()

    with pytest.raises((ArithmeticError, comm.CollectiveError)):
        fs.value_and_grad(loss)(params)
    one_axis()
    # A group that init_mesh has not made is connected when it is first used.
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=("shard",))
    fs.psum(torch.ones(()), fs.axis_of(mesh))
    keys = {key for key in comm.rank_state().store.list_keys() if "fshard" in key}
    patterns = {row[0]: pattern_of(row[0]) for row in TABLES["key"]}
    assert {key for key in keys if not any(pattern.fullmatch(key) for pattern in patterns.values())} == set()
    unused = {name for name, pattern in patterns.items() if not any(map(pattern.fullmatch, keys))}
    assert unused == OF_FAILED_MEETINGS
