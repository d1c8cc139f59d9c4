"""fs.fit: the step keeps its bits, and no more bytes than the budget are held."""

import re
from functools import cache
from itertools import pairwise
from random import Random
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fshard as fs
from fshard.ext.fit.schedule import Cut, Schedule, StaleError, build
from fshard.ext.fit.search import find_plan
from fshard.ext.fit.step import StepFacts
from fshard.extend import Rates, find_lifetimes, prepare, process_rank
from fshard.testing import spmd
from tests.trees import assert_same_bits, one_axis, two_axes
from tests.unit_models import VOCABULARY, WIDTH, Block, Dropped, Language, filled, tie_head


def make_module(layers=2, has_dropout=False, is_tied=False, is_checkpointed=False):
    """A language model, perhaps with dropout and with blocks that are checkpointed."""
    module = Language(tie_head if is_tied else lambda model: None, hidden=(4 * WIDTH,) * layers)
    if has_dropout or is_checkpointed:
        module.blocks = nn.ModuleList(Dropped(4 * WIDTH, is_checkpointed) for _ in range(layers))
    return filled(module.train(has_dropout), None)


class Case(NamedTuple):
    """A kind of step, by what differs from the plainest one."""

    strategy: Any = lambda: fs.zero3(one_axis(), min_shard_elements=0)
    model: Any = MappingProxyType({})
    microbatches: int = 1
    donates: bool = True
    has_key: bool = False


CASES = {
    "zero3": Case(),
    "ddp, tied, bfloat16": Case(
        lambda: fs.ddp(one_axis(), param_dtype=torch.bfloat16), model={"layers": 1, "is_tied": True}
    ),
    "zero2, checkpointed, not donated": Case(
        lambda: fs.zero2(one_axis(), min_shard_elements=0), model={"layers": 1, "is_checkpointed": True}, donates=False
    ),
    "hsdp, units alone, microbatches": Case(
        lambda: fs.hsdp(two_axes(dist.get_world_size()), bucket_bytes=0, min_shard_elements=100),
        model={"layers": 1},
        microbatches=2,
    ),
    "dropout, checkpointed": Case(model={"layers": 1, "has_dropout": True, "is_checkpointed": True}, has_key=True),
}


def make_step(case, passes=()):
    """A train step, its state and the batch of this rank."""
    model = fs.functionalize(make_module(**case.model), units=Block)
    tx = fs.from_torch(torch.optim.AdamW, lr=1e-2, fused=True)
    state = fs.TrainState.create(model.init(case.strategy()), tx, key=torch.tensor(0))
    x = torch.randint(VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(process_rank()))

    def step(state, x):
        def loss_fn(params, x):
            keys = {"key": fs.fold_in(state.key, state.step)} if case.has_key else {}
            return model.apply(params, x, **keys)

        if case.microbatches > 1:
            loss, grads = fs.accumulate(loss_fn)(state.params, list(x.chunk(case.microbatches)))
        else:
            loss, grads = fs.value_and_grad(loss_fn)(state.params, x)
        return fs.update(tx, state, grads, donate=case.donates), loss

    donated = 0 if case.donates else ()
    return fs.jit(step, donate_argnums=donated, passes=passes), state, x


def trace_case(case):
    """The graph of a step, and tensors to run it with."""
    step, state, x = make_step(case)
    traced = step.trace_call((state, x), {})
    leaves = [leaf.local if isinstance(leaf, fs.Sharded) else leaf for leaf in fs.tree_leaves((state, x))]
    return traced, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


@cache
def trace_step(name):
    """That on one rank."""
    return trace_case(CASES[name])


def find_range(step):
    """The least that a step can hold at its peak, and what it holds without a budget."""
    return find_plan(step, 0).peak, Schedule(step, []).peak


RANKS = {"hsdp, units alone, microbatches": 4}


@pytest.mark.rows(len(CASES))
@pytest.mark.parametrize("name", CASES)
def test_steps_within_a_budget_have_the_bits_of_steps_without_one(name):
    """With the least budget, in which most is computed again. Rows of the vocabulary are uneven."""

    def program():
        traced, tensors = trace_case(CASES[name])
        expected = run(traced.module, traced.module.graph, tensors)
        step = StepFacts(traced.module.graph, Rates())
        tightest = find_plan(step, 0)
        assert_same_bits(run(traced.module, build(tightest), tensors), expected)
        return Schedule(step, []).peak, tightest.peak, len(tightest.copies)

    (most, least, *_), *_ = ranges = spmd(program, RANKS.get(name, 2))
    assert len(set(ranges)) == 1
    assert least < most


def count_peak(graph):
    """The peak of a graph, arguments included, by the lifetimes of its storages."""
    lifetimes = find_lifetimes(graph)
    held = [sum(storages.values()) for _, storages in lifetimes.walk()]
    return sum(lifetimes.always_held.values()) + max(held)


