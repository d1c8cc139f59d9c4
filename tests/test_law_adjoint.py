"""Law 2: scatter is the transpose of gather."""

from dataclasses import dataclass

import pytest
import torch
from torch.func import vjp

import fshard as fs
from fshard.testing import check_adjoint
from tests.ranks import my_rank, on_ranks
from tests.trees import (
    CASTS,
    FLOATING,
    STRATEGIES,
    WORLD_SIZES,
    assert_same_bits,
    every_strategy,
    meshes,
    normal,
    one_axis,
    uneven,
)


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


@on_ranks(*WORLD_SIZES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_scatter_grads_is_what_autograd_makes_of_gather(strategy):
    params = fs.shard(uneven(), STRATEGIES[strategy](meshes()))
    draw = normal(my_rank())
    cotangents = fs.tree_map(lambda full: draw(*full.shape), uneven())
    (pulled_back,) = vjp(fs.gather, params)[1](cotangents)
    scattered = fs.scatter_grads(cotangents, like=params, reduce="sum")
    assert_same_bits(fs.tree_leaves(pulled_back), fs.tree_leaves(scattered))


@dataclass(frozen=True)
class Scale(fs.ShardTransform):
    """Multiplies matrices by one number on the way in and by another on the way out, which is right if they agree."""

    gather_by: float
    scatter_by: float

    def gather(self, leaves, specs):
        return [leaf * self.gather_by if len(spec.shape) == 2 else leaf for leaf, spec in zip(leaves, specs)]

    def scatter(self, grads, specs):
        return [grad * self.scatter_by if len(spec.shape) == 2 else grad for grad, spec in zip(grads, specs)]


@on_ranks(2)
def test_a_wrong_transform_is_found_with_leaf_and_amount():
    """Its path, both inner products and how far apart they are; a right one passes."""
    leaves, number = [(5,), (5, 3), ()], "-?[0-9.e+-]+"
    check_adjoint(fs.compose(Scale(3.0, 3.0), fs.zero2(one_axis())), leaves)
    found = rf"got <gather\(x\), y> = {number} and <x, scatter\(y\)> = {number}, apart by {number}"
    wrong = fs.compose(Scale(3.0, 2.0), fs.zero2(one_axis()))
    with pytest.raises(AssertionError, match=rf"\n  \[1\]: expected .*, {found}"):
        check_adjoint(wrong, leaves)
