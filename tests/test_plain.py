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
        "zero3": fs.zero3(mesh, merge_bytes=0, **every),
        "zero3 without prefetch": fs.zero3(mesh, merge_bytes=0, prefetch=0, **every),
        "zero3 of merged units": fs.zero3(mesh, prefetch=3, **every),
        "zero3 that keeps some": fs.zero3(mesh, merge_bytes=0, regather="*blocks*", **every),
        "zero3 of small whole leaves": fs.zero3(mesh, merge_bytes=0, min_shard_elements=20),
        "zero2": fs.zero2(mesh, **every),
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


def all_at_once(params):
    full = fs.gather(params)
    x = full["embed"][tokens()]
    for block in full["blocks"]:
        x = run_block(block, x)
    return negative_log_likelihood(full, x, full["embed"])


def leaf_by_leaf(block):
    return {name: fs.gather(leaf) for name, leaf in block.items()}


def gathered_before_it_is_needed(params):
    blocks = [fs.gather(block) for block in params["blocks"]]
    embed = fs.gather(params["embed"])
    x = embed[tokens()]
    for block in blocks:
        x = run_block(block, x)
    return negative_log_likelihood(params, x, embed)


def unused(params):
    """Every rank gathers a block that only some compute with."""
    embed = fs.gather(params["embed"])
    x = embed[tokens()]
    for i, block in enumerate(params["blocks"]):
        full = fs.gather(block)
        x = run_block(full, x) if i != 1 or my_rank() else x
    return negative_log_likelihood(params, x, embed)


def no_parameter_on_one_rank(params):
    value = through_blocks(params)
    return torch.ones((), dtype=torch.float64) if my_rank() == 0 else value


def no_parameter_anywhere(params):
    return through_blocks(params).detach()


def some_never_gathered(params):
    return negative_log_likelihood(params, fs.gather(params["embed"]), fs.gather(params["embed"]))


def maths_on_shards(params):
    """A low-rank sum, and a penalty on what ranks hold."""
    params = {**params, "embed": fs.tree_map(lambda e, d: e + 0.5 * d, params["embed"], params["embed"])}
    return through_blocks(params)


FUNCTIONS = {
    "in order": through_blocks,
    "embedding twice": partial(through_blocks, again=True),
    "leaf by leaf": partial(through_blocks, gather=leaf_by_leaf, again=True),
    "a block three times": partial(through_blocks, order=(0, 1, 0, 2, 0)),
    "backwards": partial(through_blocks, order=(2, 1, 0), again=True),
    "all at once": all_at_once,
    "gathered before it is needed": gathered_before_it_is_needed,
    "unused": unused,
    "no parameter on one rank": no_parameter_on_one_rank,
    "no parameter anywhere": no_parameter_anywhere,
    "some never gathered": some_never_gathered,
    "maths on shards": maths_on_shards,
}


def reference(f, params):
    """By torch.func, whose collectives follow the graph; by autograd alone where ranks have different ones."""
    if getattr(f, "__name__", "") not in ("unused", "no_parameter_on_one_rank", "some_blocks"):
        grads, value = grad_and_value(lambda p: fs.objective(f(fs.gather(p)), like=p))(params)
        return value, grads
    full = fs.tree_map(lambda tensor: tensor.clone().requires_grad_(), fs.unshard(params))
    value, leaves = f(full), fs.tree_leaves(full)
    found = [torch.zeros_like(leaf) for leaf in leaves]
    if value.requires_grad:
        found = torch.autograd.grad(value, leaves, materialize_grads=True)
    grads = dict(zip(map(id, leaves), found))
    grads = fs.tree_map(lambda leaf: grads[id(leaf)], full)
    return fs.objective(value.detach(), like=params), fs.scatter_grads(grads, like=params)


def assert_is_the_reference(f, names):
    """On this rank, with some strategies; their references differ by nothing but rounding."""
    for name, transform in strategies(one_axis()).items():
        if name in names:
            params = fs.shard(full_values(), transform)
            expected = reference(f, params)
            value, grads = fs.value_and_grad(f)(params)
            assert_trees_close((value, none_as_zeros(grads, params)), expected, rtol=ATOL, atol=ATOL)


@pytest.mark.rows(1)
@on_ranks(2, 3)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_the_reference(name, world_size):
    some = strategies(one_axis()) if world_size == 2 else ("zero3", "zero3 of small whole leaves", "ddp")
    assert_is_the_reference(FUNCTIONS[name], some)


# Units in the order of their issue; in brackets, where each block computes, forward and backward. The last unit
# stays. In the backward a unit's turn begins where autograd leaves the unit behind it.
RECORDS = {0: "0 [0] 1 [1] 2 [2] (2) 1 (1) 0 (0)", 1: "0 [0] 1 [1] 2 [2] (2) 1 0 (1) (0)"}


@pytest.mark.parametrize("prefetch", RECORDS)
@on_ranks(2)
def test_what_a_backward_needs_next_is_gathered_ahead(prefetch):
    full = {"blocks": [normal(i)(6, 6) for i in range(3)]}
    strategy = fs.zero3(one_axis(), merge_bytes=0, min_shard_elements=0, prefetch=prefetch)
    params, x = fs.shard(full, strategy), normal(9)(2, 6).requires_grad_()
    with fs.comm.record() as record:

        def f(params):
            h = x
            for i, block in enumerate(params["blocks"]):
                weight = fs.gather(block)
                record.append(f"[{i}]")
                h = torch.tanh(h @ weight)
                h.register_hook(lambda _, i=i: record.append(f"({i})"))
            return h.sum()

        fs.value_and_grad(f)(params)
    found = [e if isinstance(e, str) else e.label for e in record if isinstance(e, str) or e.label == "gather"]
    assert found == [e if e[0] in "[(" else "gather" for e in RECORDS[prefetch].split()]


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
