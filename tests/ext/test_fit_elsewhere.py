"""A step with a memory budget, planned without ranks: its peak, and the gathers that it repeats."""

import functools

import torch
from torch import nn

import fshard as fs
from fshard.testing import spmd
from tests.jit.steps import trained
from tests.ranks import my_rank
from tests.trees import normal, one_axis

WIDTH = 32


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + nn.functional.gelu(self.linear(x))


def make_case():
    """A step of layers that are gathered one by one."""
    model = fs.functionalize(nn.Sequential(*(Layer() for _ in range(3))), Layer)
    params = model.init(fs.zero3(one_axis(), min_shard_elements=0, bucket_bytes=0), seed=0)
    draw = normal(my_rank())
    batches = [(draw(128, WIDTH, dtype=torch.float32),) for _ in range(2)]
    return trained(lambda params, x: model.apply(params, x).square().mean(), params, batches)


def fitted(case, budget):
    passes = () if budget is None else (fs.fit(budget),)
    return fs.jit(case.step, donate_argnums=0, passes=passes)


def plan_of(case, budget=None):
    # The ranks of these tests are on gloo.
    return fs.plan(fitted(case, budget), case.state, *case.batches[0], mesh={"shard": 2}, backend="gloo")


@functools.cache
def plan_in_one_process():
    """What one process plans for two ranks, without a budget and with one: the arguments, and a part of the rest."""

    def plans():
        case = make_case()
        plan = plan_of(case)
        budget = plan.arguments.total + int(0.6 * (plan.peak_bytes - plan.arguments.total))
        return plan, budget, plan_of(case, budget)

    return spmd(plans, 1)[0]


def peak_of_rank(budget):
    """The peak of the graph that a rank of a mesh runs, arguments included."""
    case = make_case()
    graph = fs.make_graph(fitted(case, budget))(case.state, *case.batches[0])
    return sum(graph.memory.always_held.values()) + graph.peak_bytes()


def test_plan_predicts_the_peak_of_a_step_with_a_budget_without_ranks():
    plan, budget, fitting = plan_in_one_process()
    assert fitting.peak_bytes <= budget < plan.peak_bytes
    assert fitting.arguments == plan.arguments
    assert len(fitting.timeline) > len(plan.timeline)
    assert spmd(functools.partial(peak_of_rank, budget), 2) == [fitting.peak_bytes] * 2


def test_gathers_that_a_budget_repeats_are_counted_by_unit_and_by_axis():
    plan, _, fitting = plan_in_one_process()
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
