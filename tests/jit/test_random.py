"""Random numbers of a key in a jitted step: those of the eager one, other ones in each step."""

import pytest
import torch
from torch import nn
from torch.func import grad

import fshard as fs
from tests.jit.steps import Case, adamw, assert_on_ranks
from tests.jit.test_features import Stack, checkpointed, inputs, rematerialized, strategy
from tests.trees import normal, one_axis
from tests.unit_models import Block, filled

KEY = torch.tensor(7)


def dropout(module):
    """With masks of each step and rank by the state's key."""

    def make():
        model, tx, axis = fs.functionalize(module, Block), adamw(), fs.axis_of(one_axis())

        def step(state, x):
            key = fs.fold_in(fs.fold_in(state.key, state.step), axis)
            value, grads = fs.value_and_grad(lambda p: model.apply(p, x, key=key))(state.params)
            return fs.update(tx, state, grads), value

        return Case(step, fs.TrainState.create(model.init(strategy()), tx, key=KEY), inputs() + inputs()[:1])

    return make


RANDOM = {
    "dropout": dropout(filled(Stack(dropped=False))),
    "dropout in checkpoints": dropout(filled(Stack(dropped=True))),
    "dropout around checkpoints": dropout(filled(Stack(checkpointed, dropped=False))),
    "dropout in remat": dropout(filled(Stack(rematerialized, dropped=False))),
}


# Threads share the generator that a key seeds.
@pytest.mark.slow
@pytest.mark.parametrize("name", RANDOM)
def test_steps_on_processes(name, workers):
    assert_on_ranks(RANDOM[name], workers(2))


@pytest.mark.rows(1)
@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_on_one_rank(name):
    assert_on_ranks(RANDOM[name], 1)


@pytest.mark.parametrize("key", (7, -(2**63), 2**63 - 1))
def test_a_run_keeps_a_number_as_a_tensor(key):
    params = {"w": torch.ones(())}
    state = fs.TrainState.create(params, adamw(), key=key)
    assert state.key.dtype == torch.int64
    assert state.key.equal(torch.tensor(key))
    assert fs.jit(lambda s: fs.fold_in(s.key, s.step))(state).equal(fs.fold_in(key, 0))


def test_a_run_keeps_a_tensor_of_integers_as_it_is():
    for key in (None, KEY, torch.arange(2, dtype=torch.int32)):
        assert fs.TrainState.create({"w": torch.ones(())}, adamw(), key=key).key is key


def test_a_key_gives_new_masks_each_step_and_leaves_the_generator_alone():
    module, x = nn.Dropout(0.5), torch.ones(64)
    model = fs.functionalize(module)
    jitted = fs.jit(lambda key, count: model.apply({}, x, key=fs.fold_in(key, count)))
    before = torch.get_rng_state()
    masks = [jitted(KEY, torch.tensor(count)) for count in (0, 1, 2, 0)]
    assert torch.get_rng_state().equal(before)
    assert masks[0].equal(masks[3])
    assert len({tuple(mask.tolist()) for mask in masks}) == 3
    assert masks[0].equal(model.apply({}, x, key=fs.fold_in(KEY, 0)))
    assert jitted.traces == ["the first call"]


def test_a_trace_with_a_number_as_key_leaves_the_generator_alone():
    model, x = fs.functionalize(nn.Dropout(0.5)), torch.ones(64)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        before = torch.get_rng_state()
        fs.jit(lambda x: model.apply({}, x, key=3), backend=lambda graph, inputs: lambda *given: given)(x)
        assert torch.get_rng_state().equal(before)


@pytest.mark.xfail(strict=True, reason="remat under torch.func takes the generator's state itself, not by operators")
def test_remat_under_torch_func():
    def f(x):
        return grad(lambda x: fs.remat(lambda x: x.sin() * x)(x).sum())(x)

    x = normal()(5)
    assert fs.jit(f)(x).equal(f(x))
