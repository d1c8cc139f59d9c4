"""A jitted update is the eager one, bit for bit: every optimizer, every transformation, and schedules."""

import pytest
import torch
from torch import optim

import fshard as fs
from tests.jit.steps import WORLDS, Case, assert_jitted_is_eager, assert_on_ranks
from tests.optim.test_table import TABLE, every_leaf, on_shards
from tests.ranks import on_ranks, world_of
from tests.trees import assert_same_bits, normal

# They branch on values within torch's own classes.
LOOKING = ("ASGD", "RAdam")

TORCH = {
    "SGD fused": lambda: fs.from_torch(optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "Adam fused": lambda: fs.from_torch(optim.Adam, lr=0.1, fused=True, amsgrad=True),
    "Adagrad fused": lambda: fs.from_torch(optim.Adagrad, lr=0.1, fused=True),
    "AdamW for loop": lambda: fs.from_torch(optim.AdamW, lr=0.1, foreach=False),
    "AdamW maximizing": lambda: fs.from_torch(optim.AdamW, lr=0.1, maximize=True),
    "Adagrad": lambda: fs.from_torch(optim.Adagrad, lr=0.1),
    "Adadelta": lambda: fs.from_torch(optim.Adadelta, lr=0.1),
    "Adamax": lambda: fs.from_torch(optim.Adamax, lr=0.1),
    "NAdam": lambda: fs.from_torch(optim.NAdam, lr=0.1),
    "Rprop": lambda: fs.from_torch(optim.Rprop, lr=0.1),
    "ASGD": lambda: fs.from_torch(optim.ASGD, lr=0.1),
    "RAdam": lambda: fs.from_torch(optim.RAdam, lr=0.1),
}


def halving(count):
    return 0.1 * 0.5**count


def warming(count):
    return 0.1 * torch.clamp((count + 1) / 3, max=1.0)


SCHEDULED = {
    "AdamW fused, halved": lambda: fs.from_torch(optim.AdamW, lr=halving, fused=True),
    "Adam fused, warmed up": lambda: fs.from_torch(optim.Adam, lr=warming, fused=True),
    "SGD fused, halved": lambda: fs.from_torch(optim.SGD, lr=halving, fused=True),
    "AdamW fused, injected": lambda: fs.from_torch(optim.AdamW, lr=0.1, inject=("lr",), fused=True),
    "AdamW fused, halved and injected": lambda: fs.from_torch(optim.AdamW, lr=halving, inject=("lr",), fused=True),
    "native sgd": lambda: fs.sgd(halving, 0.9),
    "native adam": lambda: fs.adam(warming),
    "clipped, decayed, averaged": lambda: fs.ema(
        fs.chain(fs.clip_by_global_norm(0.5), fs.add_decayed_weights(0.1), fs.adamw(halving)), 0.9
    ),
}
OPTIMIZERS = {name: row.make for name, row in TABLE.items()} | TORCH | SCHEDULED
TRACED = [name for name in OPTIMIZERS if name not in LOOKING]


def updating(make_optimizer):
    def make():
        params, grads = on_shards(every_leaf())
        tx = make_optimizer()

        def step(state, grad):
            return fs.update(tx, state, grad), fs.tree_leaves(grad)[0].sum()

        return Case(step, fs.TrainState.create(params, tx), [(grad,) for grad in grads])

    return make


@pytest.mark.rows(1)
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", TRACED)
def test_updates(name, world_size, workers):
    assert_on_ranks(updating(OPTIMIZERS[name]), world_of(world_size, workers))


def check_what_looks_at_values_is_refused_and_nothing_has_changed(make):
    case = updating(make)()
    before = fs.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, case.state)
    with pytest.raises(ValueError, match="expected no look at the value of a tensor, which a trace does not have"):
        fs.jit(case.step, donate_argnums=0)(case.state, *case.batches[0])
    assert all(map(torch.equal, fs.tree_leaves(case.state), fs.tree_leaves(before)))


@pytest.mark.rows(1)
@pytest.mark.parametrize("name", LOOKING)
@on_ranks(2)
def test_what_looks_at_values_is_refused_and_nothing_has_changed(name):
    check_what_looks_at_values_is_refused_and_nothing_has_changed(OPTIMIZERS[name])


def test_a_schedule_in_tensor_operations_is_that_of_numbers():
    """And the jitted update is the eager one."""

    def make(schedule):
        params = {"w": torch.linspace(-1, 1, 5)}
        tx = fs.from_torch(torch.optim.SGD, lr=schedule)
        grads = [({"w": normal(step)(5).float()},) for step in range(4)]
        return Case(lambda state, grad: (fs.update(tx, state, grad), None), fs.TrainState.create(params, tx), grads)

    case, numbers = make(lambda count: 0.1 * 0.5**count), make(lambda count: 0.1 * 0.5 ** int(count))
    assert_jitted_is_eager(case)
    a, b = case.state, numbers.state
    for (grad,) in case.batches:
        a, b = case.step(a, grad)[0], numbers.step(b, grad)[0]
    # Halves are exact, and kernels take a rate in float32 anyway.
    assert_same_bits(fs.tree_leaves(a.params), fs.tree_leaves(b.params))


@on_ranks(2)
def test_a_donated_update_inside_of_a_donated_step():
    """The update writes to the state by itself; the graph finds that in its place."""

    def make():
        case = updating(OPTIMIZERS["from_torch AdamW fused"])()
        tx = OPTIMIZERS["from_torch AdamW fused"]()
        return case._replace(step=lambda state, grad: (fs.update(tx, state, grad, donate=True), None))

    state, expected = make().state, make().state
    jitted = fs.jit(make().step, donate_argnums=0)
    places = [leaf.data_ptr() for leaf in fs.tree_leaves((state.params, state.opt_state))]
    eager = updating(OPTIMIZERS["from_torch AdamW fused"])().step
    for (grad,) in make().batches:
        state, expected = jitted(state, grad)[0], eager(expected, grad)[0]
    assert all(map(torch.equal, fs.tree_leaves(state), fs.tree_leaves(expected)))
    assert [leaf.data_ptr() for leaf in fs.tree_leaves((state.params, state.opt_state))] == places
    assert jitted.traces == ["the first call"]
