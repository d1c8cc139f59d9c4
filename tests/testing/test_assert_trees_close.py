"""assert_trees_close says by how much complex leaves differ."""

import re

import pytest
import torch

from fshard.testing import assert_trees_close


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_distance_of_complex_leaves(dtype):
    actual, expected = torch.tensor([1, 4 + 4j], dtype=dtype), torch.tensor([1, 1 + 0j], dtype=dtype)
    text = "['w']: expected (1+0j) within rtol=0, atol=0, got (4+4j) there (1 of 2 elements differ, most by 5 at (1,))"
    with pytest.raises(AssertionError, match=re.escape(text)):
        assert_trees_close({"w": actual}, {"w": expected}, rtol=0, atol=0)
