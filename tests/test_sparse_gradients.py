"""Sparse gradients of sharded leaves: refused by name by every verb and strategy; dense ones of sparse tensors work."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fshard as fs
from fshard.testing import assert_trees_close
from tests.bad_input import text_of
from tests.ranks import on_ranks
from tests.tolerance import within
from tests.trees import normal, one_axis

STRATEGIES = {
    "zero3": lambda mesh: fs.zero3(mesh, min_shard_elements=0),
    "zero1": lambda mesh: fs.zero1(mesh, min_shard_elements=0),
    "ddp": fs.ddp,
}
INDEX = torch.tensor([[1, 2, 2]])
SPARSE_MATRIX = torch.eye(5, dtype=torch.float64).to_sparse()

# Losses of a matrix of five rows, whose gradients are sparse.
SPARSE = {
    "embedding": lambda w: F.embedding(INDEX, w, sparse=True).sum(),
    "embedding_bag": lambda w: F.embedding_bag(INDEX, w, sparse=True).sum(),
    "gather": lambda w: torch.gather(w, 0, INDEX, sparse_grad=True).sum(),
}
# And some that read or make sparse tensors, and have dense gradients.
DENSE = {
    "mm of a sparse matrix": lambda w: torch.sparse.mm(SPARSE_MATRIX, w).square().sum(),
    "mm of the sparse parameter": lambda w: (
        torch.sparse.mm(w.to_sparse(), torch.ones(3, 2, dtype=torch.float64)).square().sum()
    ),
    "a tied embedding": lambda w: F.embedding(INDEX, w, sparse=True).sum() + w.square().sum(),
}


def refusal(verb, path="['w']"):
    return (
        f"{verb}: gradients are sparse\n"
        f"  {path}: expected a dense gradient, got one of layout torch.sparse_coo\n"
        "To fix: pass sparse=False to nn.Embedding, nn.EmbeddingBag and their functions, sparse_grad=False to "
        "torch.gather, or call grad.to_dense()."
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(1, 2)
def test_sparse_gradients_of_sharded_leaves_are_refused_by_name(strategy):
    full = normal(1)(5, 3)
    params = fs.shard({"w": full, "scale": torch.ones(())}, STRATEGIES[strategy](one_axis()))
    for loss in SPARSE.values():

        def of_params(p, *_, loss=loss):
            leaves = fs.gather(p)
            return loss(leaves["w"]) * leaves["scale"]

        assert text_of(partial(fs.value_and_grad(of_params), params)) == refusal("value_and_grad")
        for communicate in ("each", "once"):
            accumulated = fs.accumulate(of_params, communicate=communicate)
            assert text_of(partial(accumulated, params, [1, 2])) == refusal("accumulate")
        assert text_of(partial(fs.jit(fs.value_and_grad(of_params)), params)) == refusal("value_and_grad")
        under_func = torch.func.grad(lambda p: fs.objective(of_params(p), like=p))
        assert text_of(partial(under_func, params)) == refusal("gather")
        leaf = full.clone().requires_grad_()
        (grad,) = torch.autograd.grad(loss(leaf), [leaf])
        grads = {"w": grad, "scale": torch.zeros(())}
        assert text_of(partial(fs.scatter_grads, grads, like=params)) == refusal("scatter_grads")
    for loss in DENSE.values():
        found = fs.value_and_grad(lambda p, loss=loss: loss(fs.gather(p)["w"]))(params)[1]
        leaf = full.clone().requires_grad_()
        (expected,) = torch.autograd.grad(loss(leaf), [leaf])
        assert_trees_close(fs.unshard(found["w"]), expected, **within(expected, terms=full.numel()))


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(1, 2)
def test_a_sparse_embedding_of_a_model_is_named_and_evaluated(strategy):
    module = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
    model = fs.functionalize(module, units=nn.Embedding)
    params = model.init(STRATEGIES[strategy](one_axis()), seed=0)
    loss = fs.value_and_grad(lambda p: model.apply(p, INDEX).sum())
    assert text_of(partial(loss, params)) == refusal("value_and_grad", "['0.weight']")
    with torch.no_grad():
        assert model.apply(params, INDEX).shape == (1, 3, 1)
