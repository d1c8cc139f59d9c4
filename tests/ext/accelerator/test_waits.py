"""For no wrapper, optimizer and way to run a step the host waits; what a captured graph would freeze is refused."""

from functools import partial

import pytest

from tests.accelerator import test_accelerator as core
from tests.accelerator.test_accelerator import faults
from tests.ext.accelerator.waits import PROGRAMS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

run = partial(core.run, script="tests/ext/accelerator/waits.py")


@pytest.mark.parametrize("mode", ("eager", "donated", "jitted", "jitted and donated"))
def test_no_wrapper_makes_the_host_wait(library, mode):
    """Where there are kernels that read counts on the device: in all steps together, with one trace."""
    names = [name for name in PROGRAMS if name.endswith(f", {mode}")]
    reports = run(library, *names)
    assert list(reports) == names
    assert list(faults(reports, programs=PROGRAMS)) == []


def test_a_captured_step_has_no_numbers_on_the_processor(library):
    names = [name for name in PROGRAMS if name.startswith("captured")]
    reports = run(library, *names)
    assert list(reports) == names
    assert list(faults(reports, programs=PROGRAMS)) == []
