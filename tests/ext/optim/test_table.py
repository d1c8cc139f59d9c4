"""The table of what every optimizer must do, for the optimizers of extensions."""

import pytest
from torch import optim

import fshard as fs
from tests.optim import test_table as core
from tests.optim.test_table import MATRICES, Row
from tests.ranks import on_ranks
from tests.test_law_agreement import SECONDS, SGD, errors_of_one_alone, updated
from tests.transforms.test_own_dim import check_training_is_that_of_one_process


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


@pytest.mark.parametrize("name", TABLE)
@on_ranks(2)
def test_updates_are_pure_and_states_are_sharded(name):
    """Donated ones have the same bits and addresses, and a state survives numpy."""
    core.check_state_is_sharded_as_the_parameters_and_keeps_its_structure(TABLE[name])
    core.check_an_update_is_pure(TABLE[name])
    core.check_a_donated_update_has_the_same_bits_and_the_same_addresses(TABLE[name])


@pytest.mark.rows(1)
@pytest.mark.parametrize("layout", ("zero2 of every leaf", "last dim", "hsdp", "two dims"))
@pytest.mark.parametrize("name", TABLE)
@on_ranks(4)
def test_padding_is_never_looked_at(name, layout):
    core.check_padding_is_never_looked_at(TABLE[name], layout)


@pytest.mark.rows(1)
@on_ranks(2, 3, timeout=3 * SECONDS)
def test_an_update_that_one_rank_makes_alone_is_named_on_every_rank():
    updates = {"update at owners": fs.whole(SGD), "update of adafactor": fs.adafactor(lr=0.1)}
    return errors_of_one_alone({name: lambda params, tx=tx: updated(params, tx) for name, tx in updates.items()})


@pytest.mark.rows(2)
@on_ranks(1, 2, 4, 8, "2 processes")
def test_leaves_that_ranks_own_train_as_in_one_process(world_size):
    check_training_is_that_of_one_process(fs.adafactor(0.01), world_size, reduced=True)
