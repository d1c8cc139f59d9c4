"""restore(donate=True): the memory of the tree that is given becomes that of the tree that is returned."""

import torch

import fshard as fs
from fshard.testing import assert_trees_close
from tests.ranks import on_ranks
from tests.trees import TREES, every_strategy


def pointers(tree):
    return [leaf.data_ptr() for leaf in fs.tree_leaves(tree) if leaf.numel()]


@on_ranks(3)
def test_memory_is_taken_over(tmp_path):
    for number, (name, make) in enumerate(TREES.items()):
        for strategy_name, strategy in every_strategy():
            state = fs.shard(make(), strategy)
            directory = tmp_path / f"{number} {strategy_name}"
            fs.checkpoint.save(directory, state, step=0)
            like = fs.tree_map(torch.ones_like, state)
            before = pointers(like)
            restored = fs.checkpoint.restore(directory, like, donate=True)
            assert pointers(restored) == before, name
            assert_trees_close(restored, state, exact=True)


def test_memory_that_is_not_a_leafs_own_is_not(tmp_path):
    """Such as an average that begins as the leaf itself, or what is expanded."""
    w = torch.arange(6.0)
    saved = {"mean": w + 1, "ones": torch.arange(3.0), "w": w}
    fs.checkpoint.save(tmp_path, saved, step=0)
    like = {"mean": torch.zeros(6), "ones": torch.zeros(()).expand(3)}
    like["w"] = like["mean"]
    restored = fs.checkpoint.restore(tmp_path, like, donate=True)
    assert_trees_close(restored, saved, exact=True)
    assert restored["mean"].data_ptr() == like["mean"].data_ptr() != restored["w"].data_ptr()
