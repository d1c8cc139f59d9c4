"""Leaves are updated while the backward of others goes on, with the same bits and collectives, in less memory."""

from functools import partial
from importlib import import_module

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.testing import spmd
from fshard.transforms import strategies
from tests.jit.steps import train_step
from tests.ranks import on_ranks
from tests.trees import assert_same_bits, normal, one_axis

WIDTH, LAYERS = 64, 6
LEAF = 4 * WIDTH * WIDTH
adamw = partial(fs.from_torch, torch.optim.AdamW, lr=1e-3)
# Each optimizer with a strategy.
STEPS = {
    "fused": (fs.zero3, partial(adamw, fused=True)),
    "schedule": (fs.ddp, lambda: adamw(lr=lambda count: 1e-3 * torch.cos(count.double() / 9), fused=True)),
    "clipped average": (fs.zero1, lambda: fs.ema(fs.chain(fs.clip_by_global_norm(0.1), fs.adamw(1e-3)), 0.9)),
    "two": (fs.ddp, lambda: fs.partition({"0.*": fs.sgd(0.1), "*": adamw(foreach=True)})),
}


@pytest.fixture(autouse=True)
def layers_travel_alone(monkeypatch):
    """Each layer is gathered and reduced by itself, and two gradients are under way at a time."""
    monkeypatch.setattr(strategies, "HOST_BYTES", LEAF)


def case(strategy, make):
    model = fs.functionalize(nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))), nn.Linear)
    tx, draw = make(), normal()
    state = fs.TrainState.create(model.init(strategy(one_axis()), seed=0), tx)

    def loss(params, x):
        return model.apply(params, x).square().mean()

    return train_step(loss, tx), state, [draw(4, WIDTH, dtype=torch.float32) for _ in range(2)], loss


@pytest.mark.rows(2)
@pytest.mark.parametrize("name", STEPS)
@on_ranks(2)
def test_bits_are_those_of_the_eager_step(name):
    step, state, batches, _ = case(*STEPS[name])
    jitted, given = fs.jit(step, donate_argnums=0), fs.tree_map(torch.clone, state)
    for x in batches:
        state, expected = step(state, x)
        given, loss = jitted(given, x)
        assert_same_bits(fs.unshard((given, loss)), fs.unshard((state, expected)))


def test_updates_come_between_reductions_and_memory_of_gradients_goes(monkeypatch):
    def program():
        step, state, batches, _ = case(*STEPS["schedule"])
        return fs.make_graph(fs.jit(step, donate_argnums=0))(state, batches[0])

    early = spmd(program, 2)[0]
    monkeypatch.setattr(import_module("fshard.jit.jit"), "schedule_early_updates", lambda graph: None)
    late = spmd(program, 2)[0]
    assert late.collectives() == early.collectives()
    words, nodes = ("_fused_adamw_", "all_reduce", "cos"), list(early.module.graph.nodes)
    updates, reductions, rates = ([n for n, node in enumerate(nodes) if word in str(node.target)] for word in words)
    # All but the last two gradients, which are under way when the last one is sent; and the schedule before them.
    assert len([n for n in updates if n < reductions[-2]]) >= LAYERS - 3
    assert min(rates) < updates[0]
    assert early.peak_bytes() <= late.peak_bytes() - (LAYERS - 4) * LEAF
