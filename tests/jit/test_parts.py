"""Steps that are jitted by functions, because one of their parts reads values."""

import pytest
import torch
from torch import nn

import fshard as fs
from tests.ranks import on_ranks
from tests.trees import assert_same_bits, normal, one_axis


def make():
    module = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))).double()
    model = fs.functionalize(module, units="*")
    return model, model.init(fs.zero3(one_axis(), merge_bytes=0, min_shard_elements=0), seed=0)


def through_arguments(model, jit):
    part = jit(lambda params, x: model.apply(params, x))
    return part, lambda params, x: part(params, x).square().mean()


def through_a_closure(model, jit):
    parts = []

    def loss_fn(params, x):
        part = jit(lambda x: model.apply(params, x))
        parts.append(part)
        return part(x).square().mean()

    return parts, loss_fn


def of_activations(model, jit):
    part = jit(lambda y: (y * y.sigmoid()).square().mean())
    return part, lambda params, x: part(model.apply(params, x))


PARTS = {"arguments": through_arguments, "closure": through_a_closure, "activations": of_activations}


@pytest.mark.parametrize("name", PARTS)
@on_ranks(2)
def test_a_jitted_part_of_an_eager_loss_runs_as_it_is(name):
    """Units are gathered again in the backward as without it: a graph would keep them, outside of the engine."""
    model, params = make()
    x = normal()(4, 8)
    found = []
    for jit in (lambda f: f, fs.jit):
        part, loss_fn = PARTS[name](model, jit)
        with fs.comm.record() as record:
            loss, grads = fs.value_and_grad(loss_fn)(params, x)
        found.append(
            ((loss, fs.unshard(grads)), sum(entry.op == "all_gather" and not entry.scalar for entry in record))
        )
    (eager, gathered), (jitted, gathered_jitted) = found
    assert_same_bits(list(jitted), list(eager))
    # Four units in the forward, and some of them again.
    assert gathered_jitted == gathered > 4
    assert all(not one.traces for one in (part if isinstance(part, list) else [part]))


@on_ranks(2)
def test_the_update_alone_is_jitted():
    """The loss branches on a value; the rest is one graph, with the bits of the eager step."""
    model, params = make()
    tx = fs.chain(fs.clip_by_global_norm(0.1), fs.from_torch(torch.optim.AdamW, lr=1e-2))
    x = normal()(4, 8)

    def loss_fn(params):
        out = model.apply(params, x).square().mean()
        return out if out > 0 else -out

    update = fs.jit(lambda state, grads: fs.update(tx, state, grads), donate_argnums=0)
    states = [fs.TrainState.create(fs.tree_map(torch.clone, params), tx) for _ in range(2)]
    for _ in range(3):
        _, eager = fs.value_and_grad(loss_fn)(states[0].params)
        _, grads = fs.value_and_grad(loss_fn)(states[1].params)
        states = [fs.update(tx, states[0], eager), update(states[1], grads)]
    assert_same_bits(fs.unshard(states[1].params), fs.unshard(states[0].params))
    assert len(update.traces) == 1
