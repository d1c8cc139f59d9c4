"""DTensors of leaves that ranks own."""

import pytest

import fshard as fs
from fshard.tree import flatten
from tests.ranks import on_ranks
from tests.transforms.test_own_dim import STRATEGIES, grid, initial, whole
from tests.trees import assert_same_bits


@on_ranks(2)
def test_dtensors_keep_the_roles():
    mesh = grid(1, 2)
    strategy = STRATEGIES["of ddp"](mesh)
    params = fs.shard(initial(), strategy)
    there = fs.to_dtensor(params, mesh)
    back = fs.from_dtensor(there, strategy)
    for found, leaf in zip(flatten(back).leaves, flatten(params).leaves, strict=True):
        assert (found.spec.roles, found.spec.gathered_shape) == (leaf.spec.roles, leaf.spec.gathered_shape)
        assert_same_bits(found.local, leaf.local)
    there["experts"]["up"] = fs.to_dtensor(fs.shard({"up": initial()["experts"]["up"]}, whole(mesh)), mesh)["up"]
    text = r"\['experts'\]\['up'\]: expected Shard where each rank owns its piece, got Replicate over \['expert'\]"
    with pytest.raises(ValueError, match=text):
        fs.from_dtensor(there, strategy)
