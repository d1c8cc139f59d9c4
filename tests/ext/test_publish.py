"""publish and receive: the bits of a gathered leaf in another layout, each byte once, and ranks that are lost."""

import os
import re
import signal
import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import fshard as fs
from fshard.ext import publish as module
from fshard.extend import Box
from fshard.testing import Workers
from tests.faults import Outcome, axis_of_all, outcome, outcomes_of_survivors
from tests.ranks import my_rank, on_ranks
from tests.trees import assert_same_bits, normal

TRAINERS = (0, 1)
FULL = {"blocks": [{"w": normal(n)(6, 6), "b": normal(n + 9)(5)} for n in range(3)], "scale": normal(7)()}
MATRICES, OTHERS = 3 * 6 * 6, 3 * 5 + 1
W = {"w": torch.ones(4, 2)}


def split(dim):
    return lambda mesh: fs.masked(fs.split_dim(mesh, dim=dim), "*.w", otherwise=fs.replicate(mesh))


LAYOUTS = {"replicas": fs.replicate, "rows": split(0), "columns": split(1)}


def mesh_of(*ranks):
    """Every rank makes the meshes of all ranks in one order."""
    return DeviceMesh("cpu", ranks, mesh_dim_names=("shard",))


def shard(full, mesh, **options):
    return fs.shard(full, fs.zero3(mesh, min_shard_elements=0), **options)


def trained(n):
    return fs.tree_map(lambda leaf: leaf + n / 7, FULL)


def be_trainer(mesh, samplers, steps):
    for n in range(steps):
        fs.publish(shard(trained(n), mesh), samplers, version=n, names="model.{}".format)
    # The mesh of trainers is good.
    assert fs.psum(torch.ones(()), fs.axis_of(mesh)) == len(TRAINERS)


def be_sampler(mesh, layout, steps):
    def layout_of(full):
        return fs.shard({"model": fs.tree_map(torch.Tensor.bfloat16, full)}, layout(mesh))

    like = layout_of(fs.tree_map(torch.zeros_like, FULL))
    for n in range(steps):
        received, version = fs.receive(like, TRAINERS)
        assert version == n
        assert_same_bits(fs.tree_leaves(received), fs.tree_leaves(layout_of(trained(n))))


def sent_bytes(monkeypatch):
    """Count the bytes of weights that this rank sends."""
    sizes = []
    send = dist.isend

    def count_and_send(tensor, rank, tag):
        sizes.append(0 if tag >= module.LENGTH else tensor.nbytes)
        return send(tensor, rank, tag=tag)

    monkeypatch.setattr(dist, "isend", count_and_send)
    return sizes


def test_ranks_that_are_no_list_are_refused():
    for ranks in (1, None, []):
        with pytest.raises(ValueError, match="publish: expected ranks to be a list of other ranks of this job"):
            fs.publish(W, ranks)


@on_ranks(2)
def test_leaves_without_values_are_refused_before_anything_is_sent():
    """Without them samplers would find other leaves than they ask for, and say nothing of the cause."""
    mesh, tx = fs.init_mesh({"shard": -1}, device="cpu"), fs.sgd(0.1)
    params = shard(W, mesh)
    fs.update(tx, fs.TrainState.create(params, tx), fs.tree_map(torch.ones_like, params), donate=True)
    abstract = fs.functionalize(torch.nn.Linear(2, 4)).init(fs.ddp(mesh), seed=0, abstract=True)
    for tree, text in ((params, "arguments were donated"), (abstract, "leaves are abstract")):
        with pytest.raises(ValueError, match=f"^publish: {text}"):
            fs.publish(tree, [1 - my_rank()])


@on_ranks("2 processes")
def test_messages_go_between_processors_whatever_the_default_device():
    with torch.device("meta"):
        if dist.get_rank() == 0:
            fs.publish(W, [1], version=3, timeout=5.0)
            return
        like = {"w": torch.zeros(4, 2, device="cpu")}
        received, version = fs.receive(like, [0], timeout=5.0)
    assert version == 3
    assert_same_bits(fs.tree_leaves(received), fs.tree_leaves(W))


@on_ranks("3 processes")
def test_trainers_without_some_of_the_leaves_send_the_others_in_the_order_of_the_sampler():
    full = {"a": normal(1)(4), "b": normal(2)(5), "c": normal(3)(6)}
    absent = ("b", "a")
    names = {"a": "z", "b": "y", "c": "x"}
    with pytest.MonkeyPatch.context() as patched:
        # A message at a time.
        patched.setattr(module, "UNIT_BYTES", 1)
        if dist.get_rank() in TRAINERS:
            params = {**full, absent[dist.get_rank()]: None}
            fs.publish(params, [2], names=names.__getitem__, timeout=5.0)
            return
        expected = {names[name]: leaf for name, leaf in full.items()}
        received, _ = fs.receive(fs.tree_map(torch.zeros_like, expected), TRAINERS, timeout=5.0)
    assert_same_bits(fs.tree_leaves(received), fs.tree_leaves(expected))


