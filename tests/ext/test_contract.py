"""The contract in programs of extensions: ranks that differ, and whose peer fails, end with an error that names it."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import fshard as fs
from tests.ext.faults import PROGRAMS
from tests.faults import places_of
from tests.ranks import on_ranks, world_of
from tests.test_contract import (
    FAULTS,
    check_a_rank_that_does_not_come_is_named_at_the_timeout,
    check_a_rank_that_is_killed_is_named_on_all,
    check_a_rank_that_raises_is_named_on_all,
    check_nothing_is_raised_where_a_rank_is_slow,
    check_ranks_that_differ_are_told_how,
)

# Heads of a sequence of some length, and each length, which an operator may halve.
SHORT, LONG = torch.ones(1, 2, 422, 2), torch.ones(1, 2, 446, 2)
SHAPES = (r"\b(422|211|844)\b", r"\b(446|223|892)\b")


def dispatch(x, axis):
    rows = x[0, 0, :8]
    return fs.moe.dispatch(rows, fs.moe.route(rows), axis, capacity=x.shape[2])


DIFFERENT = {
    "ulysses": (lambda x, axis: fs.ulysses(F.scaled_dot_product_attention, axis)(x, x, x), "ulysses|all_to_all"),
    "ring_attention": (lambda x, axis: fs.ring_attention(x, x, x, axis, is_causal=True), "ring_attention"),
    "moe.dispatch": (dispatch, "moe|all_to_all"),
}


@pytest.mark.parametrize("world_size", (2, pytest.param("2 processes", marks=pytest.mark.slow)))
def test_ranks_that_differ_are_told_how(world_size, workers):
    rows = {name: (partial(f, SHORT), partial(f, LONG), text, *SHAPES) for name, (f, text) in DIFFERENT.items()}
    check_ranks_that_differ_are_told_how(rows, world_of(world_size, workers))


@pytest.mark.rows(2)
@pytest.mark.parametrize("world_size", (2, "2 processes", "4 processes"))
@pytest.mark.parametrize("fault, then", FAULTS)
@pytest.mark.parametrize("name, place", places_of(PROGRAMS))
def test_a_rank_that_raises_is_named_on_all(name, place, fault, then, world_size, workers):
    world = world_of(world_size, workers)
    assert check_a_rank_that_raises_is_named_on_all(PROGRAMS[name][0], place, fault, then, world) == []


@pytest.mark.parametrize("fault", ("kill", pytest.param("exit", marks=pytest.mark.slow)))
def test_a_rank_that_is_killed_is_named_on_all(fault, tmp_path, monkeypatch):
    check_a_rank_that_is_killed_is_named_on_all(PROGRAMS["1f1b"][0], "backward", 2, fault, tmp_path, monkeypatch)


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_at_the_timeout():
    check_a_rank_that_does_not_come_is_named_at_the_timeout(PROGRAMS["1f1b"][0], "stage", 4)


@pytest.mark.slow
@on_ranks("2 processes", "4 processes", timeout=90.0)
def test_nothing_is_raised_where_a_rank_is_slow():
    return check_nothing_is_raised_where_a_rank_is_slow([PROGRAMS["1f1b"][0], PROGRAMS["ring"][0]])
