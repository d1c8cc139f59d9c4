"""independent: local SGD, replicas of other values in one tree, that nothing takes for one value."""

import re

import pytest
import torch

import fshard as fs
from fshard import checkpoint
from fshard.interop.state_dict import to_state_dict
from fshard.testing import assert_trees_close
from tests.ranks import on_ranks
from tests.trees import assert_same_bits, normal

STEPS, ROWS = 3, 8
TX = fs.adamw(0.01, eps=1e-3)


def initial():
    return {"w": normal(1)(5, 6), "b": normal(2)(6), "scale": normal(3)()}


def data(step):
    return normal(10 + step)(ROWS, 5)


def loss_fn(params, x):
    p = fs.gather(params)
    return (torch.tanh(x @ p["w"] + p["b"]) * p["scale"] - x.sum(1, keepdim=True)).square().mean()


def local_sgd(replicas):
    """One process that trains all replicas."""
    found = []
    for number in range(replicas):
        state = fs.TrainState.create(initial(), TX)
        for step in range(STEPS):
            grads = torch.func.grad(loss_fn)(state.params, data(step).chunk(replicas)[number])
            state = fs.update(TX, state, grads)
        found.append(state.params)
    return [
        fs.tree_map(lambda *leaves: torch.stack(leaves), *found),
        fs.tree_map(lambda *leaves: sum(leaves) / replicas, *found),
    ]


STRATEGIES = {"zero3": lambda mesh: fs.zero3(mesh, min_shard_elements=0), "ddp": fs.ddp}


def trained(make, replicas=2, jit=lambda step: step):
    mesh = fs.init_mesh({"replica": replicas, "shard": -1}, device="cpu")
    replica, shard = fs.axis_of(mesh, "replica"), fs.axis_of(mesh, "shard")
    state = fs.TrainState.create(fs.shard(initial(), fs.compose(make(mesh), fs.independent(mesh["replica"]))), TX)
    place = fs.comm.rank(replica) * shard.size + fs.comm.rank(shard)
    train_step = jit(lambda state, x: fs.update(TX, state, fs.value_and_grad(loss_fn)(state.params, x)[1]))
    for step in range(STEPS):
        state = train_step(state, data(step).chunk(replica.size * shard.size)[place])
    return replica, state


@on_ranks(2, 4)
def test_replicas_train_by_themselves(world_size):
    stacked, mean = local_sgd(2)
    for make in STRATEGIES.values():
        with fs.comm.record() as record:
            replica, state = trained(make)
        if world_size == 2:
            assert_same_bits(fs.tree_leaves(trained(make, jit=fs.jit)[1]), fs.tree_leaves(state))
        assert {entry.axis for entry in record if not entry.scalar and entry.label != "shard"} <= {"shard"}
        spec = state.params["w"].spec
        assert (spec.roles[replica], spec.independent) == ("independent", (replica,))
        assert_trees_close(fs.unshard(state.params, stack=True), stacked, rtol=0, atol=1e-12)
        averaged = fs.pmean(state.params, replica)
        assert_trees_close(
            fs.unshard(averaged, stack=True), fs.tree_map(lambda x: torch.stack([x, x]), mean), rtol=0, atol=1e-12
        )


@on_ranks(4)
def test_a_checkpoint_keeps_each_ranks_values_for_the_same_size(tmp_path):
    _, state = trained(STRATEGIES["zero3"])
    checkpoint.save(tmp_path, state)
    blank = fs.tree_map(torch.zeros_like, state)
    assert_same_bits(fs.tree_leaves(checkpoint.restore(tmp_path, blank)), fs.tree_leaves(state))
    mesh = fs.init_mesh({"replica": 2, "shard": -1}, device="cpu")
    other = fs.compose(fs.ddp(mesh), fs.independent(mesh["replica"]))
    moved = checkpoint.restore(tmp_path, fs.shard(initial(), other), subtree=".params")
    assert_same_bits(fs.unshard(moved, stack=True), fs.unshard(state.params, stack=True))
    line = fs.init_mesh({"replica": -1}, device="cpu")
    like = fs.shard(initial(), fs.independent(line["replica"]))
    with pytest.raises(ValueError, match=re.escape("expected float64[4, 6], got float64[2, 6]")):
        checkpoint.restore(tmp_path, like, subtree=".params")


@on_ranks(2)
def test_nothing_takes_them_for_one_value():
    _, state = trained(STRATEGIES["ddp"])
    mesh = fs.init_mesh({"replica": 2, "shard": -1}, device="cpu")
    own = "\n  ['b']: expected one value, got a value of each rank's own over ['replica']\n"
    for call, text in (
        (lambda: fs.unshard(state.params), f"unshard: ranks hold different values{own}"),
        (lambda: fs.reshard(state.params, fs.ddp(mesh)), f"reshard: ranks hold different values{own}"),
        (lambda: to_state_dict(state.params), f"to_state_dict: ranks hold different values{own}"),
        (lambda: fs.to_dtensor(state.params, mesh), "values of each rank's own over replica=2"),
        (
            lambda: fs.value_and_grad(loss_fn, reduce_over=("shard", "replica"))(state.params, data(0)),
            "expected a transform that sums gradients over ['replica'], or owns pieces there",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            call()


@on_ranks(2)
def test_specs_are_compared_and_values_are_not():
    mesh = fs.init_mesh({"replica": 2, "shard": -1}, device="cpu")
    rank = fs.comm.rank(fs.axis_of(mesh, "replica"))
    strategy = fs.compose(fs.ddp(mesh), fs.independent(mesh["replica"]))
    full = fs.tree_map(lambda leaf: leaf + rank, initial())
    stacked = fs.unshard(fs.shard(full, strategy), stack=True)
    assert_same_bits(stacked["w"], torch.stack([initial()["w"], initial()["w"] + 1]))
    full["w"] = full["w"][: 5 - rank]
    with pytest.raises(ValueError, match="shard: ranks hold different trees"):
        fs.shard(full, strategy)
