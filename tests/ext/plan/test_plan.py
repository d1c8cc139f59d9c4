"""The figures of a plan, the state that it leaves alone, and budgets that it holds or breaks."""

import re
from itertools import takewhile

import pytest
import torch
import torch.distributed as dist

import fshard as fs
from fshard.ext.plan.report import Rates
from fshard.testing import assert_budget
from tests.ext.plan.models import Case, Masked, prepared
from tests.jit.steps import refused
from tests.ranks import on_ranks


def one_rank():
    return fs.init_mesh({"shard": 1}, device="cpu")


def planned(case=None, **options):
    step, state, batch = prepared(case or Case("zero3"), one_rank())
    return fs.plan(step, state, *batch, **({"mesh": {"shard": 4}} | options))


def nbytes(tree):
    return sum(leaf.nbytes for leaf in fs.tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def test_one_rank_holds_its_state_and_sends_nothing():
    step, state, batch = prepared(Case("zero3"), one_rank())
    plan = fs.plan(step, state, *batch, mesh={"shard": 1})
    assert plan.arguments.parameters == nbytes(state.params)
    # The optimizer counts updates.
    assert plan.arguments.optimizer_state == nbytes(state.opt_state)
    assert plan.arguments.inputs == nbytes(batch) + state.step.nbytes
    assert plan.arguments.total == nbytes(state) + nbytes(batch)
    assert not plan.collectives()
    assert plan.flops > 0
    # Nothing waits.
    assert plan.seconds > plan.waiting == 0
    # As the graph tells it.
    assert plan.peak_bytes == plan.arguments.total + fs.make_graph(step)(state, *batch).peak_bytes()


@pytest.mark.slow
def test_parts_of_the_peak_add_up_and_shrink_with_the_mesh():
    plans = [planned(mesh={"shard": ranks}) for ranks in (2, 4, 4096)]
    for plan in plans:
        assert plan.peak_bytes == sum(plan.peak) == max(sum(moment.held) for moment in plan.timeline)
        assert all(min(moment.held) >= 0 for moment in plan.timeline)
    assert [plan.arguments.parameters for plan in plans] == sorted(
        (p.arguments.parameters for p in plans), reverse=True
    )
    assert plans[0].flops == plans[1].flops == plans[2].flops


def test_gathered_units_go_in_and_out():
    step, state, batch = prepared(Case("zero3", layers=3), one_rank(), merge_bytes=0)
    plan = fs.plan(step, state, *batch, mesh={"shard": 4})
    # Reduced gradients are a unit's too, and stay.
    before = takewhile(lambda moment: moment.collective is None or moment.collective.op == "all_gather", plan.timeline)
    there = [moment.units for moment in before]
    assert {unit for units in there for unit in units} == {"0", "1", "2"}
    assert not any({"0", "1", "2"} <= set(units) for units in there)


def test_text():
    plan = planned()
    text = str(plan)
    assert text.startswith("mesh shard 4: ")
    for word in ("optimizer state", "in flight", "sent by axis", "sent by unit"):
        assert word in text
    assert "\n  held at the peak; what is not held then is 0\n    parameters " in text
    rates = "400 TFLOP/s, memory 2500 GB/s, link 40 GB/s, latency 20 us"
    assert text.endswith(f" of it waiting: an estimate from these rates:\n    {rates}")


@pytest.mark.slow
def test_rates_make_the_estimate():
    slow = planned(rates=Rates(link=1e6))
    assert slow.seconds > planned().seconds
    assert slow.waiting > slow.bytes_sent() / 1e6 * 0.5
    assert planned(rates=Rates(link={"shard": 1e6})).seconds == slow.seconds


def test_a_state_of_any_device_and_process_will_do():
    step, state, batch = prepared(Case("zero3"), one_rank())
    expected = str(fs.plan(step, state, *batch, mesh={"shard": 8}))
    meta = fs.tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, state)
    assert str(fs.plan(step, meta, *(leaf.to("meta") for leaf in batch), mesh={"shard": 8})) == expected


@pytest.mark.slow
@on_ranks(2)
def test_real_ranks_are_not_disturbed():
    step, state, batch = prepared(Case("zero3", donated=False), fs.init_mesh({"shard": 2}, device="cpu"))
    before, _ = step(state, *batch)
    text = str(fs.plan(step, state, *batch, mesh={"shard": 64}, rank=dist.get_rank()))
    after, _ = step(state, *batch)
    leaves = zip(fs.tree_leaves(before), fs.tree_leaves(after), strict=True)
    assert all(torch.equal(a, b) for a, b in leaves)
    assert len(step.traces) == 1
    return text


