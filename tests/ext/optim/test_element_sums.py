"""sums="tree" in the optimizers of extensions: the same bits however leaves are split."""

import pytest
from torch import optim

import fshard as fs
from tests.optim.test_element_sums import (
    MATRICES,
    check_jitted_updates_have_the_bits_of_eager_ones,
    check_updates_have_the_same_bits_at_any_world_size,
    with_clip,
)
from tests.ranks import on_ranks


def muon():
    return fs.whole(fs.from_torch(optim.Muon, lr=0.1, sums="tree"))


TABLE = {
    "lamb": lambda: with_clip(fs.lamb(0.1, weight_decay=0.1, sums="tree")),
    "lars": lambda: fs.lars(0.1, weight_decay=0.1, sums="tree"),
    "adafactor": lambda: with_clip(fs.adafactor(0.1, weight_decay=0.1, sums="tree")),
    "trust ratio": lambda: fs.chain(
        fs.add_decayed_weights(0.1, sums="tree"), fs.scale_by_trust_ratio(0.5, sums="tree"), fs.sgd(0.1)
    ),
    "Muon": lambda: with_clip(fs.partition({"half*": fs.adamw(0.1), MATRICES: muon(), "*": fs.sgd(0.1)})),
}


def test_updates_have_the_same_bits_at_any_world_size():
    check_updates_have_the_same_bits_at_any_world_size(TABLE)


@pytest.mark.rows(1)
@pytest.mark.parametrize("name", ("lamb", "adafactor"))
@on_ranks(2)
def test_jitted_updates_have_the_bits_of_eager_ones(name):
    check_jitted_updates_have_the_bits_of_eager_ones(TABLE[name])
