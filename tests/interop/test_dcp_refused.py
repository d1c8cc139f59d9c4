"""torch.distributed.checkpoint itself does not know Sharded leaves: it is told so before it writes anything."""

import io
import os
import pickle
import re

import pytest
import torch
from torch.distributed import checkpoint as dcp

import fshard as fs
from tests.checkpoint.states import refused
from tests.interop.test_state_dict import every_leaf
from tests.ranks import on_ranks
from tests.trees import assert_same_bits, normal, one_axis

LEAF = "Sharded(float64[4, 2], P('shard'), local [2, 2])"


def leaves():
    return fs.shard({"w": normal()(4, 2)}, every_leaf(one_axis()))


def trained():
    return fs.TrainState.create(leaves(), fs.sgd(0.1))


# What a user may hand over, and the name of the leaf that is refused.
STATES = {
    "a tree": (lambda: {"m": leaves()}, "m.w"),
    "a leaf": (leaves, "w"),
    "beside a tensor in a list": (lambda: {"m": [torch.ones(2), leaves()["w"]]}, "m.1"),
    "a train state": (lambda: {"s": trained()}, "s.params['w']"),
}


@pytest.mark.parametrize("save", [dcp.save, lambda *a, **k: dcp.async_save(*a, **k).result()], ids=["now", "later"])
@pytest.mark.parametrize("name", STATES)
@on_ranks("2 processes")
def test_leaves_are_refused_before_anything_is_written(tmp_path, name, save):
    make, path = STATES[name]
    text = refused(lambda: save(make(), checkpoint_id=tmp_path / "there"), dcp.api.CheckpointException)
    needed = (
        "ValueError: torch.distributed.checkpoint.save: shards of all ranks but one would be lost\n"
        f"  {path}: expected tensors or DTensors, got {LEAF}\n"
        "To fix: pass fs.to_dtensor(params, mesh), or use fs.checkpoint.save or fs.checkpoint.save_dcp.\n"
    )
    assert text.count(needed) == 2
    assert os.listdir(tmp_path) == []


def test_a_train_state_without_shards_is_saved(tmp_path):
    one_axis()
    state = fs.TrainState.create({"w": torch.ones(3)}, fs.sgd(0.1))
    dcp.save({"s": state, "n": 3}, checkpoint_id=tmp_path)
    assert set(dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata) == {"s", "n"}


@on_ranks("2 processes")
def test_leaves_are_not_loaded_into(tmp_path):
    """By torch's own error, which names the leaf on every rank; it has no hook for another."""
    params = leaves()
    dcp.save({"m": fs.to_dtensor(params, one_axis())}, checkpoint_id=tmp_path)
    text = refused(lambda: dcp.load({"m": dict(params)}, checkpoint_id=tmp_path), dcp.api.CheckpointException)
    assert len(re.findall("ValueError: Invalid checkpoint metadata for m.w,", text)) == 2


def test_leaves_are_pickled_as_ever():
    leaf = leaves()["w"]
    file = io.BytesIO()
    torch.save(leaf, file)
    file.seek(0)
    for back in (torch.load(file, weights_only=False), pickle.loads(pickle.dumps(leaf))):
        assert (type(back), back.spec) == (fs.Sharded, leaf.spec)
        assert_same_bits(back.local, leaf.local)
