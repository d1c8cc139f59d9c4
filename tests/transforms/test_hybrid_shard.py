"""hybrid_shard and hsdp: sharded inside a node, replicated across nodes."""

import math

import pytest
import torch

import fshard as fs
from tests.ranks import on_ranks
from tests.transforms.laws import squares, told
from tests.trees import normal, two_axes


@on_ranks(4)
def test_it_is_a_composition():
    mesh = two_axes(4)
    parts = fs.replicate(mesh["replicate"]), fs.fully_shard(mesh["shard"], dim=1, min_shard_elements=3)
    assert fs.hybrid_shard(mesh, dim=1, min_shard_elements=3) == fs.compose(*parts)
    spec = fs.shard({"w": torch.ones(4, 8)}, fs.hsdp(mesh, min_shard_elements=0, prefetch=3))["w"].spec
    assert spec.partition == fs.P("shard")
    assert [axis.name for axis in spec.axes] == ["shard", "replicate"]
    assert spec.reshard.prefetch == 3
    assert fs.hsdp(mesh) == fs.zero3(mesh, layout=fs.hybrid_shard(mesh, min_shard_elements=1024))


@on_ranks(2, 4, 8)
def test_only_a_node_is_gathered_over_and_nodes_sum_pieces(world_size):
    """In full tensors of n bytes: an all-gather and a reduce-scatter of n inside, and a sum of n / inner across."""
    draw = normal()
    full = {"w": draw(67, 65), "v": draw(257, 129)}
    mesh = two_axes(world_size)
    inner = mesh["shard"].size()
    params = fs.shard(full, fs.hybrid_shard(mesh))
    n = sum(math.prod(leaf.spec.padded_shape) * 8 for leaf in params.values())
    with fs.comm.record() as record:
        fs.gather(params)
    gathered, sent = told(record), record.bytes_sent()
    with fs.comm.record() as record:
        fs.scatter_grads(full, like=params)
    scattered = told(record)
    with fs.comm.record() as record:
        fs.value_and_grad(lambda p: sum(x.sum() for x in fs.gather(p).values()))(params)
    if inner == 1:
        assert (gathered, sent) == ([], 0)
        assert [entry[:3] for entry in scattered] == [("all_reduce", "replicate", "scatter")]
        return
    assert gathered == [("all_gather", "shard", "gather", 2, n)]
    assert sent == n * (inner - 1) / inner
    assert scattered[0] == ("reduce_scatter", "shard", "scatter", 2, n)
    # Two nodes exchange their pieces whole.
    assert {entry[:3] for entry in scattered[1:]} == {("all_reduce", "replicate", "scatter")}
    assert sum(entry[-1] for entry in scattered[1:]) == n // inner
    # A step moves 2n (inner - 1) / inner inside a node and 2 (n / inner) / 2 across the two of them.
    assert record.bytes_sent() == 2 * n * (inner - 1) / inner + n / inner


@on_ranks(1)
def test_one_rank_communicates_nothing():
    params = fs.shard({"float64": torch.ones(5, 3, dtype=torch.float64)}, fs.hsdp(two_axes(1)))
    with fs.comm.record() as record:
        fs.value_and_grad(squares)(params)
        full = fs.gather(params)
        fs.scatter_grads(full, like=params)
    assert list(record) == []
    assert full["float64"].data_ptr() == params["float64"].local.data_ptr()


def test_a_layout_says_all_that_is_to_be_said_of_it():
    mesh = fs.init_mesh({"replicate": 1, "shard": -1}, device="cpu")
    layout = fs.fully_shard(mesh["shard"])
    with pytest.raises(TypeError, match="got multiple values for keyword argument 'layout'"):
        fs.hsdp(mesh, layout=layout)
    with pytest.raises(ValueError, match=r"^zero3: expected min_shard_elements or layout, got both; "):
        fs.zero3(mesh, layout=layout, min_shard_elements=3)


@on_ranks(4)
def test_a_gather_is_under_way_once_it_has_started():
    """Not first where it is waited for, or nothing would be gathered ahead."""
    params = fs.shard({"w": torch.ones(8, 512)}, fs.hsdp(two_axes(4), min_shard_elements=0))
    leaf = params["w"]
    with fs.comm.record() as record:
        finish = leaf.spec.transform.start_gather([leaf.local], [leaf.spec])
        started = len(record)
        finish()
    assert (started, len(record)) == (1, 1)
