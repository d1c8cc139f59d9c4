"""Kernels that a layer of 12 leaves adds to a step: a few for the unit, not some for each leaf."""

import pytest

from tests.accelerator.test_accelerator import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# A unit is cast, gathered in the backward again, reduced, divided and updated: one kernel each, not one for each leaf.
LIMIT = 8


def test_a_layer_adds_few_kernels_to_those_of_plain_pytorch(library):
    added = run(library, script="tests/accelerator/kernels.py")
    assert len(added) == 8
    assert {name: kernels for name, kernels in added.items() if kernels > LIMIT} == {}
