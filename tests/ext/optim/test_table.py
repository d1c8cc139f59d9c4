"""The table of what every optimizer must do, for the optimizers of extensions."""

from functools import partial

import pytest
from torch import optim

import fshard as fs
from tests.ext.optim import test_element_sums as tree_sums
from tests.optim import test_table as core
from tests.optim import test_unused as unused
from tests.optim.test_table import MATRICES, Row
from tests.ranks import on_ranks
from tests.test_law_agreement import SECONDS, SGD, errors_of_one_alone, updated
from tests.tolerance import within
from tests.transforms.test_own_dim import check_training_is_that_of_one_process
from tests.trees import STRATEGIES, assert_same_bits, every_strategy, meshes, normal


def with_matrices(tx):
    """An optimizer of matrices, and another one for the rest."""
    return fs.partition({MATRICES: tx, "*": fs.adam(0.1)})


TABLE = {
    "lamb": Row(lambda: fs.lamb(0.1, weight_decay=0.1), rounds=core.NORM),
    "lars": Row(lambda: fs.lars(0.1, weight_decay=0.1), rounds=core.NORM),
    "adafactor": Row(lambda: fs.adafactor(0.1, weight_decay=0.1), rounds=core.NORM, reduced=True),
    "scale_by_trust_ratio": Row(lambda: fs.chain(fs.scale_by_trust_ratio(0.5), fs.sgd(0.1)), rounds=core.NORM),
    "adafactor's scale_by_factored_rms": Row(
        lambda: fs.chain(fs.scale_by_factored_rms(), fs.sgd(0.1)), rounds=core.NORM, reduced=True
    ),
    "dynamic_loss_scale": Row(lambda: fs.dynamic_loss_scale(core.from_torch(), growth_interval=2), donated=True),
    "whole": Row(lambda: fs.whole(fs.adam(0.1))),
    # Adafactor keeps rows and columns, which `whole` splits along their first dim; it cannot step no elements.
    "whole Adafactor": Row(
        lambda: fs.masked(fs.whole(core.from_torch(optim.Adafactor)), lambda n, _: n != "empty"), reduced=True
    ),
    "whole Muon": Row(lambda: with_matrices(fs.whole(core.from_torch(optim.Muon)))),
}


@pytest.mark.rows(1)
@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", TABLE)
def test_sharded_is_dense(name):
    core.check_sharded_is_dense(TABLE[name])


@pytest.mark.rows(2)
@pytest.mark.parametrize("name", TABLE)
@on_ranks(2)
def test_updates_are_pure_and_states_are_sharded(name):
    core.check_updates_are_pure_or_in_place_and_states_are_sharded(TABLE[name])


@pytest.mark.rows(1)
@pytest.mark.parametrize("layout", ("zero2 of every leaf", "last dim", "hsdp", "two dims"))
@pytest.mark.parametrize("name", TABLE)
@on_ranks(4)
def test_padding_is_never_looked_at(name, layout):
    core.check_padding_is_never_looked_at(TABLE[name], layout)


@on_ranks(2, timeout=3 * SECONDS)
def test_an_update_that_one_rank_makes_alone_is_named_on_every_rank():
    updates = {"update at owners": fs.whole(SGD), "update of adafactor": fs.adafactor(lr=0.1)}
    return errors_of_one_alone({name: lambda params, tx=tx: updated(params, tx) for name, tx in updates.items()})


@pytest.mark.slow
@on_ranks(4)
def test_leaves_that_ranks_own_train_as_in_one_process(world_size):
    check_training_is_that_of_one_process(fs.adafactor(0.01), world_size, reduced=True)


def test_adafactor_is_torch_s_within_rounding():
    for hyper in ({"lr": 0.1, "weight_decay": 0.1}, {"lr": 0.1, "beta2_decay": -0.6, "eps": (1.0, 3.0), "d": 1.5}):
        unused.check_our_own_are_torch_s_within_rounding((fs.adafactor, partial(optim.Adafactor, foreach=False), hyper))


# A scale grows with the updates of all leaves: here there are too few.
FOR_A_LEAF = {name: TABLE[name].make for name in ("lamb", "lars", "adafactor", "whole")}
FOR_A_LEAF["dynamic_loss_scale"] = lambda: fs.dynamic_loss_scale(core.from_torch())


@pytest.mark.rows(1)
@pytest.mark.parametrize("name", FOR_A_LEAF)
@on_ranks(2)
def test_a_leaf_without_a_gradient_for_some_steps(name):
    """Is as if the updates had not been."""
    unused.check_a_leaf_is_as_if_the_updates_without_it_had_not_been(FOR_A_LEAF[name])


@on_ranks(2)
def test_reshard_of_a_state_of_rows_and_columns():
    """Adafactor keeps means of a matrix, which are split as far as the matrix is; that of one row has its shape."""
    tx, on = fs.adafactor(0.1), meshes()
    tree = core.tree(0) | {"row": normal(1)(1, 8), "column": normal(2)(8, 1)}
    state = fs.TrainState.create(fs.shard(tree, STRATEGIES["zero2 of every leaf"](on)), tx)
    state = fs.update(tx, state, state.params)
    full, after = fs.unshard(state), fs.unshard(fs.update(tx, state, state.params))
    for _, strategy in every_strategy():
        moved = fs.reshard(state, strategy)
        assert_same_bits(fs.unshard(moved), full)
        made = tx.init(moved.params)
        for field in ("row", "column"):
            for name in ("wide", "row", "column"):
                assert getattr(moved.opt_state, field)[name].spec == getattr(made, field)[name].spec
        updated_state = fs.unshard(fs.update(tx, moved, moved.params))
        # Means over the rows or columns of a leaf.
        fs.testing.assert_trees_close(updated_state.params, after.params, **within(after.params, terms=70))


def muon():
    return fs.whole(fs.from_torch(optim.Muon, lr=0.1, reduction_order="tree"))


WITH_SUMS = {
    "lamb": lambda: tree_sums.with_clip(fs.lamb(0.1, weight_decay=0.1, reduction_order="tree")),
    "lars": lambda: fs.lars(0.1, weight_decay=0.1, reduction_order="tree"),
    "scale": lambda: tree_sums.with_clip(fs.dynamic_loss_scale(fs.adamw(0.1), growth_interval=2)),
    "adafactor": lambda: tree_sums.with_clip(fs.adafactor(0.1, weight_decay=0.1, reduction_order="tree")),
    "Muon": lambda: fs.partition({"half*": fs.adamw(0.1), tree_sums.MATRICES: muon(), "*": fs.sgd(0.1)}),
}


@pytest.mark.slow
def test_updates_have_the_same_bits_however_leaves_are_split():
    tree_sums.check_updates_have_the_same_bits_at_any_world_size(WITH_SUMS)
