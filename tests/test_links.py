"""Links: what messages over an axis cost, and how strategies size theirs by it."""

from functools import partial

import pytest
import torch

import fshard as fs
from tests.bad_input import Row, assert_all_refused
from tests.ranks import on_ranks
from tests.trees import one_axis, two_axes

SLOW = fs.Link(latency=5e-4, bandwidth=5e7)
LEAF = {"w": torch.ones(64, 64)}


@pytest.mark.parametrize("strategy", (fs.ddp, fs.zero1, fs.zero2, fs.zero3))
@on_ranks(1, 2)
def test_messages_take_sixteen_latencies(strategy):
    policy = fs.shard(LEAF, strategy(one_axis(), links={"shard": SLOW, "other": fs.Link(1.0, 1.0)}))["w"].spec.reshard
    assert policy.merge_bytes == SLOW.merge_bytes == 16 * 25_000
    assert policy.bucket_bytes == policy.merge_bytes // 4
    assert policy.ahead_bytes == policy.merge_bytes * 2


@on_ranks(4)
def test_two_axes_send_what_the_one_that_needs_larger_messages_does():
    links = {"shard": SLOW, "replicate": fs.Link(2e-3, 5e7)}
    sharded = fs.shard(LEAF, fs.hsdp(two_axes(4), links=links))["w"]
    assert sharded.spec.reshard.merge_bytes == links["replicate"].merge_bytes


@on_ranks(2)
def test_a_size_of_ones_own_goes_before_a_link():
    sharded = fs.shard(LEAF, fs.zero3(one_axis(), links={"shard": SLOW}, merge_bytes=7))["w"]
    assert sharded.spec.reshard.merge_bytes == 7


@on_ranks("2 processes")
def test_ranks_measure_the_same_links():
    mesh = fs.init_mesh({"replicate": 1, "shard": 2}, device="cpu")
    links = fs.measure(mesh)
    fs.zero3(mesh["shard"], links=links)
    assert set(links) == {"replicate", "shard"}
    assert all(0 < number < float("inf") for link in links.values() for number in link)
    return links


NEEDED = "{}: expected links to map 'shard' to a Link of positive numbers, got {}; pass fs.measure(mesh)"
FOUND = [
    (3, "an int"),
    ({"other": SLOW}, "None for 'shard'"),
    ({"shard": (1e-3, 1e9)}, "(0.001, 1000000000.0) for 'shard'"),
    ({"shard": fs.Link(0, 1e9)}, "Link(latency=0, bandwidth=1000000000.0) for 'shard'"),
    ({"shard": fs.Link(1e-3, float("nan"))}, "Link(latency=0.001, bandwidth=nan) for 'shard'"),
]
BAD = [
    Row(
        f"{strategy.__name__} with links {links!r}",
        lambda world: (world.mesh,),
        partial(strategy, links=links),
        NEEDED.format(strategy.__name__, found),
    )
    for strategy in (fs.ddp, fs.zero1, fs.zero2, fs.zero3)
    for links, found in FOUND
] + [
    Row(
        "zero3 with bad links beside merge_bytes",
        lambda world: (world.mesh,),
        partial(fs.zero3, links=3, merge_bytes=7),
        NEEDED.format("zero3", "an int"),
    ),
    Row(
        "measure without a mesh",
        lambda world: (None,),
        fs.measure,
        "measure: expected mesh to be a DeviceMesh, got None; make one by fs.init_mesh",
    ),
]


def test_bad_links_are_refused():
    assert_all_refused(BAD)