def test_fake_tensors_are_enough():
    """A tree of 4 TB, and an axis among the arguments."""
    from torch._subclasses import FakeTensorMode

    def plan(rows):
        mesh = one_rank()
        with FakeTensorMode():
            params = fs.shard({"w": torch.ones(rows, 512)}, fs.zero3(mesh))
            state, x = fs.TrainState.create(params, fs.adamw(0.1)), torch.ones(1, rows)

        def step(state, axis, x):
            loss, grads = fs.value_and_grad(lambda p: fs.pmean((x @ fs.gather(p)["w"]).sum(), axis))(state.params)
            return fs.update(fs.adamw(0.1), state, grads), loss

        return fs.plan(step, state, fs.axis_of(mesh), x, mesh={"shard": 8})

    large = plan(2**31)
    assert large.arguments.parameters == 2**31 * 512 * 4 // 8
    assert large.bytes_sent() == large.arguments.parameters * 7 * 2


def closing_over(mesh):
    axis = fs.axis_of(mesh)

    def step(params, x):
        return fs.psum(fs.gather(params)["w"].sum(), axis)

    return step


NO_MESH = 'mesh to be a mapping from names of axes to whole numbers of ranks from 1, as {"shard": 4096}, got'
OTHER_AXES = "mesh to have the state's axes, 'shard', got {}; give each a size, or make the state with a strategy of"
ERRORS = (
    ({"mesh": 4}, f"{NO_MESH} 4"),
    ({"mesh": {"shard": 2.5}}, f"{NO_MESH} {{'shard': 2.5}}"),
    ({"mesh": {"data": 4}}, OTHER_AXES.format("'data'")),
    ({"mesh": {"shard": 4, "tp": 2}}, OTHER_AXES.format("'shard', 'tp'")),
    ({"rank": 4}, "rank to be a whole number from 0 to 3 for the mesh {'shard': 4}, got 4"),
    ({"backend": "mpi"}, "backend to be one of ('nccl', 'gloo'), got 'mpi'"),
    ({"rates": Rates(flops=0)}, "flops to be a number above 0, got 0"),
    ({"rates": Rates(link={"tp": 1.0})}, "link of shard to be a number above 0, got None"),
)


def refused_text(call):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        call()
    return str(caught.value)


def test_what_makes_no_sense_is_refused():
    mesh = one_rank()
    step, state, batch = prepared(Case("zero3"), mesh)
    for options, text in ERRORS:
        given = {"mesh": {"shard": 4}} | options
        assert refused_text(lambda: fs.plan(step, state, *batch, **given)).startswith(f"plan: expected {text}")  # noqa: B023
    params = fs.shard({"w": torch.ones(64, 64)}, fs.zero3(mesh))
    spec = fs.zero3(fs.Axis("shard", 1, "")).layout(fs.Spec((8, 256)))
    for call, given, text in (
        (closing_over(mesh), params, "got 'shard' of 1 ranks, which the step closes over; pass axes as arguments, or"),
        (3, params, "plan: expected step to be a function of (state, *batch), got an int"),
        (lambda *_: 1, torch.ones(2), "got arguments without a Sharded leaf; make it by fs.shard"),
        (
            lambda *_: 1,
            {"w": fs.Sharded(torch.zeros(7, 256), spec)},
            "['w']: expected a local tensor of shape (8, 256), got",
        ),
    ):
        assert text in refused_text(lambda: fs.plan(call, given, torch.ones(2), mesh={"shard": 4}))  # noqa: B023
    step(state, *batch)
    donated = refused_text(lambda: fs.plan(step, state, *batch, mesh={"shard": 4}))
    assert "pass what a step returned for a state that it was donated" in donated


def test_buffers_without_values_are_planned_where_the_state_has_them():
    with torch.device("meta"):
        model = fs.functionalize(Masked(1))
    tx = fs.sgd(0.1)
    state = fs.TrainState.create(model.init(fs.zero3(one_rank()), seed=0), tx, buffers=model.buffers)

    def step(state, x):
        loss = fs.value_and_grad(lambda params: model.apply(params, x, buffers=state.buffers), has_aux=True)
        (value, buffers), grads = loss(state.params)
        return fs.update(tx, state, grads)._replace(buffers=buffers), value

    plan = fs.plan(step, state, torch.ones(2, 64), mesh={"shard": 4})
    assert plan.arguments.inputs == nbytes(torch.ones(2, 64)) + nbytes(state.buffers) + state.step.nbytes


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


def test_bad_budgets_are_refused():
    step, args = step_and_args()
    for budget, text in (
        ({}, "assert_budget: expected peak_bytes=, bytes_sent= or collectives=, got none of them"),
        ({"peak_bytes": "80 apples"}, NBYTES.format("peak_bytes", "'80 apples'")),
        ({"bytes_sent": True}, NBYTES.format("bytes_sent", True)),
        ({"collectives": 1.5}, f"{COUNTS}, got 1.5"),
        ({"collectives": {"gather": 1}}, f"{COUNTS}, got {{'gather': 1}}"),
    ):
        with refused(text):
            assert_budget(step, args, mesh=MESH, **budget)
