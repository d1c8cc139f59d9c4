"""The recorder: one entry for each operator of this thread, in the order of their issue."""

import pytest
import torch

import fshard as fs
from fshard import comm
from fshard.comm.collective import PACK_BYTES
from fshard.testing import spmd
from tests.trees import one_axis

# Two float32 of 4 elements and a float64 that travel together by dtype, and a float64 that travels alone.
SMALL, ALONE = 2 * 4 * 4, PACK_BYTES

RECORDS = {
    # Packed buffers by dtype, those that travel alone first.
    "direct": [
        ("all_gather", 2 * (SMALL + 32 + ALONE), 3, False),
        ("reduce_scatter", SMALL + 32 + ALONE, 3, False),
        # Two ranks exchange everything whole, whatever its size.
        ("all_reduce", SMALL + 32 + ALONE, 3, False),
        ("all_reduce", 8, 1, True),
    ],
    "flat": [
        ("all_gather", 2 * (SMALL + 32 + ALONE), 3, False),
        ("reduce_scatter", SMALL + 32 + ALONE, 3, False),
        ("all_reduce", SMALL + 32 + ALONE, 3, False),
        ("all_reduce", 8, 1, True),
    ],
    # A fused collective needs no packing.
    "coalesced": [
        ("all_gather", 2 * (SMALL + 32 + ALONE), 4, False),
        ("reduce_scatter", SMALL + 32 + ALONE, 4, False),
        ("all_reduce", SMALL + 32 + ALONE, 4, False),
        ("all_reduce", 8, 1, True),
    ],
}


@pytest.mark.parametrize("algorithm", RECORDS)
def test_records(workers, algorithm):
    """One entry for each operator with the bytes of the full tensors; a recorder sees this rank's thread alone."""

    def program():
        line = fs.axis_of(one_axis())
        tensors = [torch.ones(4), torch.ones(4), torch.ones(4).double(), torch.ones(PACK_BYTES // 8).double()]
        stacks = [tensor.view(2, -1) for tensor in tensors]
        with comm.record() as record:
            comm.all_gather(tensors, line, "mine", algorithm)
            comm.reduce_scatter(stacks, line, "mine", algorithm)
            comm.all_reduce(tensors, line, "mine", algorithm)
            comm.all_reduce([torch.ones((), dtype=torch.float64)], line, "mine", algorithm)
        comm.all_reduce(tensors, line, "not recorded", algorithm)
        assert {(entry.axis, entry.size, entry.label) for entry in record} == {("shard", 2, "mine")}
        return [(entry.op, entry.bytes, entry.tensors, entry.scalar) for entry in record]

    expected = RECORDS[algorithm]
    assert spmd(program, 2) == [expected] * 2
    assert spmd(program, workers(2)) == [expected] * 2
