"""Weighted objectives: however unequally tokens are spread, the gradient is that of the mean over all of them."""

import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad_and_value

import fshard as fs
from fshard.testing import assert_trees_close
from tests.ranks import my_rank, on_ranks
from tests.tolerance import within
from tests.trees import OF_EVERY_LEAF, normal, one_axis

VOCABULARY, WIDTH, PLACES = 13, 7, 9

# Tokens of each microbatch, by rank: several ranks have one with none at all, and all worlds microbatches.
LENGTHS = {1: ((5, 0, 2),), 2: ((8, 0, 1), (0, 0, 0)), 3: ((5, 0, 2), (0, 0, 0), (1, 3, 9))}

# An element of a gradient sums products over at most 22 tokens and over VOCABULARY logits.
near = partial(within, terms=22 + VOCABULARY, steps=2)
FULL = {"table": normal(1)(VOCABULARY, WIDTH) / 2, "head": normal(2)(WIDTH, VOCABULARY) / 2}


def microbatches(world_size, rank):
    """Pairs of inputs and targets, whose shape is (2, number of tokens)."""
    draw = torch.Generator().manual_seed(rank)
    return [torch.randint(VOCABULARY, (2, length), generator=draw) for length in LENGTHS[world_size][rank]]


def sum_and_count(params, pair):
    """The sum of the losses of the tokens, and their number; nothing of the model where there are none."""
    x, y = pair
    logits = torch.tanh(fs.gather(params["table"])[x]) @ fs.gather(params["head"])
    if not len(x):
        return torch.zeros((), dtype=torch.float64), torch.tensor(0)
    return F.cross_entropy(logits, y, reduction="sum"), torch.tensor(len(y))


@on_ranks(*LENGTHS)
def test_every_form_is_the_mean_over_all_tokens(world_size):
    """One call with all tokens of a rank, or a microbatch after another."""
    ranks = [microbatches(world_size, rank) for rank in range(world_size)]
    every_token = torch.cat([pair for pairs in ranks for pair in pairs], dim=1)

    def mean(params):
        total, count = sum_and_count(params, every_token)
        return total / count

    pairs = ranks[my_rank()]
    grads, value = grad_and_value(mean)(FULL)
    for strategy in OF_EVERY_LEAF.values():
        params = fs.shard(FULL, strategy(one_axis()))
        results = [fs.value_and_grad(sum_and_count, reduce="weighted")(params, torch.cat(pairs, dim=1))]
        for communicate in ("each", "once"):
            step = fs.accumulate(sum_and_count, reduce="weighted", communicate=communicate)
            results.append(step(params, pairs))
        for objective, sharded in results:
            assert_trees_close((objective, fs.unshard(sharded)), (value, grads), **near((value, grads)))


# Three of these: the sum wraps in uint8, is true in bool, rounds in bfloat16 and is infinite in float16.
NARROW = {"uint8": 200, "bool": 1, "bfloat16": 129, "float16": 40000, "float64": 3}


@on_ranks(1)
def test_counts_of_any_dtype_are_not_rounded_and_leave_that_of_gradients():
    params = fs.shard({"w": torch.ones(())}, fs.ddp(one_axis()))
    for dtype, number in NARROW.items():
        count = torch.tensor(number).to(getattr(torch, dtype))
        step = fs.accumulate(lambda p, _: (fs.gather(p)["w"] * 1.0, count), reduce="weighted")  # noqa: B023
        value, grads = step(params, range(3))
        assert_trees_close(3 / value.item(), 3.0 * number, **within(3.0 * number, terms=3, dtype=torch.float32))
        assert grads["w"].local.dtype is torch.float32


@on_ranks(1)
def test_counts_that_require_a_gradient_are_refused():
    """The division by them has one that no form adds; nor does a derivative in forward mode."""
    params, count = fs.shard({"w": torch.ones(())}, fs.ddp(one_axis())), torch.full((), 6.0, requires_grad=True)

    def objective(count):
        return fs.objective((torch.ones(()), count), like=params, reduce="weighted")

    forms = {
        "value_and_grad": lambda: fs.value_and_grad(lambda p: (fs.gather(p)["w"], count), reduce="weighted")(params),
        "scatter_grads": lambda: fs.scatter_grads(fs.gather(params), like=params, reduce="weighted", count=count),
        "objective": lambda: objective(count),
    }
    text = "{}: the count requires a gradient, but it is treated as a constant. Pass count.detach()."
    for name, form in forms.items():
        with pytest.raises(ValueError, match=f"^{re.escape(text.format(name))}$"):
            form()
    with pytest.raises(ValueError, match=re.escape(text.format("objective"))):
        torch.func.jvp(objective, (torch.full((), 6.0),), (torch.ones(()),))
