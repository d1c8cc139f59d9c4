"""The library of the device, which the tests of this folder share."""

import pytest

from tests.accelerator import emu


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    return emu.build(tmp_path_factory.mktemp("emu"))
