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
adamw = partial(fs.from_torch, torch.optim.AdamW, lr=1e-3)
# Each optimizer with a strategy.
STEPS = {
    "fused": (fs.zero3, partial(adamw, fused=True)),
    "foreach": (fs.ddp, partial(adamw, foreach=True)),
    "schedule": (fs.zero2, lambda: adamw(lr=fs.schedules.cosine(1e-3, 9), fused=True)),
    "native": (fs.ddp, lambda: fs.adamw(1e-3)),
    "clipped": (fs.zero3, lambda: fs.chain(fs.clip_by_global_norm(0.1), adamw(fused=True))),
    "average": (fs.zero1, lambda: fs.ema(adamw(fused=True), decay=0.9)),
    "scaled": (fs.zero3, lambda: fs.dynamic_loss_scale(adamw(fused=True), init_scale=8.0)),
    "two": (fs.ddp, lambda: fs.partition({"0.*": fs.sgd(0.1), "*": adamw(fused=True)})),
}


@pytest.fixture(autouse=True)
def layers_travel_alone(monkeypatch):
    """Each layer is gathered and reduced by itself, and two gradients are under way at a time."""
    monkeypatch.setattr(strategies, "HOST_BYTES", LEAF)


def case(strategy, make):
    model = fs.functionalize(nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))), nn.Linear)
    tx = make()
    state = fs.TrainState.create(model.init(strategy(one_axis()), seed=0), tx)

    def loss(params, x):
        return model.apply(params, x).square().mean()

    def step(state, x):
        value, grads = fs.value_and_grad(loss)(state.params, x)
        return fs.update(tx, state, grads), value

    return step, state, [torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(n)) for n in range(3)], loss


def graph_of(monkeypatch, early, strategy, make, world=2):
    with monkeypatch.context() as patched:
        if not early:
            patched.setattr(import_module("fshard.jit.jit"), "schedule", lambda graph: None)

        def program():
            step, state, batches, _ = case(strategy, make)
            return fs.make_graph(fs.jit(step, donate_argnums=0))(state, batches[0])

        return spmd(program, world)[0]


def places(graph, word):
    return [n for n, node in enumerate(graph.module.graph.nodes) if word in str(node.target)]


@pytest.mark.rows(len(STEPS))
@pytest.mark.parametrize("name", STEPS)
@on_ranks(2)
def test_bits_are_those_of_the_eager_step(name):
    step, state, batches, _ = case(*STEPS[name])
    jitted, given = fs.jit(step, donate_argnums=0), fs.tree_map(torch.clone, state)
    for x in batches:
        state, expected = step(state, x)
        given, loss = jitted(given, x)
        assert_same_bits(fs.unshard((given, loss)), fs.unshard((state, expected)))


@pytest.mark.parametrize("strategy", (fs.ddp, fs.zero3))
def test_updates_come_between_reductions_and_memory_of_gradients_goes(monkeypatch, strategy):
    late, early = (graph_of(monkeypatch, early, strategy, STEPS["schedule"][1]) for early in (False, True))
    assert late.collectives() == early.collectives()
    assert len(places(late, "_fused_adamw_")) == 1
    reductions = sorted([*places(early, "fshard.reduce_scatter"), *places(early, "fshard.all_reduce")])
    updates = places(early, "_fused_adamw_")
    # All but the last two gradients, which are under way when the last one is sent; and the schedule before them.
    assert len([n for n in updates if n < reductions[-2]]) >= LAYERS - 3
    assert min(places(early, "cos")) < updates[0]
    # At the peak of other strategies leaves are full.
    saved = (LAYERS - 4) * LEAF if strategy is fs.ddp else 0
    assert early.peak_bytes() <= late.peak_bytes() - saved


def test_what_waits_for_a_norm_and_what_is_not_reduced_stays(monkeypatch):
    for name, world in (("clipped", 2), ("fused", 1)):
        late, early = (graph_of(monkeypatch, early, *STEPS[name], world) for early in (False, True))
        assert [node.target for node in late.module.graph.nodes] == [node.target for node in early.module.graph.nodes]


@on_ranks(2)
def test_nothing_is_overwritten_before_the_backward_has_read_it():
    for strategy in (fs.ddp, fs.zero1, fs.zero2, fs.zero3):
        _, state, batches, loss = case(strategy, adamw)

        def step(params, x, half, loss=loss):
            value, grads = fs.value_and_grad(loss)(params, x)
            return fs.tree_map(torch.sub, fs.tree_map(half, params), grads), value

        expected = step(state.params, batches[0], lambda leaf: leaf * 0.5)
        jitted = fs.jit(step, donate_argnums=0, static_argnums=2)
        found = jitted(state.params, batches[0], lambda leaf: leaf.mul_(0.5))
        assert_same_bits(fs.unshard(found), fs.unshard(expected))
