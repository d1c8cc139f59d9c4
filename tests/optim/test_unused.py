"""Leaves whose gradient is None: they and all that is kept for them stay, as torch.optim leaves them."""

import itertools
from functools import partial

import pytest
import torch
from torch import optim

import fshard as fs
from fshard.tree import flatten, is_sharded
from tests.optim.test_from_torch import CASES, Lion
from tests.optim.test_table import every_leaf
from tests.ranks import on_ranks
from tests.tolerance import within
from tests.trees import assert_same_bits, normal

MOMENTUM, BETAS = {"lr": 0.1, "momentum": 0.9}, {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3}
SHAPES, DTYPES = {"a": (5, 3), "b": (7,)}, {"a": torch.float64, "b": torch.float32}
HISTORIES = {
    "always": {"a": [1] * 5, "b": [1] * 5},
    "late start": {"a": [0, 0, 1, 1, 1], "b": [1] * 5},
    "gaps": {"a": [1, 0, 1, 0, 1], "b": [1, 1, 0, 1, 1]},
    "not both": {"a": [0, 1, 0, 1, 0], "b": [1, 0, 0, 0, 1]},
}


def values(seed=0):
    draw = normal(seed)
    return {name: draw(*shape, dtype=DTYPES[name]) for name, shape in SHAPES.items()}


def gradients(history):
    """For each step the gradients of a history, None where it has none."""
    rows = enumerate(zip(*HISTORIES[history].values(), strict=True), start=1)
    return [{name: values(k)[name] if row[n] else None for n, name in enumerate(SHAPES)} for k, row in rows]


def stateful(make, history):
    """What a torch optimizer makes of the parameters in each step, and its state in the end.

    One for each leaf: torch's fused SGD fails where it makes the first step of some leaves only.
    """
    params = {name: torch.nn.Parameter(value) for name, value in values().items()}
    optimizers, steps = {name: make([param]) for name, param in params.items()}, []
    for grads in gradients(history):
        for name, grad in grads.items():
            params[name].grad = grad
            if grad is not None or not isinstance(optimizers[name], Lion):
                optimizers[name].step()
        steps.append({name: param.detach().clone() for name, param in params.items()})
    return steps, {name: optimizer.state[params[name]] for name, optimizer in optimizers.items()}


@pytest.mark.rows(8)
@pytest.mark.parametrize("case", CASES)
def test_every_class_has_the_bits_of_torch(case):
    cls, hyper = CASES[case]
    tx = fs.from_torch(cls, **hyper)
    for history, donate in itertools.product(HISTORIES, (False, True)):
        state = fs.TrainState.create(values(), tx)
        expected, states = stateful(partial(cls, **hyper), history)
        for grads, params in zip(gradients(history), expected, strict=True):
            state = fs.update(tx, state, grads, donate=donate)
            assert_same_bits(state.params, params)
        assert int(state.opt_state.updates) == len(expected)
        for (slot, tensors), name in itertools.product(state.opt_state.slots.items(), SHAPES):
            assert_same_bits(torch.as_tensor(tensors[name]), torch.as_tensor(states[name][slot]))


@pytest.mark.parametrize("cls", (optim.Rprop, optim.ASGD, optim.Adagrad))
def test_the_learning_rate_of_a_leaf_s_first_update(cls):
    """Some classes keep it in their state. It may have changed since `init`, by a schedule or in the state."""
    rates = (0.03, 0.3, 0.1, 0.2, 0.01)
    scheduled = fs.from_torch(cls, lr=lambda count: rates[int(count)])
    injected = fs.from_torch(cls, lr=1.0, inject="lr")
    for history, tx in itertools.product(("late start", "not both"), (scheduled, injected)):
        params = {name: torch.nn.Parameter(value) for name, value in values().items()}
        theirs = cls(list(params.values()), lr=1.0)
        state = fs.TrainState.create(values(), tx)
        for rate, grads in zip(rates, gradients(history), strict=True):
            for name, param in params.items():
                param.grad = grads[name]
            theirs.param_groups[0]["lr"] = rate
            theirs.step()
            if tx is injected:
                hyper = {"lr": torch.tensor(rate, dtype=torch.float64)}
                state = state._replace(opt_state=state.opt_state._replace(hyper=hyper))
            state = fs.update(tx, state, grads)
            assert_same_bits(state.params, {name: param.detach() for name, param in params.items()})


