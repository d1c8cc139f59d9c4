"""A jitted update is the eager one, bit for bit: every optimizer, every transformation, and schedules."""

import pytest
import torch
from torch import optim

import fshard as fs
from tests.jit.steps import WORLDS, Case, assert_jitted_is_eager, assert_on_ranks
from tests.optim.test_table import TABLE, every_leaf, on_shards
from tests.ranks import on_ranks, world_of
from tests.trees import assert_same_bits, normal


def halving(count):
    return 0.1 * 0.5**count


def warming(count):
    return 0.1 * torch.clamp((count + 1) / 3, max=1.0)


def of_torch(cls, lr=0.1, **options):
    return lambda: fs.from_torch(cls, lr=lr, **options)


OPTIMIZERS = {name: row.make for name, row in TABLE.items()} | {
    "SGD fused": of_torch(optim.SGD, momentum=0.9, fused=True),
    "Adam fused": of_torch(optim.Adam, fused=True, amsgrad=True),
    "Adagrad fused": of_torch(optim.Adagrad, fused=True),
    "AdamW for loop": of_torch(optim.AdamW, foreach=False),
    "AdamW maximizing": of_torch(optim.AdamW, maximize=True),
    **{cls.__name__: of_torch(cls) for cls in (optim.Adagrad, optim.Adadelta, optim.Adamax, optim.NAdam, optim.Rprop)},
    "AdamW fused, halved": of_torch(optim.AdamW, halving, fused=True),
    "Adam fused, warmed up": of_torch(optim.Adam, warming, fused=True),
    "AdamW fused, injected": of_torch(optim.AdamW, inject=("lr",), fused=True),
    "AdamW fused, halved and injected": of_torch(optim.AdamW, halving, inject=("lr",), fused=True),
    "native sgd": lambda: fs.sgd(halving, 0.9),
    "native adam": lambda: fs.adam(warming),
    "clipped, decayed, averaged": lambda: fs.ema(
        fs.chain(fs.clip_by_global_norm(0.5), fs.add_decayed_weights(0.1), fs.adamw(halving)), 0.9
    ),
}


def updating(make_optimizer):
    def make():
        params, grads = on_shards(every_leaf())
        tx = make_optimizer()

        def step(state, grad):
            return fs.update(tx, state, grad), fs.tree_leaves(grad)[0].sum()

        return Case(step, fs.TrainState.create(params, tx), [(grad,) for grad in grads])

    return make


@pytest.mark.rows(5)
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates(name, world_size, workers):
    assert_on_ranks(updating(OPTIMIZERS[name]), world_of(world_size, workers))


def check_what_looks_at_values_is_refused_and_nothing_has_changed(make):
    case = updating(make)()
    before = fs.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, case.state)
    with pytest.raises(ValueError, match="expected no look at the value of a tensor, which a trace does not have"):
        fs.jit(case.step, donate_argnums=0)(case.state, *case.batches[0])
    assert all(map(torch.equal, fs.tree_leaves(case.state), fs.tree_leaves(before)))


@on_ranks(2)
def test_what_looks_at_values_is_refused_and_nothing_has_changed():
    """Those that branch on values within torch's own classes."""
    for cls in (optim.ASGD, optim.RAdam):
        check_what_looks_at_values_is_refused_and_nothing_has_changed(of_torch(cls))


def test_a_schedule_in_tensor_operations_is_that_of_numbers():
    """And the jitted update is the eager one."""

    def make(schedule):
        tx = fs.from_torch(torch.optim.SGD, lr=schedule)
        grads = [({"w": normal(step)(5).float()},) for step in range(4)]
        state = fs.TrainState.create({"w": torch.linspace(-1, 1, 5)}, tx)
        return Case(lambda state, grad: (fs.update(tx, state, grad), None), state, grads)

    case, numbers = make(halving), make(lambda count: 0.1 * 0.5 ** int(count))
    assert_jitted_is_eager(case)
    a, b = case.state, numbers.state
    for (grad,) in case.batches:
        a, b = case.step(a, grad)[0], numbers.step(b, grad)[0]
    # Halves are exact, and kernels take a rate in float32 anyway.
    assert_same_bits(fs.tree_leaves(a.params), fs.tree_leaves(b.params))


@on_ranks(2)
def test_a_donated_update_inside_of_a_donated_step():
    """The update writes to the state by itself; the graph finds that in its place."""
    make = of_torch(optim.AdamW, fused=True)
    case, expected, tx = updating(make)(), updating(make)().state, make()
    jitted = fs.jit(lambda state, grad: fs.update(tx, state, grad, donate=True), donate_argnums=0)
    state, places = case.state, [leaf.data_ptr() for leaf in fs.tree_leaves(case.state[:2])]
    for (grad,) in case.batches:
        state, expected = jitted(state, grad), case.step(expected, grad)[0]
    assert all(map(torch.equal, fs.tree_leaves(state), fs.tree_leaves(expected)))
    assert [leaf.data_ptr() for leaf in fs.tree_leaves(state[:2])] == places
    assert jitted.traces == ["the first call"]
