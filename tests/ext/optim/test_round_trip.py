"""Law 1 of Adafactor's state: any reshard of it is bitwise that of the whole."""

import itertools

import pytest
import torch

import fshard as fs
from tests.ranks import on_ranks
from tests.trees import STRATEGIES, assert_same_bits, every_strategy, meshes, normal


@on_ranks(2)
@pytest.mark.parametrize("start", ("ddp", "zero2 of every leaf"))
def test_reshard_of_a_state_of_rows_and_columns(start):
    """Adafactor keeps means of a matrix, which are split as far as the matrix is."""
    tx, draw = fs.adafactor(0.1), normal()
    params = {"w": draw(5, 3), "v": draw(7), "one": draw(1, 4), "t": draw(2, 6, 3)}
    state = fs.TrainState.create(fs.shard(params, STRATEGIES[start](meshes())), tx)
    for _ in range(3):
        state = fs.update(tx, state, fs.tree_map(torch.cos, state.params))
    full, after = fs.unshard(state), fs.unshard(fs.update(tx, state, fs.tree_map(torch.cos, state.params)))
    for _, strategy in every_strategy():
        moved = fs.reshard(state, strategy)
        assert_same_bits(fs.unshard(moved), full)
        made = tx.init(moved.params)
        for field, name in itertools.product(("row", "column"), "wt"):
            assert getattr(moved.opt_state, field)[name].spec == getattr(made, field)[name].spec
        found = fs.unshard(fs.update(tx, moved, fs.tree_map(torch.cos, moved.params)))
        fs.testing.assert_trees_close(found.params, after.params, rtol=1e-13, atol=1e-13)