def check_our_own_are_torch_s_within_rounding(row):
    ours, cls, hyper = row
    tx = ours(**hyper)
    for history in HISTORIES:
        params, state = values(), tx.init(values())
        for grads, expected in zip(gradients(history), stateful(partial(cls, **hyper), history)[0], strict=True):
            params, state = tx.update(grads, state, params)
            for name, param in params.items():
                # Means over a few elements, and other products of each element, which steps hand on.
                near = within(expected[name], expected[name].numel(), len(HISTORIES[history][name]))
                torch.testing.assert_close(param, expected[name], **near)


DECAY, SGD = {"weight_decay": 0.1}, (fs.sgd, optim.SGD)
AGAINST_TORCH = [
    *((*SGD, how | DECAY) for how in ({"lr": 0.1}, MOMENTUM | {"dampening": 0.2}, MOMENTUM | {"nesterov": True})),
    *((*pair, BETAS | DECAY) for pair in ((fs.adam, optim.Adam), (fs.adamw, optim.AdamW))),
]


def test_our_own_are_torch_s_within_rounding():
    """In float64 too: numbers that are computed once for all leaves are not rounded to float32."""
    for row in AGAINST_TORCH:
        check_our_own_are_torch_s_within_rounding(row)


def torch_sgd():
    return fs.from_torch(optim.SGD, lr=0.1, momentum=0.9, dampening=0.5)


TABLE = {
    "sgd": lambda: fs.sgd(0.1, 0.9, weight_decay=0.1),
    "adam": lambda: fs.adam(0.1),
    "from_torch fused": lambda: fs.from_torch(optim.AdamW, lr=0.1, fused=True),
    "injected": lambda: fs.from_torch(optim.SGD, lr=0.1, momentum=0.9, dampening=0.5, inject=["lr"]),
    "chain": lambda: fs.chain(fs.clip_by_norm(0.5), fs.add_decayed_weights(0.1), fs.clip_by_value(0.5), torch_sgd()),
    "partition": lambda: fs.partition({"a": torch_sgd(), "*": torch_sgd()}),
    "skip_nonfinite": lambda: fs.skip_nonfinite(torch_sgd()),
}


def sharded(tree):
    """Shard a tree in which leaves may be None."""
    trained = {name: leaf for name, leaf in tree.items() if leaf is not None}
    return dict.fromkeys(tree) | fs.shard(trained, every_leaf())


def moments(state, names):
    """The leaves of some names and what the optimizer keeps for them, element by element."""
    flat = flatten((state.params, state.opt_state))
    of_names = lambda path: any(f"['{name}']" in path for name in names)  # noqa: E731
    pairs = zip(flat.paths, flat.leaves, strict=True)
    return {path: leaf.local.clone() for path, leaf in pairs if is_sharded(leaf) and of_names(path)}


def check_a_leaf_is_as_if_the_updates_without_it_had_not_been(make):
    for history, donate in itertools.product(HISTORIES, (False, True)):
        tx = make()
        state = fs.TrainState.create(sharded(values()), tx)
        structure = flatten(state).treedef
        for grads in gradients(history):
            still = [name for name, grad in grads.items() if grad is None]
            kept = moments(state, still)
            state = fs.update(tx, state, sharded(grads), donate=donate)
            assert flatten(state).treedef == structure
            assert_same_bits(moments(state, still), kept)
        for leaf in SHAPES:
            alone = torch_sgd() if make is TABLE["partition"] else make()
            one = fs.TrainState.create(sharded({leaf: values()[leaf]}), alone)
            for grads in gradients(history):
                if grads[leaf] is not None:
                    one = fs.update(alone, one, sharded({leaf: grads[leaf]}))
            assert_same_bits(state.params[leaf].local, one.params[leaf].local)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("chain", "partition") else pytest.mark.slow) for name in TABLE]
)
@on_ranks(2)
def test_a_leaf_is_as_if_the_updates_without_it_had_not_been(name):
    """Each leaf by itself, stepped only when it has a gradient."""
    check_a_leaf_is_as_if_the_updates_without_it_had_not_been(TABLE[name])


def test_an_average_of_parameters_moves_on():
    tx = fs.ema(fs.sgd(1.0), decay=0.5)
    params = {"w": torch.zeros(2), "v": torch.zeros(2)}
    params, state = tx.update({"w": -torch.ones(2), "v": None}, tx.init(params), params)
    params, state = tx.update({"w": None, "v": None}, state, params)
    assert_same_bits(params["w"], torch.ones(2))
    assert_same_bits(state.average, {"w": torch.full((2,), 0.75), "v": torch.zeros(2)})