@pytest.mark.rows(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("number", (1, 2, 3))
@on_ranks("5 processes")
def test_samplers_get_the_bits_that_trainers_gather_and_each_byte_once(number, layout):
    samplers = tuple(range(2, 2 + number))
    ours, theirs = mesh_of(*TRAINERS), mesh_of(*samplers)
    steps = 3
    with pytest.MonkeyPatch.context() as patched:
        sent = sent_bytes(patched)
        if my_rank() in TRAINERS:
            be_trainer(ours, samplers, steps)
        elif my_rank() in samplers:
            be_sampler(theirs, LAYOUTS[layout], steps)
        totals = [None] * dist.get_world_size()
        dist.all_gather_object(totals, sum(sent))
    # In bfloat16: the matrices once, or for each replica; what is not split for each sampler.
    copies = number if layout == "replicas" else 1
    assert sum(totals) == steps * 2 * (MATRICES * copies + OTHERS * number)


@on_ranks("3 processes")
def test_other_leaves_are_refused_on_both_sides_and_trainers_go_on():
    ours = mesh_of(*TRAINERS)
    no_tensor = r"leaves are no tensors\n  \['n'\]: expected a Sharded leaf or a tensor, got an int"
    if my_rank() in TRAINERS:
        params = shard(W, ours)
        with pytest.raises(ValueError, match=f"^publish: {no_tensor}"):
            fs.publish({"n": 3}, [2])
        with pytest.raises(ValueError, match="publish: names gives several leaves one name, 'same'; change it"):
            fs.publish({**params, "v": params["w"]}, [2], names=lambda name: "same")
        # The last two times with versions that differ, and without the other trainer.
        for version in (0, 0, 0, my_rank(), 0)[: 5 - my_rank()]:
            with pytest.raises(fs.comm.CollectiveError, match=r"rank 2: it refused, and its own error says why"):
                fs.publish(params, [2], version=version)
        fs.publish(params, [2], version=3)
        return
    for like, text in (
        ({"n": 3}, f"^receive: {no_tensor}"),
        ({"v": torch.ones(4, 2)}, r"v: is none of the leaves that are published"),
        ({"w": torch.ones(4, 1)}, r"w: expected float32\[4, 1\], got float32\[4, 2\]"),
        ({"w": torch.ones(4, 2, dtype=torch.int32)}, r"w: expected int32\[4, 2\], got float32\[4, 2\]"),
    ):
        with pytest.raises(ValueError, match=text):
            fs.receive(like, TRAINERS)
    with pytest.raises(fs.comm.CollectiveError, match=r"^receive: trainers publish different versions, \[0, 1\]$"):
        fs.receive(W, TRAINERS)
    with pytest.raises(ValueError, match="w: is only in part on the ranks that publish it"):
        fs.receive(W, TRAINERS[:1])
    received, version = fs.receive({"w": torch.zeros(4, 2)}, TRAINERS)
    assert (received["w"].tolist(), version) == (W["w"].tolist(), 3)


@on_ranks("2 processes")
def test_boxes_that_are_apart_in_two_dims_share_no_element():
    corners = [module.LeafBox("w", "float32", (3, 3), Box((place, place), (1, 1))) for place in (0, 2)]
    parts = {"w": module.LeafPart(corners[0], torch.zeros(1, 1))}
    requests, problems = module._schedule(parts, {0: corners[1:]})
    assert requests == {0: []}
    assert [problem.got for problem in problems] == ["is only in part on the ranks that publish it"]


@on_ranks("3 processes")
def test_a_whole_train_state_is_sent_and_its_leaves_that_are_none_stay_none():
    ours, theirs = mesh_of(*TRAINERS), mesh_of(2)
    tx = fs.sgd(0.1, momentum=0.9)

    def state_on(mesh, scale):
        params = shard({"w": scale * normal(3)(4, 2), "b": scale * normal(4)(3)}, mesh, frozen="b")
        state = fs.TrainState.create(params, tx, key=int(scale))
        return fs.update(tx, state, fs.tree_map(lambda leaf: 2 * leaf, {**params, "b": None}))

    if my_rank() in TRAINERS:
        fs.publish(state_on(ours, 3.0), [2])
        return
    received, _ = fs.receive(state_on(theirs, 0.0), TRAINERS)
    assert (received.buffers, received.transform_state) == (None, None)
    assert_same_bits(fs.tree_leaves(received), fs.tree_leaves(state_on(theirs, 3.0)))


def test_a_sampler_that_dies_is_named_and_the_others_get_the_weights(tmp_path, monkeypatch):
    def program():
        ours = mesh_of(*TRAINERS)
        if my_rank() == 3:
            os._exit(1)
        if my_rank() == 2:
            received, _ = fs.receive({"w": torch.zeros(4, 2)}, TRAINERS)
            return Outcome(str(received["w"].sum().item()), "", 0.0)
        with pytest.raises(fs.comm.CollectiveError) as caught:
            fs.publish(shard(W, ours), [2, 3], timeout=20.0)
        # The trainers' mesh is good.
        assert fs.psum(torch.ones(()), fs.axis_of(ours)).item() == len(TRAINERS)
        return Outcome(str(caught.value), "", 0.0)

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
