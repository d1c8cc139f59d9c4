"""A rehearsal of accelerators with the programs of extensions."""

from functools import partial

import pytest

from tests.accelerator import test_accelerator as core
from tests.accelerator.test_accelerator import library
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
def test_an_accelerator_whose_ranks_send_nothing_between_processors(library):
    found = run(library, "--alone", *(name for name, each in PROGRAMS.items() if each.alone is not None))
    assert list(faults(found, alone=True)) == []
