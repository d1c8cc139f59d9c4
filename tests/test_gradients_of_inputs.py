"""Gradients by inputs, plain tensors beside sharded parameters; and of each sample, by vmap through gather."""

import itertools

import pytest
import torch
from torch.func import grad, vmap

import fshard as fs
from fshard.testing import assert_trees_close
from tests import trees
from tests.losses import ATOL, FIXED, errors, full_params, shard, specs
from tests.ranks import my_rank, on_ranks
from tests.trees import meshes, normal

STRATEGIES = {"ddp": fs.ddp, "zero2": fs.zero2, "zero3": lambda mesh: fs.zero3(mesh, merge_bytes=0)}


def drawn(seed, *shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def tensors():
    return {"w": drawn(0, 3, 5), "b": drawn(1, 5)}


def inputs(ranks):
    return [{"x": drawn(2 + rank, rank + 2, 3), "unused": torch.ones(2)} for rank in range(ranks)]


def loss_fn(params, given, count=False):
    full = fs.gather(params)
    rows = torch.tanh(given["x"] @ full["w"] + full["b"]).square()
    return (rows.sum(), torch.tensor(float(len(rows)))) if count else rows.mean()


def dense(reduce, ranks):
    """The gradients of the objective, computed in one process by all ranks' inputs."""
    params, given = tensors(), inputs(ranks)

    def objective(params, given):
        found = [loss_fn(params, each, reduce == "weighted") for each in given]
        if reduce == "weighted":
            return sum(loss for loss, _ in found) / sum(count for _, count in found)
        return sum(found) / (ranks if reduce == "mean" else 1)

    return torch.func.grad(objective, argnums=(0, 1))(params, given)


def program(reduce, strategy, jitted):
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    axis = fs.axis_of(mesh, "shard")
    rank = int(fs.axis_index(axis))
    params = fs.shard(tensors(), STRATEGIES[strategy](mesh))
    given = inputs(axis.size)[rank]
    f = fs.value_and_grad(
        lambda given, params: loss_fn(params, given, reduce == "weighted"), argnums=(1, 0), reduce=reduce
    )
    for _ in range(2):  # the second call knows the order
        _, (grads, by_given) = (fs.jit(f) if jitted else f)(given, params)
    assert not any(leaf.requires_grad for leaf in given.values())
    expected, by_inputs = dense(reduce, axis.size)
    outer = torch.func.grad(lambda given: f(given, params)[0])(given)  # by torch.func, inside of it
    assert_trees_close(outer, by_inputs[rank], rtol=0, atol=1e-12)
    assert_trees_close(fs.unshard(grads), expected, rtol=0, atol=1e-12)
    assert_trees_close(by_given, by_inputs[rank], rtol=0, atol=1e-12)
    assert by_given["unused"].tolist() == [0, 0]


@on_ranks(1, 2, 3)
def test_gradients_of_inputs_are_those_of_one_process():
    for row in itertools.product(("mean", "sum", "weighted"), STRATEGIES, (False, True)):
        program(*row)


def test_inputs_that_take_no_gradient_are_refused():
    params = fs.shard(tensors(), fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")))
    with pytest.raises(ValueError, match=r"\[1\]: expected a floating tensor, got an int64 Tensor"):
        fs.value_and_grad(lambda params, x: loss_fn(params, {"x": x.double()}), argnums=(0, 1))(
            params, torch.ones(2, 3).long()
        )


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

    params, rank = shard(trees.STRATEGIES[strategy](meshes()), full), my_rank()
    own = vmap(grad(one(dense_loss)), in_dims=(None, 0, 0))(fs.gather(params), *batches[rank])
    assert_trees_close(own, dense[rank], rtol=0.0, atol=ATOL)
    summed = vmap(grad(one(sharded_loss)), in_dims=(None, 0, 0))(params, *batches[rank])
    assert specs(summed) == specs(params)
    for sample in range(samples):
        found = fs.unshard(fs.tree_map(lambda leaf: leaf[sample], summed))  # noqa: B023
        assert_trees_close(found, fs.tree_map(lambda leaf: leaf[sample], expected), rtol=0.0, atol=ATOL)  # noqa: B023
