"""Ranks that hold other values of one part are refused; a leaf with a row for each of them is the way to keep both."""

import pytest
import torch

import fshard as fs
from fshard import checkpoint
from fshard.testing import assert_trees_close
from tests.checkpoint.test_refused import refused_everywhere
from tests.ranks import on_ranks
from tests.trees import normal

TX = fs.from_torch(torch.optim.AdamW, lr=0.1)
FULL = {"a": normal()(5, 3).float(), "b": normal(1)(3).float(), "c": normal(2)(4, 4).float()}


def grid(shard=2):
    return fs.init_mesh({"replica": -1, "shard": shard}, device="cpu")


def strategies(mesh):
    shard = mesh["shard"]
    return {
        "zero3": fs.zero3(shard, min_shard_elements=0),
        "zero3 with small leaves whole": fs.zero3(shard, min_shard_elements=8),
        "ddp": fs.ddp(shard),
    }


def trained(strategy, shard=2, rounds=1):
    """Local SGD: each replica trains by itself, on its own batch; no spec names the axis between them."""
    mesh = grid(shard)
    replica = fs.comm.rank(fs.axis_of(mesh, "replica"))
    state = fs.TrainState.create(fs.shard(FULL, strategies(mesh)[strategy]), TX)
    for _ in range(rounds):

        def loss(params):
            full = fs.gather(params)
            return (full["a"] - replica).square().sum() + (full["c"] - replica).square().sum() + full["b"].sum()

        state = fs.update(TX, state, fs.value_and_grad(loss)(state.params)[1])
    return state


REMEDY = "To fix: make them the same, buffers by fs.sync_buffers, or store a row of one leaf for each rank."


@pytest.mark.parametrize("strategy", ("zero3", "zero3 with small leaves whole", "ddp"))
@pytest.mark.parametrize("shard", (1, 2))
def test_a_save_is_refused(shard, strategy, tmp_path):
    text = refused_everywhere(lambda: checkpoint.save(tmp_path, trained(strategy, shard), step=1), 2 * shard)
    assert text.startswith("checkpoint.save: ranks hold different values of one leaf\n")
    assert text.endswith(REMEDY)
    for path in (".params['a']", ".params['c']"):
        assert f"{path}: expected the same on all ranks, got other values on rank {shard}" in text
    assert "['b']" not in text
    assert checkpoint.latest(tmp_path) is None


@on_ranks(4)
def test_replicas_that_agree_are_saved(tmp_path):
    for step, strategy in enumerate(strategies(grid())):
        state = trained(strategy, rounds=0)
        checkpoint.save(tmp_path, state, step=step)
        assert_trees_close(checkpoint.restore(tmp_path, like=state, step=step), state, exact=True)


def check_exports_are_refused(name, export, directory):
    text = refused_everywhere(lambda: export(directory, trained("zero3").params), 4)
    assert text.startswith(
        f"checkpoint.{name}: ranks hold different values of one leaf\n  a: expected the same on all ranks"
    )
    assert not directory.exists() or not list(directory.iterdir())


def test_exports_are_refused(tmp_path):
    check_exports_are_refused(
        "to_state_dict", lambda directory, params: checkpoint.to_state_dict(params), tmp_path / "out"
    )


@on_ranks(4)
def test_rows_of_one_leaf_keep_them(tmp_path):
    """The remedy: a leading dim over the axis of the replicas, taken off again after a restore."""

    def rows(leaf, axis):
        spec = leaf.spec
        over = fs.Spec((axis.size, *spec.shape), fs.P(axis.name, *spec.partition), (axis, *spec.axes))
        return fs.Sharded(leaf.local.unsqueeze(0), over)

    axis = fs.axis_of(grid(), "replica")
    for step, strategy in enumerate(strategies(grid())):
        params = trained(strategy).params
        stacked = {name: rows(leaf, axis) for name, leaf in params.items()}
        checkpoint.save(tmp_path, stacked, step=step)
        found = checkpoint.restore(tmp_path, like=stacked, step=step)
        own = {name: fs.Sharded(found[name].local[0], leaf.spec) for name, leaf in params.items()}
        assert_trees_close(own, params, exact=True)
        assert_trees_close(fs.unshard(found)["a"][fs.comm.rank(axis)], fs.unshard(params)["a"], exact=True)


@on_ranks(4)
def test_padding_may_differ(tmp_path):
    """It is no part of a leaf's values."""
    mesh = grid()
    params = fs.shard({"a": normal()(5, 3)}, strategies(mesh)["zero3"])
    replica = fs.comm.rank(fs.axis_of(mesh, "replica"))
    if fs.comm.rank(fs.axis_of(mesh, "shard")):
        params["a"].local[-1] = replica
    checkpoint.save(tmp_path, params, step=1)
    assert checkpoint.to_state_dict(params)["a"].equal(normal()(5, 3))
