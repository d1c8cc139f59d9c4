"""A step with a memory budget: planned without ranks, on ranks, in a file, and compared between ranks."""

import functools
import re

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.testing import spmd
from tests.ext.test_graph_pass import facts_of, operations_of
from tests.jit.steps import trained
from tests.ranks import my_rank, on_ranks
from tests.trees import assert_alike, copied, normal, one_axis

WIDTH = 32


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + nn.functional.gelu(self.linear(x))


def make_case(rows=128):
    """A step of layers that are gathered one by one."""
    model = fs.functionalize(nn.Sequential(*(Layer() for _ in range(3))), Layer)
    params = model.init(fs.zero3(one_axis(), min_shard_elements=0, bucket_bytes=0), seed=0)
    draw = normal(my_rank())
    batches = [(draw(rows, WIDTH, dtype=torch.float32),) for _ in range(2)]
    return trained(lambda params, x: model.apply(params, x).square().mean(), params, batches)


def fitted(case, budget):
    passes = () if budget is None else (fs.fit(budget),)
    return fs.jit(case.step, donate_argnums=0, passes=passes)


def plan_of(case, ranks, budget=None):
    # The ranks of these tests are on gloo, whose graphs grow with the mesh.
    backend = "gloo" if ranks <= 8 else "nccl"
    return fs.plan(fitted(case, budget), case.state, *case.batches[0], mesh={"shard": ranks}, backend=backend)


def choose_budget(plan, part):
    """The arguments, and a part of what a step takes besides."""
    return plan.arguments.total + int(part * (plan.peak_bytes - plan.arguments.total))


def plans_of(ranks, part, rows):
    """What one process plans for ranks of a mesh, without a budget and with one."""
    case = make_case(rows)
    plan = plan_of(case, ranks)
    budget = choose_budget(plan, part)
    return plan, budget, plan_of(case, ranks, budget)


@functools.cache
def plan_in_one_process(*arguments):
    (plans,) = spmd(functools.partial(plans_of, *arguments), 1)
    return plans


@pytest.fixture
def plan():
    """The plan of two ranks without a budget, made once for all tests of them."""
    return plan_in_one_process(2, 0.6, 128)[0]


def peak_of_rank(budget):
    """The peak of the graph that a rank of a mesh runs, arguments included."""
    case = make_case()
    graph = fs.make_graph(fitted(case, budget))(case.state, *case.batches[0])
    return sum(graph.memory.always_held.values()) + graph.peak_bytes()


@pytest.mark.parametrize("ranks, part, rows", [(2, 0.6, 128), pytest.param(4096, 0.8, 4096, marks=pytest.mark.slow)])
def test_plan_predicts_the_peak_of_a_step_with_a_budget_without_ranks(ranks, part, rows):
    plan, budget, fitting = plan_in_one_process(ranks, part, rows)
    assert fitting.peak_bytes <= budget < plan.peak_bytes
    assert fitting.arguments == plan.arguments
    assert len(fitting.timeline) > len(plan.timeline)
    if ranks == 2:
        assert spmd(functools.partial(peak_of_rank, budget), ranks) == [fitting.peak_bytes] * ranks


def test_gathers_that_a_budget_repeats_are_counted_by_unit_and_by_axis():
    plan, _, fitting = plan_in_one_process(2, 0.6, 128)
    repeated = [collective for collective in fitting.collectives() if collective.op == "all_gather"]
    more = len(repeated) - sum(collective.op == "all_gather" for collective in plan.collectives())
    assert more > 0
    units = {
        name: fitting.by_unit()[name].collectives - traffic.collectives for name, traffic in plan.by_unit().items()
    }
    assert sum(units.values()) == more
    assert fitting.by_axis()["shard"].collectives == plan.by_axis()["shard"].collectives + more
    sent = [sum(traffic.bytes for traffic in groups.values()) for groups in (fitting.by_unit(), fitting.by_axis())]
    assert sent == [fitting.bytes_sent()] * 2
    assert fitting.bytes_sent() > plan.bytes_sent()


@on_ranks(2)
def test_a_file_keeps_the_choice(plan, tmp_path):
    case = make_case()
    budget = choose_budget(plan, 0.6)
    jitted = fitted(case, budget)
    fs.save_graph(tmp_path, jitted, case.state, *case.batches[0])
    loaded = fs.load_graph(tmp_path)
    expected, states = case.state, [copied(case.state) for _ in range(2)]
    for batch in case.batches:
        expected, loss = case.step(expected, *batch)
        for n, function in enumerate((loaded, jitted)):
            states[n], value = function(states[n], *batch)
            assert_alike((states[n], value), (expected, loss))
    read, written = ([each for each in operations_of(f) if each[0] != "placeholder"] for f in (loaded, jitted))
    assert read == written
    assert facts_of(loaded) == facts_of(jitted)
    assert all("passes" in text for text in facts_of(loaded).values())


@on_ranks(2)
def test_ranks_with_other_budgets_are_named(plan):
    case = make_case()
    state = copied(case.state)
    jitted = fitted(case, choose_budget(plan, 0.6 + my_rank() / 5))
    with pytest.raises(ValueError, match=r"different calls\n  passes: expected fit: .* as on the rank at shard=0, got"):
        jitted(state, *case.batches[0])
    assert_alike(fitted(case, None)(state, *case.batches[0]), case.step(case.state, *case.batches[0]))


@on_ranks(2)
def test_what_cannot_fit_is_refused_on_every_rank_and_by_plan_and_the_state_is_kept(plan):
    case = make_case()
    budget = choose_budget(plan, 0.01)
    state = copied(case.state)
    texts = set()
    for call in (
        lambda: fitted(case, budget)(state, *case.batches[0]),
        lambda: plan_of(case, 2, budget),
    ):
        with pytest.raises(ValueError, match=r"^jit: the pass fit: the step needs at least \d+ bytes, ") as caught:
            call()
        texts.add(str(caught.value))
    (text,) = texts
    least = int(re.search(r"at least (\d+) bytes", text)[1])
    assert_alike(fitted(case, least)(state, *case.batches[0]), case.step(case.state, *case.batches[0]))
