"""Strategies size their messages by the kind of backend, and zero3 by what it is given."""

import pytest
import torch

import fshard as fs
from fshard import _compat
from tests.ranks import on_ranks
from tests.trees import one_axis

SIZES = {
    "host": ({"cpu": "gloo"}, 16 * 1024 * 1024),
    "accelerator": ({"cpu": "gloo", "cuda": "nccl"}, 48_000_000),
}


def policy(strategy):
    return fs.shard({"w": torch.ones(64, 64)}, strategy)["w"].spec.reshard


@pytest.fixture
def backends(kind, monkeypatch):
    monkeypatch.setattr(_compat, "group_devices", lambda name: SIZES[kind][0])


@pytest.mark.usefixtures("backends")
@pytest.mark.parametrize("kind", SIZES)
@on_ranks(2)
def test_messages_are_sized_by_the_kind_of_backend(kind):
    for strategy in (fs.ddp, fs.zero1, fs.zero2, fs.zero3):
        found = policy(strategy(one_axis()))
        assert found.merge_bytes == SIZES[kind][1]
    assert policy(fs.zero3(one_axis(), merge_bytes=7)).merge_bytes == 7
