"""The contract in programs of extensions: ranks that differ, and whose peer fails, end with an error that names it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
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
    check_shapes_that_differ_between_ranks_are_named_on_all,
)


def attention_of(attention: Callable[..., Any], x: Any, axis: fs.Axis) -> Any:
    heads = x.view(1, -1, 2, 2).transpose(1, 2)
    return attention(heads, heads, heads)


def exchanged(x: Any, axis: fs.Axis) -> Any:
    return attention_of(fs.ulysses(F.scaled_dot_product_attention, axis), x, axis)


def around(x: Any, axis: fs.Axis) -> Any:
    return attention_of(partial(fs.ring_attention, axis=axis), x, axis)


def dispatched(x: Any, axis: fs.Axis) -> Any:
    rows, _ = fs.moe.dispatch(x[:8], fs.moe.route(x[:8, :2]), axis, capacity=len(x))
    return rows


OPERATORS = ((exchanged, "ulysses|all_to_all"), (around, "ring_attention"), (dispatched, "moe|all_to_all"))


def test_shapes_that_differ_between_ranks_are_named_on_all():
    for operator in OPERATORS:
        check_shapes_that_differ_between_ranks_are_named_on_all(*operator)


PLACES = places_of(PROGRAMS)


@pytest.mark.rows(3)
@pytest.mark.parametrize("world_size", (2, "2 processes", "4 processes"))
@pytest.mark.parametrize("fault, then", FAULTS)
@pytest.mark.parametrize("name, place", PLACES)
def test_a_rank_that_raises_is_named_on_all(name, place, fault, then, world_size, workers):
    world = world_of(world_size, workers)
    assert check_a_rank_that_raises_is_named_on_all(PROGRAMS[name][0], place, fault, then, world) == []


@pytest.mark.rows(1)
@pytest.mark.parametrize("fault", ("kill", "exit"))
@pytest.mark.parametrize("size", (2, 4))
@pytest.mark.parametrize("name, place", PLACES)
def test_a_rank_that_is_killed_is_named_on_all(name, place, size, fault, tmp_path, monkeypatch):
    check_a_rank_that_is_killed_is_named_on_all(PROGRAMS[name][0], place, size, fault, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("size", (2, 4))
def test_a_rank_that_does_not_come_is_named_at_the_timeout(size):
    check_a_rank_that_does_not_come_is_named_at_the_timeout(PROGRAMS["1f1b"][0], "stage", size)


@on_ranks("2 processes", pytest.param("4 processes", marks=pytest.mark.slow), timeout=90.0)
def test_nothing_is_raised_where_a_rank_is_slow():
    names = ("1f1b", "ring")
    return check_nothing_is_raised_where_a_rank_is_slow([PROGRAMS[name][0] for name in names])
