"""Ranks whose collectives or verbs do not match, or of which one fails: every rank names it, and goes on anew."""

import re
import time
from typing import NamedTuple

import pytest
import torch

import fshard as fs
from fshard.testing import spmd
from tests.ranks import BreaksInBackward, BrokenError, my_rank, on_ranks, world_of
from tests.trees import assert_same_bits, normal, one_axis

# A call that some rank never comes to would wait for the timeout of the process group, which is minutes.
SECONDS = 20.0


class Outcome(NamedTuple):
    """What a call did on one rank."""

    kind: str
    text: str


def full_values():
    """Of one shape, so that nothing but their names can tell them apart."""
    draw = normal()
    return {"blocks": [draw(4, 4) for _ in range(4)]}


def strategies(mesh):
    """Of two ranks; how three of them agree depends on none of it."""
    found = {"zero3": fs.zero3(mesh, min_shard_elements=0), "ddp": fs.ddp(mesh)}
    return found if mesh.size() == 2 else {"zero3": found["zero3"]}


def outcomes(call, good, params):
    """Make a call that fails, then one that does not, which must be as if there had been no other."""
    expected, before = good(params), fs.tree_map(torch.clone, params)
    started = time.monotonic()
    try:
        found = Outcome("no error", str(call(params)))
    except Exception as error:
        found = Outcome(type(error).__name__, str(error))
    assert time.monotonic() - started < SECONDS / 2
    assert_same_bits(fs.tree_leaves(params), fs.tree_leaves(before))
    # Groups that are broken are made anew.
    one_axis()
    assert_same_bits(fs.tree_leaves(good(params)), fs.tree_leaves(expected))
    return found


def chain(params, order=(0, 1, 2, 3), broken=lambda place, x: x):
    """A loss that gathers blocks one by one in some order; `broken` is called between them."""
    x = torch.ones(2, 4, dtype=torch.float64)
    for place, i in enumerate(order):
        x = torch.tanh(broken(place, x) @ fs.gather(params["blocks"][i]))
    return broken(len(order), x).square().sum()


# The orders in which ranks gather, by rank, and what of the difference must be named.
ORDERS = {
    "one more on the first rank": ([(0, 1, 2, 3), (0, 1, 2)], ["['blocks'][3]"]),
    "one more at the start": ([(0, 1, 2), (1, 2)], ["['blocks'][0]"]),
    "another order": ([(0, 1, 2, 3), (0, 2, 1, 3)], ["['blocks'][1]", "['blocks'][2]"]),
    "one twice": ([(0, 1), (0, 0, 1)], ["['blocks'][1]", "['blocks'][0]"]),
}


@pytest.mark.rows(4)
@pytest.mark.parametrize("name", ORDERS)
@on_ranks(2, 3, "2 processes", timeout=SECONDS)
def test_ranks_that_gather_different_things_are_all_told(name):
    orders, names = ORDERS[name]
    # Ranks beyond the table take its last entry.
    order = orders[min(my_rank(), 1)]
    for strategy, transform in strategies(one_axis()).items():
        found = outcomes(
            fs.value_and_grad(lambda p: chain(p, order)), fs.value_and_grad(chain), fs.shard(full_values(), transform)
        )
        if name == "one twice" and strategy == "ddp":
            # A full tensor that is kept serves again without a message.
            assert found.kind == "no error", found
            continue
        assert found.kind == "CollectiveError", found
        assert found.text.startswith("ranks differ in a collective\n  rank 0: "), found
        assert any(name in found.text for name in names), found


def breaking(where, what):
    """What to do between the layers: at one of them raise an error, now or in the backward."""

    def broken(place, x):
        # The backward does not come to the input, but to what the first layer made of it.
        if what == "in the backward" and where is not None and place == max(where, 1):
            return BreaksInBackward.apply(x, f"at {where}")
        if what == "in the forward" and place == where:
            raise BrokenError(f"at {where}")
        return x

    return broken


# On which rank and where between the layers it breaks: before the first one, between two, behind the last one.
# The last two break on both ranks.
PLACES = [{1: 0}, {0: 2}, {1: 4}, {0: 3, 1: 1}, {0: 2, 1: 2}]


def of_function():
    """A step of a function, and parameters by strategy."""
    trees = {name: fs.shard(full_values(), transform) for name, transform in strategies(one_axis()).items()}
    return fs.value_and_grad(lambda params, broken: chain(params, broken=broken)), trees


def is_own(found, rank, place):
    return rank in place and found == Outcome("BrokenError", f"at {place[rank]}")


def names_another(found, rank, place):
    """Whether a rank was told of another's error, and of where."""
    verbs = "(value_and_grad|apply)"
    others = (rf"rank {n} failed in {verbs}: BrokenError: at {where}\n" for n, where in place.items() if n != rank)
    return found.kind == "CollectiveError" and any(re.match(pattern, found.text) for pattern in others)


def assert_each_is_told(rows, place):
    for strategy in rows[0]:
        found = [row[strategy] for row in rows]
        own = [rank for rank, outcome in enumerate(found) if is_own(outcome, rank, place)]
        # One that would fail later may hear of the other first.
        assert own, (strategy, found)
        assert len(place) > 1 or own == list(place), (strategy, found)
        for rank, outcome in enumerate(found):
            assert rank in own or names_another(outcome, rank, place), (strategy, rank, outcome)


@pytest.mark.rows(6)
@pytest.mark.parametrize("world_size", (2, 3, "2 processes"))
@pytest.mark.parametrize("what", ("in the forward", "in the backward"))
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_rank_that_fails_raises_its_own_error_and_the_others_name_it(place, what, world_size, workers):
    def program():
        run, trees = of_function()
        broken = breaking(place.get(my_rank()), what)
        return {
            strategy: outcomes(lambda p: run(p, broken), lambda p: run(p, lambda place, x: x), params)
            for strategy, params in trees.items()
        }

    assert_each_is_told(spmd(program, world_of(world_size, workers), timeout=SECONDS), place)
