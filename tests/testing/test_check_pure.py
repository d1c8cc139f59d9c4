"""check_pure names what a step writes past autograd's version counter, and passes what is pure or donated."""

import re

import pytest
import torch

import fshard as fs
from fshard.testing import check_pure
from tests.ranks import on_ranks
from tests.trees import normal, one_axis

TX = fs.from_torch(torch.optim.SGD, lr=0.1)

STRATEGIES = {
    "ddp": fs.ddp,
    "zero1": lambda mesh: fs.zero1(mesh, min_shard_elements=0),
    "zero2": lambda mesh: fs.zero2(mesh, min_shard_elements=0),
    "zero3": lambda mesh: fs.zero3(mesh, min_shard_elements=0),
    "zero3 of whole leaves": lambda mesh: fs.zero3(mesh, min_shard_elements=1000),
}
# Those whose gather hands out the state's own memory, where there are several ranks.
WHOLE = ("ddp", "zero3 of whole leaves")

WRITES = {
    "data": lambda w: w.data.clamp_(0, 0),
    "numpy": lambda w: w.detach().numpy().fill(0),
}


def started(strategy):
    params = fs.shard({"w": normal()(5, 3), "v": normal(1)(3)}, STRATEGIES[strategy](one_axis()))
    return fs.TrainState.create(params, TX), normal(2)(4, 5)


def step_that(write):
    def step(state, batch):
        def loss(params):
            full = fs.gather(params)
            value = (batch @ full["w"] + full["v"]).square().sum()
            write(full["w"])
            return value

        value, grads = fs.value_and_grad(loss)(state.params)
        return fs.update(TX, state, grads), value

    return step


@pytest.mark.parametrize("write", WRITES)
@on_ranks(1, 2)
def test_writes_past_the_version_counter_are_named(world_size, write):
    """Where the caller's state has changed; elsewhere they change a copy, and nothing else."""
    step = step_that(WRITES[write])
    error = (
        "check_pure: the step changed its arguments\n"
        "  argument 0.params['w']: expected those before it, got other values after the step\n"
        "To fix: find the write in place to these tensors or to a view of them, and compute a new tensor instead."
    )
    for strategy in STRATEGIES:
        state, batch = started(strategy)
        if world_size == 1 or strategy in WHOLE:
            with pytest.raises(AssertionError, match=re.escape(error)):
                check_pure(step, state, batch)
        else:
            check_pure(step, state, batch)


@pytest.mark.rows(1)
@on_ranks(1, 2)
def test_pure_and_donated_steps_pass():
    step = step_that(lambda w: None)
    for strategy in STRATEGIES:
        state, batch = started(strategy)
        after, value = check_pure(step, state, batch=batch)
        assert torch.equal(value, step(state, batch)[1])
        assert after.step == state.step + 1
        check_pure(fs.jit(step, donate_argnums=0), state, batch)


def test_what_a_tensor_is_counts_as_well():
    tensors = {"nan": torch.tensor([float("nan")]), "conj": torch.ones(2, dtype=torch.complex64).conj(), "empty": None}
    check_pure(lambda tree: None, tensors)
    with pytest.raises(AssertionError, match=r"\['nan'\].*\n  x\['s'\]: expected those before it"):
        check_pure(lambda tree, x: (tree["nan"].zero_(), x["s"].resize_(2, 3)), tensors, x={"s": torch.zeros(3, 2)})
