"""Leaves that no rank used in a jitted step: ranks agree on them once, when they trace."""

import pytest
import torch

import fshard as fs
from tests.jit.steps import Case, assert_jitted_is_eager, assert_on_ranks, train_step
from tests.ranks import my_rank, on_ranks
from tests.trees import STRATEGIES, assert_same_bits, meshes, normal, one_axis

SOME = {name: STRATEGIES[name] for name in ("ddp", "zero2 of every leaf", "hsdp")}
SOME |= {"zero3": lambda on: fs.zero3(on.line, min_shard_elements=0)}
OPTIMIZERS = {
    "fused AdamW": lambda: fs.from_torch(torch.optim.AdamW, lr=0.1, fused=True),
    "adamw": lambda: fs.adamw(0.1),
    "clipped sgd": lambda: fs.chain(fs.clip_by_global_norm(0.5), fs.sgd(0.1, 0.9)),
    "ema": lambda: fs.ema(fs.skip_nonfinite(fs.adamw(0.1)), 0.9),
}


def params(strategy):
    draw = normal()
    return fs.shard({name: draw(5, 3) for name in ("all", "one", "none")}, strategy)


def loss_of(params, batch):
    full = fs.gather(params)
    loss = (full["all"] * batch).square().mean()
    return loss + full["one"].square().sum() if my_rank() == 1 else loss


def batches(*rows):
    draw = normal(1 + my_rank())
    return [(draw(n, 5, 3),) for n in rows]


def case(strategy, tx):
    return Case(train_step(loss_of, tx), fs.TrainState.create(params(strategy), tx), batches(2, 2, 2))


@pytest.mark.rows(1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", SOME)
def test_a_jitted_step_is_the_eager_one(strategy, optimizer):
    assert_on_ranks(lambda: case(SOME[strategy](meshes()), OPTIMIZERS[optimizer]()), 4 if strategy == "hsdp" else 2)


@on_ranks(1, 2)
def test_only_what_no_rank_used_stays(world_size):
    made = case(fs.zero3(one_axis(), min_shard_elements=0), fs.adamw(0.1))
    step, state = fs.jit(made.step), made.state
    for batch in made.batches:
        state, _ = step(state, *batch)
    still = [name for name in state.params if state.params[name].local.equal(made.state.params[name].local)]
    assert still == (["none"] if world_size == 2 else ["one", "none"])


@on_ranks(2)
def test_a_rank_whose_batch_is_ragged_traces_by_itself():
    """Others run the graph that they have: the leaves are those that were agreed on before."""
    tx = fs.adamw(0.1)
    strategy = fs.zero3(one_axis(), min_shard_elements=0)
    step, state = train_step(loss_of, tx), fs.TrainState.create(params(strategy), tx)
    jitted, expected = fs.jit(step), state
    for (batch,) in batches(3, 2 if my_rank() == 0 else 3, 3 if my_rank() == 0 else 1):
        state, value = jitted(state, batch)
        expected, wanted = step(expected, batch)
        assert_same_bits([value, *fs.tree_leaves(state)], [wanted, *fs.tree_leaves(expected)])
    assert len(jitted.traces) == 2


@on_ranks(2)
def test_static_arguments_choose_what_is_trained():
    """Every rank traces again, and uses other leaves than before."""
    tx = fs.adamw(0.1)
    state = fs.TrainState.create(params(fs.zero2(one_axis(), min_shard_elements=0)), tx)

    def step(state, name):
        value, grads = fs.value_and_grad(lambda p: fs.gather(p)[name].square().sum())(state.params)
        return fs.update(tx, state, grads), value

    jitted, expected = fs.jit(step, static_argnums=1), state
    for name in ("all", "none", "one", "all"):
        state, _ = jitted(state, name)
        expected, _ = step(expected, name)
        assert_same_bits(fs.tree_leaves(state), fs.tree_leaves(expected))


@on_ranks(2)
def test_units_and_accumulation():
    strategy = fs.zero3(one_axis(), min_shard_elements=0)
    tx = fs.from_torch(torch.optim.AdamW, lr=0.1)

    def step(state, batches):
        value, grads = fs.accumulate(loss_of, communicate="once")(state.params, list(batches.unbind()))
        return fs.update(tx, state, grads), value

    assert_jitted_is_eager(Case(step, fs.TrainState.create(params(strategy), tx), batches(2, 2)))


@on_ranks(2)
def test_ranks_that_trace_again_and_use_other_leaves_are_named():
    """Only the first trace asks for the leaves of others, since nobody knows whether all trace again."""
    tx = fs.adamw(0.1)
    state = fs.TrainState.create(params(fs.zero2(one_axis(), min_shard_elements=0)), tx)

    def step(state, late):
        def loss(p):
            full = fs.gather(p)
            return full["one" if late and my_rank() else "all"].square().sum()

        value, grads = fs.value_and_grad(loss)(state.params)
        return fs.update(tx, state, grads), value

    jitted = fs.jit(step, static_argnums=1)
    state, _ = jitted(state, False)
    with pytest.raises(ValueError, match=r"leaves: expected \['all'\] used as on rank shard=0, got \['all'\] unused"):
        jitted(state, True)
