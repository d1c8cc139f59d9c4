"""offload: where there is no accelerator it changes nothing."""

import torch

import fshard as fs
from tests.ranks import on_ranks
from tests.transforms.laws import told
from tests.trees import one_axis


def offloaded(strategy):
    return fs.compose(fs.offload("cpu"), strategy)


def test_without_an_accelerator_it_is_offload_to_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert fs.offload() == fs.offload("cpu") == fs.offload(torch.device("cpu"))


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
