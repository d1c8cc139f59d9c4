"""torch.func.vmap through gather: gradients of each sample."""

import pytest
from torch.func import grad, vmap

import fshard as fs
from fshard.testing import assert_trees_close
from tests.losses import ATOL, FIXED, errors, full_params, shard, specs
from tests.ranks import my_rank, on_ranks
from tests.trees import STRATEGIES, meshes, normal

TRANSFORMED = ("ddp", "zero2 of every leaf", "last dim", "hsdp", "two dims")


def trained_only(full):
    return {name: full[name] for name in ("w1", "b1", "w2", "scale")}


def dense_loss(p, x, target):
    return errors(p | {"fixed": FIXED}, x, target)


def sharded_loss(p, x, target):
    return dense_loss(fs.gather(p), x, target)


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("strategy", TRANSFORMED)
def test_gradients_of_each_sample(strategy, world_size):
    """Of full parameters they are the rank's own; through gather those of equal places in the ranks' batches add up."""
    full, samples, draw = trained_only(full_params()), 3, normal(1)
    batches = [(draw(samples, 5), draw(samples, 3)) for _ in range(world_size)]

    def one(loss):
        return lambda p, x, target: loss(p, x[None], target[None])[0]

    dense = [vmap(grad(one(dense_loss)), in_dims=(None, 0, 0))(full, *args) for args in batches]
    expected = fs.tree_map(lambda *leaves: sum(leaves), *dense)

    params, rank = shard(STRATEGIES[strategy](meshes()), full), my_rank()
    own = vmap(grad(one(dense_loss)), in_dims=(None, 0, 0))(fs.gather(params), *batches[rank])
    assert_trees_close(own, dense[rank], rtol=0.0, atol=ATOL)
    summed = vmap(grad(one(sharded_loss)), in_dims=(None, 0, 0))(params, *batches[rank])
    assert specs(summed) == specs(params)
    for sample in range(samples):
        found = fs.unshard(fs.tree_map(lambda leaf: leaf[sample], summed))  # noqa: B023
        assert_trees_close(found, fs.tree_map(lambda leaf: leaf[sample], expected), rtol=0.0, atol=ATOL)  # noqa: B023
