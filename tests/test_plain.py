"""The module-free form: plain functions that gather parts of a tree."""

from functools import partial

import pytest
import torch
from torch.func import grad_and_value

import fshard as fs
from fshard.testing import assert_trees_close
from tests.ranks import my_rank, on_ranks
from tests.trees import none_as_zeros, normal, one_axis

# A few hundred products of numbers around one, summed in another order, in float64.
ATOL = 1e-12

VOCAB, WIDTH, BLOCKS = 7, 5, 3


def full_values():
    draw = normal()
    return {
        "embed": draw(VOCAB, WIDTH),
        "blocks": [{"up": draw(WIDTH, 9), "bias": draw(9), "down": draw(9, WIDTH)} for _ in range(BLOCKS)],
        "scale": draw(),
    }


def strategies(mesh):
    every = {"min_shard_elements": 0}
    return {
        "zero3 without prefetch": fs.zero3(mesh, merge_bytes=0, prefetch=0, **every),
        "zero3 of merged units": fs.zero3(mesh, prefetch=3, **every),
        "zero3 that keeps some": fs.zero3(mesh, merge_bytes=0, regather="*blocks*", min_shard_elements=20),
        "ddp": fs.ddp(mesh),
    }


def tokens():
    """As many as the rank's number says, and two."""
    return torch.arange(2 + my_rank()) % VOCAB


def run_block(block, x):
    return x + torch.tanh(x @ block["up"] + block["bias"]) @ block["down"]


def negative_log_likelihood(params, x, embed):
    logits = x @ embed.T * fs.gather(params["scale"])
    return -logits.log_softmax(-1)[:, 0].mean()


def through_blocks(params, order=range(BLOCKS), gather=fs.gather, again=False):
    """Blocks in some order, gathered anew each time; the embedding is kept to its last use, or gathered again."""
    embed = fs.gather(params["embed"])
    x, embed = embed[tokens()], None if again else embed
    for i in order:
        x = run_block(gather(params["blocks"][i]), x)
    return negative_log_likelihood(params, x, fs.gather(params["embed"]) if again else embed)


def leaf_by_leaf(block):
    return {name: fs.gather(leaf) for name, leaf in block.items()}


def maths_on_shards(params):
    """A low-rank sum, and a penalty on what ranks hold."""
    params = {**params, "embed": fs.tree_map(lambda e, d: e + 0.5 * d, params["embed"], params["embed"])}
    return through_blocks(params)


def all_at_once(params):
    full = fs.gather(params)
    x = full["embed"][tokens()]
    for block in full["blocks"]:
        x = run_block(block, x)
    return negative_log_likelihood(full, x, full["embed"])


def no_parameter_on_one_rank(params):
    value = through_blocks(params)
    return torch.ones((), dtype=torch.float64) if my_rank() == 0 else value


FUNCTIONS = {
    "in order": through_blocks,
    "leaf by leaf": partial(through_blocks, gather=leaf_by_leaf, again=True),
    "a block three times": partial(through_blocks, order=(0, 1, 0, 2, 0)),
    "backwards": partial(through_blocks, order=(2, 1, 0), again=True),
    "all at once": all_at_once,
    "no parameter on one rank": no_parameter_on_one_rank,
    "maths on shards": maths_on_shards,
}


def reference(f, params):
    """By torch.func on full parameters, of which a rank's function need not use any."""
    grads, value = grad_and_value(f)(fs.unshard(params))
    return fs.objective(value, like=params), fs.scatter_grads(grads, like=params)


@pytest.mark.rows(1)
@on_ranks(2, 3)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_the_reference(name):
    f = FUNCTIONS[name]
    for transform in strategies(one_axis()).values():
        params = fs.shard(full_values(), transform)
        value, grads = fs.value_and_grad(f)(params)
        expected = reference(f, params)
        assert_trees_close((value, none_as_zeros(grads, params)), expected, rtol=ATOL, atol=ATOL)


@on_ranks(2)
def test_a_leaf_of_two_units_is_gathered_with_each_and_no_other():
    """Such as a table of tokens at both ends: the second gather is not the first unit's again."""
    full = {"tokens": torch.ones(4, 2), "positions": torch.ones(100, 2), "weight": torch.ones(2, 2)}
    params = fs.shard(full, fs.zero3(one_axis(), min_shard_elements=0, merge_bytes=0, prefetch=0))

    def part(params, *names):
        return {name: params[name] for name in names}

    def loss(params):
        first = fs.gather(part(params, "tokens", "positions"))
        x = first["tokens"] + first["positions"][:4]
        x = x @ fs.gather(part(params, "weight"))["weight"]
        return (x @ fs.gather(part(params, "tokens"))["tokens"].T).square().mean()

    with fs.comm.record() as record:
        fs.value_and_grad(loss)(params)
    # The last use stays.
    nbytes = {name: leaf.nbytes for name, leaf in full.items()}
    gathered = sum(entry.bytes for entry in record if entry.label == "gather")
    assert gathered == 2 * sum(nbytes.values()) + nbytes["tokens"]
