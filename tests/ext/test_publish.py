"""publish and receive: the bits of a gathered leaf in another layout, each byte once, and ranks that are lost."""

import os
import re
import signal
import threading
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import fshard as fs
from fshard.ext import publish as module
from fshard.testing import Workers
from tests.faults import Outcome, axis_of_all, outcome, outcomes_of_survivors
from tests.ranks import my_rank, on_ranks
from tests.trees import assert_same_bits, normal

TRAINERS, STEPS = (0, 1), 100
FULL = {"blocks": [{"w": normal(n)(6, 6), "b": normal(n + 9)(5)} for n in range(3)], "scale": normal(7)()}
LAYOUTS = {
    "replicas": lambda mesh: fs.replicate(mesh),
    "rows": lambda mesh: fs.masked(fs.split_dim(mesh, dim=0), "*.w", otherwise=fs.replicate(mesh)),
    "columns": lambda mesh: fs.masked(fs.split_dim(mesh, dim=1), "*.w", otherwise=fs.replicate(mesh)),
}


def mesh_of(*ranks):
    """Every rank makes the meshes of all ranks in one order."""
    return DeviceMesh("cpu", ranks, mesh_dim_names=("shard",))


def renamed(name):
    return f"model.{name}"


def trained(n):
    return fs.tree_map(lambda leaf: leaf + n / 7, FULL)


def trainer(mesh, samplers, strategy, steps):
    for n in range(steps):
        params = fs.shard(trained(n), strategy(mesh))
        fs.publish(params, samplers, version=n, names=renamed)
    # The mesh of trainers is good.
    assert fs.psum(torch.ones(()), fs.axis_of(mesh)) == len(TRAINERS)


def sampler(mesh, layout, steps, dtype=torch.bfloat16):
    like = fs.shard({"model": fs.tree_map(lambda leaf: (0 * leaf).to(dtype), FULL)}, layout(mesh))
    for n in range(steps):
        received, version = fs.receive(like, TRAINERS)
        assert version == n
        expected = fs.shard({"model": fs.tree_map(lambda leaf: leaf.to(dtype), trained(n))}, layout(mesh))
        for a, b, spec in zip(fs.tree_leaves(received), fs.tree_leaves(expected), fs.tree_leaves(like), strict=True):
            assert torch.equal(a, b)
            assert a.dtype is spec.dtype


def sent_bytes(monkeypatch):
    """Count the bytes of weights that this rank sends."""
    sizes = []
    send = dist.isend

    def count_and_send(tensor, rank, tag):
        sizes.append(0 if tag >= module.LENGTH else tensor.nbytes)
        return send(tensor, rank, tag=tag)

    monkeypatch.setattr(dist, "isend", count_and_send)
    return sizes


