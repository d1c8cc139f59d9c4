"""torch.func through gather and objective: inner steps, ensembles, Hessians and gradients of each sample."""

import pytest
import torch
from torch.func import grad, grad_and_value, jvp, vmap

import fshard as fs
from fshard.testing import assert_trees_close, spmd
from tests.losses import (
    ATOL,
    COUNTS,
    FIXED,
    batch,
    errors,
    full_params,
    mine,
    shard,
    specs,
)
from tests.trees import STRATEGIES, meshes, normal

TRANSFORMED = ("ddp", "zero2 of every leaf", "last dim", "hsdp", "two dims")
INNER_RATE = 0.05


def trained_only(full):
    return {name: full[name] for name in ("w1", "b1", "w2", "scale")}


def dense_loss(p, x, target):
    return errors(p | {"fixed": FIXED}, x, target)


def sharded_loss(p, x, target):
    return dense_loss(fs.gather(p), x, target)


def mean_of_ranks(rows, world_size):
    return sum(part.mean() for part in rows.split(COUNTS[world_size])) / world_size


@pytest.mark.parametrize("world_size", COUNTS)
@pytest.mark.parametrize("strategy", TRANSFORMED)
def test_gradient_through_an_inner_step(strategy, world_size):
    """MAML: the loss after one step of SGD on another batch, differentiated by the parameters before it."""
    full = trained_only(full_params())
    support, query = batch(), tuple(tensor.flip(0) for tensor in batch())

    def dense(p):
        inner = grad(lambda p: mean_of_ranks(dense_loss(p, *support), world_size))(p)
        adapted = fs.tree_map(lambda w, g: w - INNER_RATE * g, p, inner)
        return mean_of_ranks(dense_loss(adapted, *query), world_size)

    expected_grads, expected = grad_and_value(dense)(full)

    def program():
        params = shard(STRATEGIES[strategy](meshes()), full)
        mine_support, mine_query = mine(support, world_size), mine(query, world_size)

        def by_value_and_grad(p):
            _, inner = fs.value_and_grad(lambda p: sharded_loss(p, *mine_support).mean())(p)
            adapted = fs.tree_map(lambda w, g: w - INNER_RATE * g, p, inner)
            return sharded_loss(adapted, *mine_query).mean()

        def by_torch(p):
            inner = grad(lambda p: fs.objective(sharded_loss(p, *mine_support).mean(), like=p))(p)
            adapted = fs.tree_map(lambda w, g: w - INNER_RATE * g, p, inner)
            return sharded_loss(adapted, *mine_query).mean()

        for loss_fn in (by_value_and_grad, by_torch):
            value, grads = fs.value_and_grad(loss_fn)(params)
            assert_trees_close((value, fs.unshard(grads)), (expected, expected_grads), rtol=0.0, atol=4 * ATOL)
            grads, value = grad_and_value(lambda p: fs.objective(loss_fn(p), like=p))(params)  # noqa: B023
            assert_trees_close((value, fs.unshard(grads)), (expected, expected_grads), rtol=0.0, atol=4 * ATOL)

    spmd(program, world_size)


@pytest.mark.parametrize("world_size", COUNTS)
@pytest.mark.parametrize("strategy", TRANSFORMED)
def test_vmap_over_an_ensemble(strategy, world_size):
    """Members are stacked in front of every shard; each is trained as it would be alone."""
    draws = [normal(seed) for seed in range(3)]
    members = [fs.tree_map(lambda leaf: draw(*leaf.shape) / 2, trained_only(full_params())) for draw in draws]  # noqa: B023

    def program():
        args, transform = mine(batch(), world_size), STRATEGIES[strategy](meshes())
        sharded = [shard(transform, member) for member in members]
        stacked = fs.tree_map(lambda *locals: torch.stack(locals), *sharded)
        run = fs.value_and_grad(lambda p, *args: sharded_loss(p, *args).mean())
        values, grads = vmap(run, in_dims=(0, None, None))(stacked, *args)
        for i, member in enumerate(sharded):
            value, alone = run(member, *args)
            torch.testing.assert_close(values[i], value, rtol=0.0, atol=ATOL)
            assert specs(grads) == specs(alone)
            one = fs.tree_map(lambda leaf: leaf[i], grads)  # noqa: B023
            assert_trees_close(fs.unshard(one), fs.unshard(alone), rtol=0.0, atol=ATOL)

    spmd(program, world_size)


