"""Law 2: scatter is the transpose of gather."""

import pytest
import torch

import fshard as fs
from fshard.testing import check_adjoint
from fshard.tree import flatten
from tests.ranks import on_ranks
from tests.trees import CASTS, FLOATING, STRATEGIES, WORLD_SIZES, every_strategy, meshes, uneven


def check_adjoint_of(strategy, tree, **options):
    """By each transform that the strategy gives to leaves of the tree, which are several where it has masks."""
    shapes = {}
    for leaf in flatten(fs.shard(tree, strategy)).leaves:
        if leaf is not None:
            shapes.setdefault(leaf.spec.transform, []).append(leaf.spec.shape)
    for transform, shapes_of_transform in shapes.items():
        if all(0 in shape for shape in shapes_of_transform):
            continue
        check_adjoint(transform, shapes_of_transform, **options)


@pytest.mark.rows(4)
@on_ranks(*WORLD_SIZES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_scatter_is_the_transpose_of_gather(strategy):
    for make in FLOATING.values():
        check_adjoint_of(STRATEGIES[strategy](meshes()), make())


@pytest.mark.rows(1)
@on_ranks(*WORLD_SIZES)
def test_casts_are_linear_on_values_that_they_keep():
    """Leaves of bfloat16 lose nothing on the way in, and gradients of bfloat16 nothing on the way out."""
    for _, strategy in every_strategy(CASTS):
        check_adjoint_of(strategy, uneven(), dtype=torch.bfloat16)
