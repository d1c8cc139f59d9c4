"""assert_trees_close has torch's tolerances for each dtype, and says by how much complex leaves differ."""

import re

import pytest
import torch

from fshard.testing import assert_trees_close

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)


def passes(check, actual, expected):
    try:
        check(actual, expected)
    except AssertionError:
        return False
    return True


def test_tolerances_are_those_of_torch():
    for dtype in (*FLOATS, *COMPLEX):
        expected, results = torch.ones(1, dtype=dtype), set()
        for distance in (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1):
            result = passes(assert_trees_close, expected + distance, expected)
            assert result == passes(torch.testing.assert_close, expected + distance, expected), (dtype, distance)
            results.add(result)
        assert results == {True, False}


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_distance_of_complex_leaves(dtype):
    actual, expected = torch.tensor([1, 4 + 4j], dtype=dtype), torch.tensor([1, 1 + 0j], dtype=dtype)
    text = "['w']: expected (1+0j) within rtol=0, atol=0, got (4+4j) there (1 of 2 elements differ, most by 5 at (1,))"
    with pytest.raises(AssertionError, match=re.escape(text)):
        assert_trees_close({"w": actual}, {"w": expected}, rtol=0, atol=0)
