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

VOCABULARY, WIDTH, PLACES, IGNORED = 13, 7, 9, -100

# Valid tokens of each microbatch, by rank: several ranks have one with none at all, and all worlds microbatches.
LENGTHS = {1: ((5, 0, 2),), 2: ((8, 0, 1), (0, 0, 0)), 3: ((5, 0, 2), (0, 0, 0), (1, 3, 9))}

# An element of a gradient sums products over at most 22 tokens and over VOCABULARY logits.
near = partial(within, terms=22 + VOCABULARY, steps=2)
FULL = {"table": normal(1)(VOCABULARY, WIDTH) / 2, "head": normal(2)(WIDTH, VOCABULARY) / 2}


def microbatches(world_size, rank):
    """Inputs and targets, of which the first few count."""
    draw, lengths = torch.Generator().manual_seed(rank), LENGTHS[world_size][rank]
    pairs = torch.randint(VOCABULARY, (len(lengths), 2, PLACES), generator=draw)
    for (_, y), length in zip(pairs, lengths):
        y[length:] = IGNORED
    return list(pairs)


def token_sum(params, pair):
    """The sum of the losses of the valid tokens, and their number."""
    x, y = pair
    logits = torch.tanh(fs.gather(params["table"])[x]) @ fs.gather(params["head"])
    return F.cross_entropy(logits, y, reduction="sum", ignore_index=IGNORED), (y != IGNORED).sum()


def constant_where_none(params, pair):
    """Nothing of the model is in the loss of a batch without tokens, whose shape is (0,)."""
    found = token_sum(params, pair[:, pair[1] != IGNORED])
    return (torch.zeros((), dtype=torch.float64), torch.tensor(0)) if found[1] == 0 else found


def by_four_verbs(loss_of, params, batch):
    grads, (value, count) = grad_and_value(loss_of, has_aux=True)(fs.gather(params), batch)
    grads = fs.scatter_grads(grads, like=params, reduce="weighted", count=count)
    return fs.objective((value, count), like=params, reduce="weighted"), grads


def by_torch_func(loss_of, params, batch):
    return grad_and_value(lambda p: fs.objective(loss_of(p, batch), like=p, reduce="weighted"))(params)[::-1]


# By the function that complains.
FORMS = {
    "value_and_grad": lambda f, p, batch: fs.value_and_grad(f, reduce="weighted")(p, batch),
    "scatter_grads": by_four_verbs,
    "objective": by_torch_func,
}


@pytest.mark.rows(3)
@on_ranks(*LENGTHS)
@pytest.mark.parametrize("loss_of", (token_sum, constant_where_none))
def test_every_form_is_the_mean_over_all_tokens(loss_of, world_size):
    ranks = [microbatches(world_size, rank) for rank in range(world_size)]
    x, y = torch.cat([pair for pairs in ranks for pair in pairs], dim=1)
    valid, own = y != IGNORED, ranks[my_rank()]

    def mean(full):
        return F.cross_entropy(torch.tanh(full["table"][x[valid]]) @ full["head"], y[valid])

    grads, value = grad_and_value(mean)(FULL)
    for strategy in OF_EVERY_LEAF.values():
        params = fs.shard(FULL, strategy(one_axis()))
        results = [fs.accumulate(loss_of, reduce="weighted", communicate=how)(params, own) for how in ("each", "once")]
        # torch.func cannot differentiate a loss without parameters.
        forms = [*FORMS.values()] if loss_of is token_sum else [FORMS["value_and_grad"]]
        results += [form(loss_of, params, torch.cat(own, dim=1)) for form in forms]
        for found in results:
            assert_trees_close((found[0], fs.unshard(found[1])), (value, grads), **near((value, grads)))


# Three of these: the sum wraps in uint8, is true in bool, rounds in bfloat16 and is infinite in float16.
NARROW = {"uint8": 200, "bool": 1, "bfloat16": 129, "float16": 40000, "float64": 3}
REFUSED = "{}: the count requires a gradient, but it is treated as a constant. Pass count.detach()."


@on_ranks(1)
def test_counts_of_any_dtype_are_not_rounded_and_leave_that_of_gradients():
    """Those that require a gradient are refused: the division by them has one that no form adds."""
    params = fs.shard({"w": torch.ones(())}, fs.ddp(one_axis()))
    for dtype, number in NARROW.items():
        count = torch.tensor(number).to(getattr(torch, dtype))
        step = fs.accumulate(lambda p, _: (fs.gather(p)["w"] * 1.0, count), reduce="weighted")  # noqa: B023
        value, grads = step(params, range(3))
        assert_trees_close(3 / value.item(), 3.0 * number, **within(3.0 * number, terms=3, dtype=torch.float32))
        assert grads["w"].local.dtype is torch.float32
    count = torch.full((), 6.0, requires_grad=True)
    for name, run in FORMS.items():
        with pytest.raises(ValueError, match=f"^{re.escape(REFUSED.format(name))}$"):
            run(lambda p, _: (fs.gather(p)["w"].square(), count), params, None)
