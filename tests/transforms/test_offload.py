"""offload: where there is no accelerator it changes nothing, and says so."""

import warnings

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.testing import spmd
from tests.bad_input import assert_all_refused
from tests.test_bad_setup import setup
from tests.transforms.laws import assert_laws, gradients, told, trained
from tests.trees import assert_same_bits, one_axis
from tests.unit_models import Block, Language, assert_one_process, filled, tokens

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


@pytest.mark.rows(1)
@pytest.mark.parametrize("world_size", (1, 2, 3, 4))
def test_laws_and_gradients_and_training(world_size):
    def program():
        for plain in (fs.fully_shard(one_axis()), fs.zero3(one_axis(), min_shard_elements=6)):
            assert_laws(offloaded(plain))
            assert_same_bits(gradients(offloaded(plain)), gradients(plain))
        assert_same_bits(trained(offloaded(plain)), trained(plain))

    spmd(program, world_size)


def test_processes(workers):
    def program():
        plain = fs.zero3(one_axis(), min_shard_elements=6)
        assert_same_bits(trained(offloaded(plain)), trained(plain))

    spmd(program, workers(2))


@pytest.mark.parametrize("world_size", (1, 2))
def test_modules_with_units(world_size):
    strategies = {"zero3": lambda mesh: offloaded(fs.zero3(mesh, min_shard_elements=0, merge_bytes=0))}
    assert_one_process(filled(Language(hidden=(13, 11))), tokens(world_size), (Block, nn.Linear), strategies)


@pytest.mark.parametrize("world_size", (1, 2))
def test_it_sends_what_the_strategy_sends_and_copies_nothing(world_size):
    full = {"w": torch.ones(67, 65)}

    def program():
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

    spmd(program, world_size)


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
