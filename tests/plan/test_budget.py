"""assert_budget: budgets that hold, budgets that break and by what, and those that make no sense."""

import re

import pytest

import fshard as fs
from fshard.testing import assert_budget
from tests.jit.steps import refused
from tests.plan.models import Case, prepared
from tests.ranks import on_ranks

MESH = {"shard": 4}
NBYTES = "assert_budget: expected {} to be a number of bytes, 0 or more, or a text such as 80GB or 500 MiB, got {}"
COUNTS = (
    "assert_budget: expected collectives to be a whole number, 0 or more, or one for each op of ('all_gather', "
    "'all_reduce', 'all_to_all', 'reduce_scatter')"
)


def step_and_args(mesh=None, **options):
    step, state, batch = prepared(Case("zero3", layers=3), mesh or fs.init_mesh({"shard": 1}, device="cpu"), **options)
    return step, (state, *batch)


@pytest.mark.slow
def test_a_budget_that_holds_returns_the_plan():
    step, args = step_and_args()
    plan = fs.plan(step, *args, mesh=MESH)
    budget = {"peak_bytes": plan.peak_bytes, "bytes_sent": plan.bytes_sent(), "collectives": len(plan.collectives())}
    assert str(assert_budget(step, args, mesh=MESH, **budget)) == str(plan)
    assert_budget(step, args, mesh=MESH, peak_bytes="1GB", collectives={"all_to_all": 0})


@pytest.mark.slow
def test_a_peak_that_breaks_it_names_what_is_held_and_the_units():
    step, args = step_and_args(merge_bytes=0)
    plan = fs.plan(step, *args, mesh=MESH)
    with pytest.raises(AssertionError) as caught:
        assert_budget(step, args, mesh=MESH, peak_bytes=plan.peak_bytes - 1)
    text = str(caught.value)
    begin = (
        f"assert_budget: the step breaks its budget on a mesh of shard 4\n  peak_bytes is {plan.peak_bytes}, at most "
    )
    assert text.startswith(f"{begin}{plan.peak_bytes - 1} allowed; held ")
    assert "optimizer state 315.03 kB" in text
    assert f"at {plan.at_peak.operator} ({plan.at_peak.name})" in text
    assert all(unit in text for unit in plan.at_peak.units)


def test_traffic_that_breaks_it_names_the_units_that_send_most():
    step, args = step_and_args(merge_bytes=0)
    with pytest.raises(AssertionError) as caught:
        assert_budget(step, args, mesh=MESH, bytes_sent="1MB", collectives={"all_gather": 3, "reduce_scatter": 9})
    text = str(caught.value)
    assert re.search(r"bytes_sent is \d+, at most 1000000 allowed; sent for .*0 447.36 kB, 1 299.90 kB", text)
    assert "collectives of all_gather is 4, at most 3 allowed; issued for 0 2, 1 1, 2 1" in text
    assert "reduce_scatter" not in text


@pytest.mark.slow
@on_ranks(2)
def test_without_a_mesh_the_states_own_counts():
    step, args = step_and_args(fs.init_mesh({"shard": 2}, device="cpu"))
    with pytest.raises(AssertionError, match="on a mesh of shard 2\n  collectives is"):
        assert_budget(step, args, collectives=1)
    step(*args[:1], *args[1:])


@pytest.mark.slow
@pytest.mark.parametrize("strategy, times", [("ddp", 2), ("zero2", 2), ("zero3", 3)])
def test_strategies_stay_in_the_bytes_of_their_formula(strategy, times):
    step, state, batch = prepared(Case(strategy, layers=3), fs.init_mesh({"shard": 1}, device="cpu"))
    stored = sum(leaf.nbytes for leaf in fs.tree_leaves(state.params))
    for ranks in (2, 8, 64):
        assert_budget(step, (state, *batch), mesh={"shard": ranks}, bytes_sent=times * stored * (ranks - 1) / ranks)


@pytest.mark.parametrize(
    "budget, text",
    [
        ({}, "assert_budget: expected peak_bytes=, bytes_sent= or collectives=, got none of them"),
        ({"peak_bytes": "80 apples"}, NBYTES.format("peak_bytes", "'80 apples'")),
        ({"bytes_sent": True}, NBYTES.format("bytes_sent", True)),
        ({"collectives": 1.5}, f"{COUNTS}, got 1.5"),
        ({"collectives": {"gather": 1}}, f"{COUNTS}, got {{'gather': 1}}"),
        ({"collectives": {"all_gather": "1"}}, f"{COUNTS}, got {{'all_gather': '1'}}"),
    ],
)
def test_bad_budgets_are_refused(budget, text):
    step, args = step_and_args()
    with refused(text):
        assert_budget(step, args, mesh=MESH, **budget)


def test_arguments_that_are_no_tuple_are_refused():
    step, args = step_and_args()
    with pytest.raises(
        ValueError, match=r"assert_budget: expected args to be the step's arguments as a tuple, the state first, got .*"
    ):
        assert_budget(step, {"state": args[0]}, collectives=1)
