"""check_optimizer passes the optimizers of extensions."""

from contextlib import nullcontext

import pytest

from fshard.testing import RankError
from tests.ext.optim.test_table import TABLE
from tests.testing.test_check_optimizer import check_optimizers_of_the_library_pass


@pytest.mark.rows(2)
@pytest.mark.parametrize("name", TABLE)
def test_optimizers_of_the_library_pass(name):
    # torch's Adafactor reads the step as a Python number.
    refused = pytest.raises(RankError, match="jit: expected no look at the value")
    with refused if name == "whole Adafactor" else nullcontext():
        check_optimizers_of_the_library_pass(TABLE[name])
