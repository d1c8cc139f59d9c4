"""The faults of extensions can be planted."""

import pytest

from tests.mutants.faults import Fault
from tests.mutants.test_faults import IN_EXTENSIONS, check_planted


@pytest.mark.rows(len(IN_EXTENSIONS))
@pytest.mark.parametrize("fault", IN_EXTENSIONS, ids=lambda fault: fault.name)
def test_planted(fault: Fault) -> None:
    check_planted(fault)