@pytest.mark.rows(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("number", (1, 2, 3))
@on_ranks("5 processes")
def test_samplers_get_the_bits_that_trainers_gather_and_each_byte_once(number, layout):
    samplers = tuple(range(2, 2 + number))
    ours, theirs = mesh_of(*TRAINERS), mesh_of(*samplers)
    steps = STEPS if (number, layout) == (2, "rows") else 3
    with pytest.MonkeyPatch.context() as patched:
        sent = sent_bytes(patched)
        if dist.get_rank() in TRAINERS:
            trainer(ours, samplers, partial(fs.zero3, min_shard_elements=0), steps)
        elif dist.get_rank() in samplers:
            sampler(theirs, LAYOUTS[layout], steps)
        totals = [None] * dist.get_world_size()
        dist.all_gather_object(totals, sum(sent))
    # In bfloat16: the matrices once, or for each replica; what is not split for each sampler.
    matrices, others = 3 * 6 * 6, 3 * 5 + 1
    owned = 2 * (matrices * (number if layout == "replicas" else 1) + others * number)
    assert sum(totals) == steps * owned


@on_ranks("3 processes")
def test_other_leaves_are_refused_on_both_sides_and_trainers_go_on():
    ours = mesh_of(*TRAINERS)
    if dist.get_rank() in TRAINERS:
        params = fs.shard({"w": torch.ones(4, 2)}, fs.zero3(ours, min_shard_elements=0))
        with pytest.raises(ValueError, match="publish: names gives several leaves one name; change it"):
            fs.publish({**params, "v": params["w"]}, [2], names=lambda name: "same")
        for _ in range(3):
            with pytest.raises(fs.comm.CollectiveError, match=r"rank 2: it refused, and its own error says why"):
                fs.publish(params, [2])
        fs.publish(params, [2], version=3)
        return
    for like, text in (
        ({"v": torch.ones(4, 2)}, r"v: is none of the leaves that are published"),
        ({"w": torch.ones(4, 1)}, r"w: expected float32\[4, 1\], got float32\[4, 2\]"),
        ({"w": torch.ones(4, 2, dtype=torch.int32)}, r"w: expected int32\[4, 2\], got float32\[4, 2\]"),
    ):
        with pytest.raises(ValueError, match=text):
            fs.receive(like, TRAINERS)
    received, version = fs.receive({"w": torch.zeros(4, 2)}, TRAINERS)
    assert (received["w"].tolist(), version) == (torch.ones(4, 2).tolist(), 3)


@on_ranks("3 processes")
def test_a_whole_train_state_is_sent_and_its_leaves_that_are_none_stay_none():
    ours, theirs = mesh_of(*TRAINERS), mesh_of(2)
    tx = fs.sgd(0.1, momentum=0.9)
    full = {"w": normal(3)(4, 2), "b": normal(4)(3)}

    def state_on(mesh, scale):
        params = fs.shard(
            fs.tree_map(lambda leaf: scale * leaf, full), fs.zero3(mesh, min_shard_elements=0), frozen="b"
        )
        state = fs.TrainState.create(params, tx, key=int(scale))
        grads = fs.tree_map(lambda leaf: 2 * leaf, {**params, "b": None})
        return fs.update(tx, state, grads)

    if dist.get_rank() in TRAINERS:
        with pytest.raises(
            ValueError, match=r"^publish: leaves are no tensors\n  \['n'\]: expected a tensor, a Sharded "
        ):
            fs.publish({"n": 3}, [2])
        fs.publish(state_on(ours, 3.0), [2])
        return
    with pytest.raises(ValueError, match=r"^receive: leaves are no tensors\n  \['n'\]: expected a tensor, a Sharded "):
        fs.receive({"n": 3}, TRAINERS)
    received, _ = fs.receive(state_on(theirs, 0.0), TRAINERS)
    expected = state_on(theirs, 3.0)
    assert (received.buffers, received.transform_state) == (None, None)
    assert_same_bits(fs.tree_leaves(received), fs.tree_leaves(expected))


def test_a_sampler_that_dies_is_named_and_the_others_get_the_weights(tmp_path, monkeypatch):
    def program():
        ours, rank = mesh_of(*TRAINERS), dist.get_rank()
        if rank == 3:
            os._exit(1)
        if rank == 2:
            return Outcome(f"{fs.receive({'w': torch.zeros(4, 2)}, TRAINERS)[0]['w'].sum().item()}", "", 0.0)
        params = fs.shard({"w": torch.ones(4, 2)}, fs.zero3(ours, min_shard_elements=0))
        with pytest.raises(fs.comm.CollectiveError) as caught:
            fs.publish(params, [2, 3], timeout=20.0)
        # The trainers' mesh is good.
        assert fs.psum(torch.ones(()), fs.axis_of(ours)).item() == len(TRAINERS)
        return Outcome(f"{caught.value}", "", 0.0)

    *trainers, sampled = outcomes_of_survivors(4, program, tmp_path, monkeypatch)
    for text in trainers:
        assert re.fullmatch(r"0.0\npublish: ranks on the other side are lost\n  rank 3: [^\n]+", text), text
    assert sampled == "0.0\n8.0"


def test_ctrl_c_is_heard_by_a_rank_that_waits_for_the_other_side():
    def program():
        axis_of_all()
        store = dist.distributed_c10d._get_default_store()
        if my_rank() == 0:
            store.wait(["the sampler has ended"])
            return None
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        ending = outcome(lambda: fs.receive({"w": torch.ones(2)}, [0]))
        store.set("the sampler has ended", "")
        return ending.error

    with Workers(2) as pool:
        assert pool.run(program, timeout=40.0) == [None, "KeyboardInterrupt"]
