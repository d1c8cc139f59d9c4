"""Leaves are updated while the backward of others goes on, with the same bits and collectives, in less memory."""

from functools import partial
from importlib import import_module

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.testing import spmd
from fshard.transforms import strategies
from tests.ranks import on_ranks
from tests.trees import assert_same_bits, one_axis

WIDTH, LAYERS = 256, 6
LEAF = 4 * WIDTH * WIDTH
STRATEGIES = {"ddp": fs.ddp, "zero1": fs.zero1, "zero2": fs.zero2, "zero3": fs.zero3}
adamw = partial(fs.from_torch, torch.optim.AdamW, lr=1e-3)
OPTIMIZERS = {
    "fused": partial(adamw, fused=True),
    "foreach": partial(adamw, foreach=True),
    "schedule": lambda: adamw(lr=fs.schedules.cosine(1e-3, 9), fused=True),
    "native": lambda: fs.adamw(1e-3),
    "momentum": partial(fs.from_torch, torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "clipped": lambda: fs.chain(fs.clip_by_global_norm(0.1), adamw(fused=True)),
    "average": lambda: fs.ema(adamw(fused=True), decay=0.9),
    "scaled": lambda: fs.dynamic_loss_scale(adamw(fused=True), init_scale=8.0),
    "two": lambda: fs.partition({"0.*": fs.sgd(0.1), "*": adamw(fused=True)}),
}


@pytest.fixture(autouse=True)
def layers_travel_alone(monkeypatch):
    """Each layer is gathered and reduced by itself, and two gradients are under way at a time."""
    monkeypatch.setattr(strategies, "HOST_BYTES", LEAF)


def case(strategy, optimizer):
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    model = fs.functionalize(module, units=nn.Linear)
    tx = OPTIMIZERS[optimizer]()
    state = fs.TrainState.create(model.init(STRATEGIES[strategy](one_axis()), seed=0), tx)

    def step(state, x):
        loss, grads = fs.value_and_grad(lambda params: model.apply(params, x).square().mean())(state.params)
        return fs.update(tx, state, grads), loss

    batches = [torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    return step, state, batches


def graph_of(monkeypatch, early, strategy="ddp", optimizer="fused", world=2):
    with monkeypatch.context() as patched:
        if not early:
            patched.setattr(import_module("fshard.jit.jit"), "schedule", lambda graph: None)

        def program():
            step, state, batches = case(strategy, optimizer)
            return fs.make_graph(fs.jit(step, donate_argnums=0))(state, batches[0])

        return spmd(program, world)[0]


def places(graph, word):
    return [n for n, node in enumerate(graph.module.graph.nodes) if word in str(node.target)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_bits_are_those_of_the_eager_step(strategy, optimizer):
    step, state, batches = case(strategy, optimizer)
    jitted, given = fs.jit(step, donate_argnums=0), fs.tree_map(torch.clone, state)
    for x in batches:
        state, expected = step(state, x)
        given, loss = jitted(given, x)
        assert_same_bits(fs.unshard((given, loss)), fs.unshard((state, expected)))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_updates_come_between_reductions_and_memory_of_gradients_goes(monkeypatch, strategy):
    late, early = (graph_of(monkeypatch, early, strategy) for early in (False, True))
    assert late.collectives() == early.collectives()
    assert len(places(late, "_fused_adamw_")) == 1
    reductions = [*places(early, "fshard.reduce_scatter"), *places(early, "fshard.all_reduce")]
    updates = places(early, "_fused_adamw_")
    # All but the last two gradients, which are under way when the last one is sent.
    assert len([n for n in updates if n < sorted(reductions)[-2]]) >= LAYERS - 3
    # At the peak of other strategies leaves are full.
    saved = (LAYERS - 4) * LEAF if strategy == "ddp" else 0
    assert early.peak_bytes() <= late.peak_bytes() - saved


@pytest.mark.parametrize("options", ({"optimizer": "clipped"}, {"world": 1}), ids=("a norm", "one rank"))
def test_what_waits_for_a_norm_and_what_is_not_reduced_stays(monkeypatch, options):
    late, early = (graph_of(monkeypatch, early, **options) for early in (False, True))
    assert [node.target for node in late.module.graph.nodes] == [node.target for node in early.module.graph.nodes]


def test_a_schedule_and_counts_come_with_the_first_update(monkeypatch):
    graph = graph_of(monkeypatch, True, optimizer="schedule")
    first = min(places(graph, "_fused_adamw_"))
    assert min(places(graph, "cos")) < first < max(places(graph, "fshard.all_reduce"))


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_nothing_is_overwritten_before_the_backward_has_read_it(strategy):
    _, state, batches = case(strategy, "fused")
    model = fs.functionalize(nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))), nn.Linear)

    def step(params, x, half):
        loss, grads = fs.value_and_grad(lambda params: model.apply(params, x).square().mean())(params)
        return fs.tree_map(torch.sub, fs.tree_map(half, params), grads), loss

    expected = step(state.params, batches[0], lambda leaf: leaf * 0.5)
    jitted = fs.jit(step, donate_argnums=0, static_argnums=2)
    found = jitted(state.params, batches[0], lambda leaf: leaf.mul_(0.5))
    assert_same_bits(fs.unshard(found), fs.unshard(expected))
