"""Leaves that no rank used in a jitted step: ranks agree on them once, when they trace."""

import pytest
import torch

import fshard as fs
from tests.jit.steps import Case, assert_on_ranks, train_step
from tests.ranks import my_rank, on_ranks
from tests.trees import STRATEGIES, assert_same_bits, meshes, normal, one_axis

# Each optimizer with a strategy.
STEPS = {
    "ddp": lambda: fs.from_torch(torch.optim.AdamW, lr=0.1, fused=True),
    "zero2 of every leaf": lambda: fs.chain(fs.clip_by_global_norm(0.5), fs.sgd(0.1, 0.9)),
    "hsdp": lambda: fs.ema(fs.skip_nonfinite(fs.adamw(0.1)), 0.9),
}


def begun(strategy, tx):
    draw = normal()
    params = fs.shard({name: draw(5, 3) for name in ("all", "one", "none")}, strategy)
    return fs.TrainState.create(params, tx)


def loss_of(params, batch):
    full = fs.gather(params)
    loss = (full["all"] * batch).square().mean()
    return loss + full["one"].square().sum() if my_rank() == 1 else loss


def batches(*rows):
    draw = normal(1 + my_rank())
    return [(draw(n, 5, 3),) for n in rows]


@pytest.mark.parametrize("strategy", STEPS)
def test_a_jitted_step_is_the_eager_one(strategy):
    def make():
        tx = STEPS[strategy]()
        return Case(train_step(loss_of, tx), begun(STRATEGIES[strategy](meshes()), tx), batches(2, 2, 2))

    assert_on_ranks(make, 4 if strategy == "hsdp" else 2)


@on_ranks(2)
def test_a_rank_whose_batch_is_ragged_traces_by_itself():
    """Others run the graph that they have: the leaves are those that were agreed on before."""
    tx = fs.adamw(0.1)
    step, state = train_step(loss_of, tx), begun(fs.zero3(one_axis(), min_shard_elements=0), tx)
    jitted, first, expected = fs.jit(step), state, state
    for (batch,) in batches(3, 2 if my_rank() == 0 else 3, 3 if my_rank() == 0 else 1):
        state, value = jitted(state, batch)
        expected, wanted = step(expected, batch)
        assert_same_bits([value, *fs.tree_leaves(state)], [wanted, *fs.tree_leaves(expected)])
    assert len(jitted.traces) == 2
    assert [name for name in state.params if state.params[name].local.equal(first.params[name].local)] == ["none"]


@on_ranks(2)
def test_ranks_that_trace_again_and_use_other_leaves_are_named():
    """Only the first trace asks for the leaves of others, since nobody knows whether all trace again."""
    tx = fs.adamw(0.1)
    state = begun(fs.zero2(one_axis(), min_shard_elements=0), tx)

    def step(state, late):
        name = "one" if late and my_rank() else "all"
        value, grads = fs.value_and_grad(lambda p: fs.gather(p)[name].square().sum())(state.params)
        return fs.update(tx, state, grads), value

    jitted = fs.jit(step, static_argnums=1)
    state, _ = jitted(state, False)
    with pytest.raises(ValueError, match=r"leaves: expected \['all'\] used as on rank shard=0, got \['all'\] unused"):
        jitted(state, True)
