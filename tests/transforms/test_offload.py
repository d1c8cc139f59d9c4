"""offload: where there is no accelerator it changes nothing, and says so."""

import warnings

import pytest
import torch

import fshard as fs
from tests.bad_input import assert_all_refused
from tests.ranks import on_ranks
from tests.test_bad_setup import setup
from tests.transforms.laws import told
from tests.trees import one_axis

WARNING = "offload: this machine has no accelerator, so parameters are in CPU memory anyway and nothing is moved"


def offloaded(strategy):
    return fs.compose(fs.offload("cpu"), strategy)


def test_it_warns_once_and_is_offload_to_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.warns(UserWarning, match="no accelerator") as caught:
        found = fs.offload()
    assert [str(warning.message) for warning in caught] == [WARNING]
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found == fs.offload("cpu") == fs.offload(torch.device("cpu"))


@on_ranks(1, 2)
def test_it_sends_what_the_strategy_sends_and_copies_nothing(world_size):
    full = {"w": torch.ones(67, 65)}
    plain = fs.zero3(one_axis())
    records = []
    for transform in (plain, offloaded(plain)):
        params = fs.shard(full, transform)
        assert params["w"].local.device == torch.device("cpu")
        with fs.comm.record() as record:
            fs.value_and_grad(lambda p: fs.gather(p)["w"].sum())(params)
        records.append(told(record))
        if world_size == 1:
            assert fs.gather(params)["w"].data_ptr() == params["w"].local.data_ptr()
    assert records[0] == records[1]
    assert bool(records[0]) == (world_size > 1)


BEHIND = "compose: expected offload first, as it says where shards are stored, got it behind others"
DEVICE = 'offload: expected device to be a device such as "cuda", or None, got {}'
BAD = [
    setup("after a strategy", fs.compose, BEHIND, lambda world: world.zero2, fs.offload("cpu")),
    setup("after a cast", fs.compose, BEHIND, fs.cast(gather=torch.bfloat16), fs.offload("cpu")),
    setup("twice", fs.compose, BEHIND, fs.offload("cpu"), fs.offload("cpu")),
    setup(
        "within zero3, after its cast",
        lambda mesh: fs.zero3(
            mesh, param_dtype=torch.bfloat16, layout=fs.compose(fs.offload("cpu"), fs.fully_shard(mesh))
        ),
        BEHIND,
        lambda world: world.mesh,
    ),
    setup(
        "within a mask",
        lambda mesh: fs.compose(fs.cast(gather=torch.bfloat16), fs.masked(offloaded(fs.ddp(mesh)), "a", fs.ddp(mesh))),
        BEHIND,
        lambda world: world.mesh,
    ),
    setup("no such device", fs.offload, DEVICE.format("'tpv'"), "tpv"),
    setup("no device", fs.offload, DEVICE.format("2.5"), 2.5),
]


def test_bad_arguments_are_refused():
    assert_all_refused(BAD)
