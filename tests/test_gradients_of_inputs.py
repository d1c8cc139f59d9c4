"""value_and_grad by inputs: arguments of plain tensors beside sharded parameters."""

import itertools

import pytest
import torch

import fshard as fs
from fshard.testing import assert_trees_close
from tests.ranks import on_ranks

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
