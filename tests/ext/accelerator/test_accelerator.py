"""A rehearsal of accelerators with the programs of extensions."""

from functools import partial

import pytest

from tests.accelerator import test_accelerator as core
from tests.accelerator.test_accelerator import check_without_values, library
from tests.ext.accelerator.programs import PROGRAMS

__all__ = ["library"]

run = partial(core.run, script="tests/ext/accelerator/programs.py")
faults = partial(core.faults, programs=PROGRAMS)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_programs_on_an_accelerator(library):
    found = run(library)
    assert list(faults(found)) == []
    assert list(found) == list(PROGRAMS)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_programs_on_an_accelerator_without_values(library):
    check_without_values(run(library, "--fake"), PROGRAMS)
