"""quantize in training and under function transforms: the engine, the verbs and one process at rounded parameters."""

import pytest
import torch
from torch import nn
from torch.func import jvp, vmap

import fshard as fs
from fshard.testing import assert_trees_close
from tests.ranks import my_rank, on_ranks
from tests.test_law_ddp import ALGORITHMS, Run, batches, bound, initial, row_losses
from tests.transforms.laws import trained
from tests.transforms.rounding import gathered
from tests.trees import WORLD_SIZES, assert_same_bits, normal, one_axis
from tests.unit_models import BOUND, Block, Language, filled, tokens


@on_ranks(1, 2, 3)
def test_vmap_and_jvp():
    """Members of an ensemble share no blocks; tangents travel as the leaves do, rounded in blocks of their own."""
    draw = normal(2)
    members = [{"w": draw(5, 3) * 10**k, "n": draw()} for k in (0, 3)]
    transform = fs.quantize(one_axis(), block=4)
    params = [fs.shard(member, transform) for member in members]
    stacked = fs.tree_map(lambda a, b: torch.stack([a, b], -1), *params)
    expected = fs.tree_map(lambda a, b: torch.stack([a, b]), *map(fs.gather, params))
    assert_same_bits(vmap(fs.gather, in_dims=-1)(stacked), expected)
    full, tangent = jvp(fs.gather, (params[0],), (params[1],))
    assert_same_bits((full, tangent), (fs.gather(params[0]), fs.gather(params[1])))
    rough = fs.quantize(one_axis(), block=4, scatter=True, error_feedback=False)
    like = [fs.shard(member, rough) for member in members]
    sums = vmap(lambda g: fs.scatter_grads(g, like=like[0], reduce="sum"))(
        fs.tree_map(lambda a, b: torch.stack([a, b]), *members)
    )
    apart = [fs.scatter_grads(member, like=like[0], reduce="sum") for member in members]
    for i, one in enumerate(apart):
        assert_same_bits([x[i] for x in fs.tree_leaves(sums)], fs.tree_leaves(one))


def one_process(ranks, block):
    """SGD at parameters rounded as every rank gathers them, whose gradients are taken for those of the parameters."""
    params, losses = initial(), []
    optimizer = ALGORITHMS["SGD"].cls(fs.tree_leaves(params), **ALGORITHMS["SGD"].hyper)
    for batch in batches():
        seen = fs.tree_map(lambda leaf: gathered(leaf, ranks, block).clone().requires_grad_(), params)
        loss = row_losses(seen, batch).mean()
        loss.backward()
        for leaf, full in zip(fs.tree_leaves(params), fs.tree_leaves(seen)):
            leaf.grad = full.grad
        optimizer.step()
        losses.append(loss.detach())
    return Run(torch.stack(losses), params)


@pytest.mark.rows(1)
@on_ranks(*WORLD_SIZES[:-1])
def test_training_is_that_of_one_process_at_rounded_parameters(world_size):
    layout = fs.quantize(one_axis(), block=8)
    runs = [trained(layout), trained(fs.zero3(one_axis(), layout=layout))]
    assert_trees_close(runs, [one_process(world_size, 8)] * 2, rtol=0, atol=bound("SGD"))


@on_ranks(1, 2, 3)
def test_modules_with_units(world_size):
    """Units gathered again are the same, so that the engine has the gradients of the verbs."""
    module, batches = filled(Language()), tokens(world_size)
    layout = fs.quantize(one_axis(), block=64, min_shard_elements=20)
    model = fs.functionalize(module, (Block, nn.Linear))
    params = model.init(fs.zero3(one_axis(), layout=layout, merge_bytes=3000))
    loss = lambda p: model.apply(p, *batches[my_rank()])  # noqa: E731
    value, grads = fs.value_and_grad(loss)(params)
    full, expected = torch.func.grad_and_value(loss)(fs.gather(params))
    found = fs.unshard(fs.scatter_grads(full, like=params))
    assert_trees_close(value, fs.objective(expected, like=params), rtol=0, atol=BOUND)
    assert_trees_close(fs.unshard(grads), found, rtol=0, atol=BOUND)
