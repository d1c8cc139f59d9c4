"""Strategies: how they lay leaves out, what they send, and that they size messages by the kind of backend."""

import math

import pytest
import torch

import fshard as fs
from fshard import _compat
from tests.ranks import on_ranks
from tests.transforms.laws import told
from tests.trees import assert_same_bits, normal, one_axis, two_axes

SIZES = {
    "host": ({"cpu": "gloo"}, 16 * 1024 * 1024),
    "accelerator": ({"cpu": "gloo", "cuda": "nccl"}, 48_000_000),
}


@pytest.mark.parametrize("kind", SIZES)
def test_messages_are_sized_by_the_kind_of_backend(kind, monkeypatch):
    monkeypatch.setattr(_compat, "group_devices", lambda name: SIZES[kind][0])

    def program():
        for strategy in (fs.ddp, fs.zero2, fs.zero3):
            assert strategy(one_axis()).reshard.merge_bytes == SIZES[kind][1]
        assert fs.zero3(one_axis(), merge_bytes=7).reshard.merge_bytes == 7

    fs.testing.spmd(program, 2)


@on_ranks(4)
def test_several_axes_split_a_dim_as_partitions_do():
    """The first is the major one."""
    mesh, full = two_axes(4), {"w": normal()(8, 6)}
    for make in (fs.zero1, fs.zero2, fs.zero3):
        leaf = fs.shard(full, make(mesh, axis=("shard", "replicate"), min_shard_elements=0))["w"]
        assert leaf.spec.partition == fs.P(("shard", "replicate"))
        place = 2 * fs.axis_index(fs.axis_of(mesh, "shard")) + fs.axis_index(fs.axis_of(mesh, "replicate"))
        assert_same_bits(leaf.local, full["w"].chunk(4)[place])


@on_ranks(4)
def test_hybrid_shard_is_a_composition():
    mesh = two_axes(4)
    parts = fs.replicate(mesh["replicate"]), fs.fully_shard(mesh["shard"], dim=1, min_shard_elements=3)
    assert fs.hybrid_shard(mesh, dim=1, min_shard_elements=3) == fs.compose(*parts)
    spec = fs.shard({"w": torch.ones(4, 8)}, fs.hsdp(mesh, min_shard_elements=0, prefetch=3))["w"].spec
    assert (spec.partition, [axis.name for axis in spec.axes]) == (fs.P("shard"), ["shard", "replicate"])
    assert spec.reshard.prefetch == 3
    assert fs.hsdp(mesh) == fs.zero3(mesh, layout=fs.hybrid_shard(mesh, min_shard_elements=1024))
    with pytest.raises(TypeError, match="got multiple values for keyword argument 'layout'"):
        fs.hsdp(mesh, layout=fs.fully_shard(mesh["shard"]))


@on_ranks(4, 8)
def test_only_a_node_is_gathered_over_and_nodes_sum_pieces(world_size):
    """In full tensors of n bytes: an all-gather and a reduce-scatter of n inside, and a sum of n / inner across."""
    draw, mesh, inner = normal(), two_axes(world_size), world_size // 2
    full = {"w": draw(67, 65), "v": draw(257, 129)}
    params = fs.shard(full, fs.hybrid_shard(mesh))
    n = sum(math.prod(leaf.spec.padded_shape) * 8 for leaf in params.values())
    with fs.comm.record() as record:
        fs.gather(params)
    assert told(record) == [("all_gather", "shard", "gather", 2, n)]
    assert record.bytes_sent() == n * (inner - 1) / inner
    with fs.comm.record() as record:
        fs.scatter_grads(full, like=params)
    first, *scattered = told(record)
    assert first == ("reduce_scatter", "shard", "scatter", 2, n)
    # Two nodes exchange their pieces whole.
    assert {entry[:3] for entry in scattered} == {("all_reduce", "replicate", "scatter")}
    assert sum(entry[-1] for entry in scattered) == n // inner
    with fs.comm.record() as record:
        fs.value_and_grad(lambda p: sum(x.sum() for x in fs.gather(p).values()))(params)
    # A step moves 2n (inner - 1) / inner inside a node and 2 (n / inner) / 2 across the two of them.
    assert record.bytes_sent() == 2 * n * (inner - 1) / inner + n / inner


@on_ranks(4)
def test_a_gather_is_under_way_once_it_has_started():
    """Not first where it is waited for, or nothing would be gathered ahead."""
    leaf = fs.shard({"w": torch.ones(8, 512)}, fs.hsdp(two_axes(4), min_shard_elements=0))["w"]
    with fs.comm.record() as record:
        finish = leaf.spec.transform.start_gather([leaf.local], [leaf.spec])
        started = len(record)
        finish()
    assert (started, len(record)) == (1, 1)


@on_ranks(2)
def test_offload_to_the_processor_sends_what_the_strategy_sends():
    records = []
    for transform in (fs.zero3(one_axis()), fs.compose(fs.offload("cpu"), fs.zero3(one_axis()))):
        params = fs.shard({"w": torch.ones(67, 65)}, transform)
        with fs.comm.record() as record:
            fs.value_and_grad(lambda p: fs.gather(p)["w"].sum())(params)
        records.append(told(record))
    assert records[0] == records[1] != []


def test_without_an_accelerator_offload_is_to_the_processor(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert fs.offload() == fs.offload("cpu") == fs.offload(torch.device("cpu"))
