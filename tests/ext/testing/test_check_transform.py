"""check_transform passes quantize within its error."""

import torch

import fshard as fs
from fshard.testing import check_transform
from tests.ranks import on_ranks
from tests.testing.test_check_transform import check_lossy
from tests.trees import one_axis, two_axes


@on_ranks(4)
def test_lossy_ones_pass_within_their_error():
    mesh = two_axes(4)
    shard = mesh["shard"]
    rounded = fs.quantize(shard, scatter=True, error_feedback=False)
    kept = fs.compose(fs.replicate(mesh["replicate"]), fs.quantize(shard, gather=False, scatter=True))
    check_lossy(rounded, kept, fs.quantize(shard))


@on_ranks(3)
def test_dtypes_and_a_state():
    check_transform(fs.quantize(one_axis(), scatter=True), dtype=torch.float32, error=1 / 200)
