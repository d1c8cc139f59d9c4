"""What the optimizers of extensions do where there is nothing to train."""

from functools import partial

import pytest

import fshard as fs
from tests.optim.test_native import as_chain
from tests.optim.test_wrappers import check_nothing_to_train

OPTIMIZERS = {"lamb": partial(fs.lamb, 0.1), "lars": partial(fs.lars, 0.1)}


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_nothing_to_train(case):
    for state in check_nothing_to_train(OPTIMIZERS[case]()):
        assert all(part.updates.item() == 1 for part in as_chain(state) if hasattr(part, "updates"))