@pytest.mark.rows(2)
@pytest.mark.parametrize("world_size", COUNTS)
@pytest.mark.parametrize("strategy", TRANSFORMED)
def test_hessian_vector_products(strategy, world_size):
    full, draw = trained_only(full_params()), normal(3)
    vector = fs.tree_map(lambda leaf: draw(*leaf.shape), full)

    def dense(p):
        return mean_of_ranks(dense_loss(p, *batch()), world_size)

    expected_grads, expected = jvp(grad(dense), (full,), (vector,))

    def program():
        args, transform = mine(batch(), world_size), STRATEGIES[strategy](meshes())
        params, tangents = shard(transform, full), shard(transform, vector)

        def loss_fn(p):
            return sharded_loss(p, *args).mean()

        def inner_product(grads):
            """Each element counts once: those of gathered leaves on the rank that adds them up."""
            products = fs.tree_map(torch.mul, fs.gather(grads), vector)
            return sum(leaf.sum() for leaf in products.values())

        def engine(p):
            return fs.value_and_grad(loss_fn)(p)[1]

        for gradient in (engine, grad(lambda p: fs.objective(loss_fn(p), like=p))):
            grads, product = jvp(gradient, (params,), (tangents,))
            assert_trees_close(fs.unshard(grads), expected_grads, rtol=0.0, atol=ATOL)
            assert_trees_close(fs.unshard(product), expected, rtol=0.0, atol=4 * ATOL)
            again = grad(lambda p: fs.objective(inner_product(gradient(p)), like=p))(params)  # noqa: B023
            assert_trees_close(fs.unshard(again), expected, rtol=0.0, atol=4 * ATOL)
        _, again = fs.value_and_grad(lambda p: inner_product(engine(p)))(params)
        assert_trees_close(fs.unshard(again), expected, rtol=0.0, atol=4 * ATOL)

    spmd(program, world_size)


@pytest.mark.parametrize("world_size", (1, 2, 3, 4))
@pytest.mark.parametrize("strategy", TRANSFORMED)
def test_gradients_of_each_sample(strategy, world_size):
    """Of full parameters they are the rank's own; through gather those of equal places in the ranks' batches add up."""
    full, samples, draw = trained_only(full_params()), 3, normal(1)
    batches = [(draw(samples, 5), draw(samples, 3)) for _ in range(world_size)]

    def one(loss):
        return lambda p, x, target: loss(p, x[None], target[None])[0]

    dense = [vmap(grad(one(dense_loss)), in_dims=(None, 0, 0))(full, *args) for args in batches]
    expected = fs.tree_map(lambda *leaves: sum(leaves), *dense)

    def program():
        params, rank = shard(STRATEGIES[strategy](meshes()), full), torch.distributed.get_rank()
        own = vmap(grad(one(dense_loss)), in_dims=(None, 0, 0))(fs.gather(params), *batches[rank])
        assert_trees_close(own, dense[rank], rtol=0.0, atol=ATOL)
        summed = vmap(grad(one(sharded_loss)), in_dims=(None, 0, 0))(params, *batches[rank])
        assert specs(summed) == specs(params)
        for sample in range(samples):
            found = fs.unshard(fs.tree_map(lambda leaf: leaf[sample], summed))  # noqa: B023
            assert_trees_close(found, fs.tree_map(lambda leaf: leaf[sample], expected), rtol=0.0, atol=ATOL)  # noqa: B023

    spmd(program, world_size)