@pytest.mark.rows(2)
@pytest.mark.parametrize("name", ("zero3", "ddp, tied, bfloat16"))
def test_a_larger_budget_needs_no_more_time_and_no_more_copies(name):
    """At ten budgets; the graph of each holds what is predicted, no more than its budget, and waits for messages."""
    traced, _ = trace_step(name)
    step = StepFacts(traced.module.graph, Rates())
    least, most = find_range(step)
    schedules = [find_plan(step, least + (most - least) * part // 9) for part in range(10)]
    for part, schedule in enumerate(schedules):
        graph = build(schedule)
        assert count_peak(graph) == schedule.peak <= least + (most - least) * part // 9
        # A buffer that nobody waits for is held until the process ends.
        assert not any(buffer.wait is buffer.start for buffer in find_lifetimes(graph).pending_buffers)
    for smaller, larger in pairwise(schedules):
        assert smaller.peak <= larger.peak
        assert smaller.seconds >= larger.seconds
        assert len(smaller.copies) >= len(larger.copies)
    assert len(schedules[-1].copies) == 0 < len(schedules[0].copies)


def run(module, graph, tensors):
    """Run a graph on copies of tensors, which it may write to, and return what it returns and what it wrote."""
    tensors = [tensor.clone() for tensor in tensors]
    with torch.no_grad():
        results = prepare(torch.fx.GraphModule(module, graph), "graph")(*tensors)
    return [result for result in results if result is not None], tensors


def make_random_step(seed):
    """A function of a weight, which is written to in the middle, and a batch, from random operators."""
    random = Random(seed)

    def f(weight, x):
        values = [x, weight * 2, x @ weight]
        for number in range(14):
            first, second = random.choices(values, k=2)
            kind = random.choice(("sin", "add", "mm", "split", "view", "norm"))
            if kind == "sin":
                values.append(first.sin())
            elif kind == "add":
                values.append(first + second)
            elif kind == "mm":
                values.append(first @ second)
            elif kind == "split":
                values += [part.repeat(2, 1) for part in torch.split(first, 4)]
            elif kind == "view":
                values.append(first.t().cos())
            else:
                values.append(torch.nn.functional.layer_norm(first, (8,)))
            if number == 7:
                values.append(weight.sin())
                weight.mul_(1.5)
                values.append(weight.cos())
        return weight, sum(value.sum() for value in values[::-1]) + sum(map(torch.mean, values))

    return fs.jit(f, donate_argnums=0)


@pytest.mark.rows(5)
@pytest.mark.parametrize("seed", range(5))
def test_random_graphs_keep_their_bits_at_every_budget(seed):
    tensors = [torch.randn(8, 8, generator=torch.Generator().manual_seed(n)) for n in (seed, seed + 100)]
    traced = make_random_step(seed).trace_call(tuple(tensors), {})
    step = StepFacts(traced.module.graph, Rates())
    expected = run(traced.module, traced.module.graph, tensors)
    least, most = find_range(step)
    for budget in range(least, most + 1, 256):
        schedule = find_plan(step, budget)
        graph = build(schedule)
        assert count_peak(graph) == schedule.peak <= budget
        assert_same_bits(run(traced.module, graph, tensors), expected)


def test_nothing_is_computed_again_from_what_has_been_written_since():
    """As early updates write to leaves while the backward goes on."""

    def f(weight, x):
        kept = weight.sin()
        updated = weight + 1
        total = torch.cat([x] * 8).sum()
        return updated, kept * total

    step = fs.jit(f, donate_argnums=0)
    tensors = (torch.randn(64), torch.randn(64))
    traced = step.trace_call(tensors, {})
    facts = StepFacts(traced.module.graph, Rates())
    (kept,) = [node for node in facts.graph.nodes if "sin" in str(node.target)]
    (write,) = [node for node in facts.graph.nodes if "copy_" in str(node.target)]
    assert facts.copy_until[kept] is write
    with pytest.raises(StaleError, match="sin"):
        Schedule(facts, cut_behind(facts, kept, write))


def cut_behind(facts, node, time):
    """Cuts of all results of a node behind another."""
    return [Cut(storage, time, 0, 0, nbytes) for storage, nbytes in facts.storages[node].items()]


def test_results_of_one_operator_are_taken_apart_at_once():
    """Otherwise the copy of the first would be held until the second is used."""

    def f(x):
        values, indices = x.cummax(0)
        total = torch.cat([x] * 8).sum()
        first = (values * total).sum()
        return first, (indices * torch.cat([x] * 4).sum()).sum()

    traced = fs.jit(f).trace_call((torch.randn(64),), {})
    step = StepFacts(traced.module.graph, Rates())
    nodes = list(step.graph.nodes)
    (number,) = [number for number, node in enumerate(nodes) if "cummax" in str(node.target)]
    schedule = Schedule(step, cut_behind(step, nodes[number], nodes[number + 2]))
    values, indices = step.storages[nodes[number]]
    last_use = {buffer.storage: buffer.uses[-1] for buffer in schedule.buffers if buffer.uses}
    assert len(schedule.copies) == 3
    assert last_use[values] < last_use[indices] - 3
    assert count_peak(build(schedule)) == schedule.peak


def test_a_residual_block_whose_output_nobody_reads_again_can_be_fitted():
    """Its copies need results that a plan has dropped before and makes again only where they are used."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            y = self.linear(x).sin()
            return x + y * y

    model = fs.functionalize(nn.Sequential(*(Layer() for _ in range(6))), units=Layer)
    params = model.init(fs.zero3(one_axis(), min_shard_elements=0), seed=0)
    step = fs.jit(fs.value_and_grad(lambda params, x: model.apply(params, x).sum()))
    traced = step.trace_call((params, torch.ones(64, WIDTH)), {})
    facts = StepFacts(traced.module.graph, Rates())
    least, most = find_range(facts)
    for budget in range(least, most, max(1, (most - least) // 10)):
        assert count_peak(build(find_plan(facts, budget))) <= budget


def test_the_least_budget_can_be_asked_for_and_a_byte_less_is_refused():
    """The error says what is held at its peak, before anything runs; the state can be used afterwards."""
    name = "zero2, checkpointed, not donated"
    least, _ = find_range(StepFacts(trace_step(name)[0].module.graph, Rates()))
    step, state, x = make_step(CASES[name], (fs.fit(least - 1),))
    with pytest.raises(ValueError, match="the pass fit") as refused:
        step(state, x)
    text = str(refused.value)
    assert f"jit: the pass fit: the step needs at least {least} bytes, and the budget is {least - 1}." in text
    assert re.search(r"most are held at \w+: \d+ bytes of arguments, and the results of \w+ \(\d+\)", text)
    step, *_ = make_step(CASES[name], (fs.fit(least),))
    step(state, x)


def test_copies_say_what_was_chosen():
    """Full leaves that are held from the forward to the backward are gathered again, one by one."""
    case = Case(lambda: fs.zero2(one_axis(), bucket_bytes=0, min_shard_elements=0))

    def program():
        traced, _ = trace_case(case)
        if process_rank() > 0:
            return []
        least, _ = find_range(StepFacts(traced.module.graph, Rates()))
        passed = fs.fit(least)(traced)
        copies = [node for node in passed.traced.module.graph.nodes if "fit" in node.meta]
        assert {node.meta["fit"] for node in copies} == {"recompute", "gather"}
        assert passed.facts.startswith(f"{len(copies)} copies, {least} bytes, ")
        return [len(node.args[0]) for node in copies if node.meta["fit"] == "gather"]

    assert set(spmd(program, 2)[0]) == {1}


def test_batches_that_are_rows_of_one_tensor_have_one_plan():
    """Ranks compare their plans, and the rows of others lie in front of a rank's own."""
    rows = torch.randn(2, 6, 4)

    def program():
        params = fs.shard({"w": torch.ones(4, 4)}, fs.zero3(one_axis()))
        value_and_grad = fs.value_and_grad(lambda params, x: (x @ fs.gather(params)["w"]).square().mean())
        jitted = fs.jit(value_and_grad, passes=(fs.fit("1MB"),))
        loss, _ = jitted(params, rows[process_rank()])
        assert_same_bits(loss, value_and_grad(params, rows[process_rank()])[0])

    spmd(program, 2)


def test_a_step_that_fits_stays_as_it_is():
    traced, _ = trace_step("zero3")
    passed = fs.fit("1GB")(traced)
    assert passed.traced.module is traced.module


def test_budgets_are_bytes_or_texts():
    for budget, expected in (
        (7, 7),
        ("7", 7),
        ("10GB", 10**10),
        ("1.5 kB", 1500),
        ("512MiB", 2**29),
        (" 2 TiB ", 2**41),
    ):
        assert fs.fit(budget).budget == expected
    assert fs.fit("1kB") == fs.fit(1000)
    assert hash(fs.fit("1kB")) == hash(fs.fit(1000))


@pytest.mark.parametrize("budget", (0, -1, 1.5, True, "", "10 parsecs", "GB", "-1GB", "0GB", "0.1", None))
def test_what_is_no_budget_is_refused(budget):
    """The error shows the budget as it was given, and a call that would work."""
    with pytest.raises(ValueError, match="budget") as refused:
        fs.fit(budget)
    expected = 'bytes (at least 1), or a text such as "10GB" or "512MiB"'
    assert str(refused.value) == f"fit: expected budget to be {expected}, got {budget!r}"


def test_rates_are_those_of_plan():
    """Rates are refused before anything is traced, and an axis without a rate when something is gathered over it."""
    for rates, text in (
        (3, r"rates to be a fshard\.ext\.plan\.Rates"),
        (Rates(flops=0), "flops to be a number above 0, got 0"),
    ):
        with pytest.raises(ValueError, match=f"^fit: expected {text}"):
            fs.fit(1, rates=rates)
    fitted = fs.fit("1GB", Rates(link={"tp": 1e9}))

    def program():
        step, state, x = make_step(CASES["zero3"], (fitted,))
        with pytest.raises(ValueError, match="the pass fit: plan: expected link of shard to be a number above 0"):
            step(state, x)

    spmd(program, 2)
