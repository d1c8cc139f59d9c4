"""Law 2: scatter is the transpose of gather."""

import pytest
import torch

import fshard as fs
from fshard.testing import check_adjoint
from tests.ranks import on_ranks
from tests.trees import CASTS, FLOATING, STRATEGIES, WORLD_SIZES, every_strategy, meshes, uneven


def shapes(tree):
    return [tuple(leaf.shape) for leaf in fs.tree_leaves(tree)]


@pytest.mark.rows(4)
@on_ranks(*WORLD_SIZES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_scatter_is_the_transpose_of_gather(strategy):
    transform = STRATEGIES[strategy](meshes())
    for make in FLOATING.values():
        check_adjoint(transform, shapes(make()))


@pytest.mark.rows(1)
@on_ranks(*WORLD_SIZES)
def test_casts_are_linear_on_values_that_they_keep():
    """Leaves of bfloat16 lose nothing on the way in, and gradients of bfloat16 nothing on the way out."""
    for _, transform in every_strategy(CASTS):
        check_adjoint(transform, shapes(uneven()), dtype=torch.bfloat16)
