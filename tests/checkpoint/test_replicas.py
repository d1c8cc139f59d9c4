"""Ranks that hold other values of one part are refused; a leaf with a row for each of them is the way to keep both."""

import fshard as fs
from fshard import checkpoint
from fshard.testing import assert_trees_close
from tests.checkpoint.states import refused_everywhere
from tests.ranks import on_ranks
from tests.trees import normal

FULL = {"a": normal()(5, 3).float(), "b": normal(1)(3).float(), "c": normal(2)(4, 4).float()}
STRATEGIES = {
    "zero3": lambda shard: fs.zero3(shard, min_shard_elements=0),
    "zero3 with small leaves whole": lambda shard: fs.zero3(shard, min_shard_elements=8),
    "ddp": fs.ddp,
}


def grid(shard=2):
    return fs.init_mesh({"replica": -1, "shard": shard}, device="cpu")


def trained(strategy, shard=2):
    """Local SGD: each replica trains two leaves by itself; no spec names the axis between them."""
    mesh = grid(shard)
    replica = fs.comm.rank(fs.axis_of(mesh, "replica"))
    params = fs.shard(FULL, STRATEGIES[strategy](mesh["shard"]))
    return {name: leaf if name == "b" else fs.tree_map(lambda x: x + replica, leaf) for name, leaf in params.items()}


def test_a_save_is_refused(tmp_path):
    for shard in (1, 2):
        for strategy in STRATEGIES:
            save = lambda: checkpoint.save(tmp_path, trained(strategy, shard), step=1)  # noqa: E731, B023
            text = refused_everywhere(save, 2 * shard)
            assert text == (
                "checkpoint.save: ranks hold different values of one leaf\n"
                f"  ['a']: expected the same on all ranks, got other values on rank {shard}\n"
                f"  ['c']: expected the same on all ranks, got other values on rank {shard}\n"
                "To fix: make them the same, buffers by fs.sync_buffers, or store a row of one leaf for each rank."
            )
            assert checkpoint.latest(tmp_path) is None


def check_exports_are_refused(name, export, directory):
    text = refused_everywhere(lambda: export(directory, trained("zero3")), 4)
    assert text.startswith(
        f"checkpoint.{name}: ranks hold different values of one leaf\n  a: expected the same on all ranks"
    )
    assert not directory.exists() or not list(directory.iterdir())


def test_exports_are_refused(tmp_path):
    check_exports_are_refused("to_state_dict", lambda _, params: checkpoint.to_state_dict(params), tmp_path / "out")


@on_ranks(4)
def test_rows_of_one_leaf_keep_them(tmp_path):
    """The remedy: a leading dim over the axis of the replicas, taken off again after a restore."""

    def rows(leaf, axis):
        spec = leaf.spec
        over = fs.Spec((axis.size, *spec.shape), fs.P(axis.name, *spec.partition), (axis, *spec.axes))
        return fs.Sharded(leaf.local.unsqueeze(0), over)

    axis = fs.axis_of(grid(), "replica")
    for step, strategy in enumerate(STRATEGIES):
        params = trained(strategy)
        stacked = {name: rows(leaf, axis) for name, leaf in params.items()}
        checkpoint.save(tmp_path, stacked, step=step)
        found = checkpoint.restore(tmp_path, like=stacked, step=step)
        own = {name: fs.Sharded(found[name].local[0], leaf.spec) for name, leaf in params.items()}
        assert_trees_close(own, params, exact=True)


@on_ranks(4)
def test_padding_may_differ(tmp_path):
    """It is no part of a leaf's values."""
    mesh = grid()
    params = fs.shard({"a": normal()(5, 3)}, STRATEGIES["zero3"](mesh["shard"]))
    if fs.comm.rank(fs.axis_of(mesh, "shard")):
        params["a"].local[-1] = fs.comm.rank(fs.axis_of(mesh, "replica"))
    checkpoint.save(tmp_path, params, step=1)
    assert checkpoint.to_state_dict(params)["a"].equal(normal()(5, 3))
