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
from tests.trees import OF_EVERY_LEAF, normal, one_axis

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


def gradient_of(loss, full):
    leaf = full.clone().requires_grad_()
    return torch.autograd.grad(loss(leaf), leaf)[0]


@pytest.mark.parametrize("strategy", ("zero3", "ddp"))
@on_ranks(1, 2)
def test_sparse_gradients_of_sharded_leaves_are_refused_by_name(strategy):
    full = normal(1)(5, 3)
    params = fs.shard({"w": full, "scale": torch.ones(())}, OF_EVERY_LEAF[strategy](one_axis()))
    for loss in SPARSE.values():

        def of_params(p, *_, loss=loss):
            leaves = fs.gather(p)
            return loss(leaves["w"]) * leaves["scale"]

        run = fs.value_and_grad(of_params)
        grads = {"w": gradient_of(loss, full), "scale": torch.zeros(())}
        under_func = torch.func.grad(lambda p, f=of_params: fs.objective(f(p), like=p))
        assert text_of(partial(run, params)) == refusal("value_and_grad")
        assert text_of(partial(fs.jit(run), params)) == refusal("value_and_grad")
        for communicate in ("each", "once"):
            step = fs.accumulate(of_params, communicate=communicate)
            assert text_of(partial(step, params, [1, 2])) == refusal("accumulate")
        assert text_of(partial(under_func, params)) == refusal("gather")
        assert text_of(partial(fs.scatter_grads, grads, like=params)) == refusal("scatter_grads")


@on_ranks(1, 2)
def test_dense_gradients_of_sparse_tensors_are_those_of_torch():
    full = normal(1)(5, 3)
    for strategy in OF_EVERY_LEAF.values():
        params = fs.shard({"w": full}, strategy(one_axis()))
        for loss in DENSE.values():
            _, grads = fs.value_and_grad(lambda p, loss=loss: loss(fs.gather(p)["w"]))(params)
            expected = gradient_of(loss, full)
            assert_trees_close(fs.unshard(grads["w"]), expected, **within(expected, terms=full.numel()))


@on_ranks(1, 2)
def test_a_sparse_embedding_of_a_model_is_named_and_evaluated():
    module = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
    model = fs.functionalize(module, units=nn.Embedding)
    for strategy in OF_EVERY_LEAF.values():
        params = model.init(strategy(one_axis()), seed=0)
        run = fs.value_and_grad(lambda p: model.apply(p, INDEX).sum())
        assert text_of(partial(run, params)) == refusal("value_and_grad", "['0.weight']")
        with torch.no_grad():
            assert model.apply(params, INDEX).shape == (1, 3, 1)
