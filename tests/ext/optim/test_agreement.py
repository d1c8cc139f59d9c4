"""An update of an extension's optimizer that one rank makes alone is named on every rank."""

import pytest

import fshard as fs
from tests.ranks import on_ranks
from tests.test_law_agreement import SECONDS, SGD, errors_of_one_alone, updated

ALONE = {
    "update at owners": lambda params: updated(params, fs.whole(SGD)),
    "update of adafactor": lambda params: updated(params, fs.adafactor(lr=0.1)),
}


@pytest.mark.rows(1)
@on_ranks(2, 3, timeout=3 * SECONDS)
def test_a_verb_that_one_rank_calls_alone_is_named_on_every_rank():
    return errors_of_one_alone(ALONE)
