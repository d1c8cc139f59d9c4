"""What the optimizers of extensions do with leaves that are frozen or absent."""

from functools import partial

import pytest

import fshard as fs
from tests.optim.test_native import as_chain
from tests.optim.test_wrappers import check_frozen_and_absent_leaves_pass_through, check_nothing_to_train
from tests.ranks import on_ranks

OPTIMIZERS = {"lamb": partial(fs.lamb, 0.1), "lars": partial(fs.lars, 0.1)}


@pytest.mark.parametrize("donate", (False, True))
@pytest.mark.parametrize("case", OPTIMIZERS)
@on_ranks(2)
def test_frozen_and_absent_leaves_pass_through(case, donate):
    check_frozen_and_absent_leaves_pass_through(OPTIMIZERS[case], donate)


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_nothing_to_train(case):
    for state in check_nothing_to_train(OPTIMIZERS[case]()):
        assert all(part.updates.item() == 1 for part in as_chain(state) if hasattr(part, "updates"))
