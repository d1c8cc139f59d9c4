"""Donated updates of torch's classes: what one keeps for the next is never seen, whatever comes between."""

import copy
import gc
import weakref

import pytest
import torch
from torch import optim

import fshard as fs
from fshard.testing import spmd
from tests.ranks import on_ranks
from tests.trees import assert_same_bits, one_axis


class Counting(optim.Optimizer):
    """Counts in its group, which no state keeps."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            for param in group["params"]:
                param.sub_(param.grad, alpha=group["lr"] * group["count"])


class Replacing(optim.Optimizer):
    """Makes a new tensor of its state in every third step."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state.update(mean=torch.zeros_like(param), steps=torch.zeros(()))
                state["steps"] += 1
                if int(state["steps"]) % 3:
                    state["mean"].add_(param.grad)
                else:
                    state["mean"] = state["mean"] + param.grad
                param.sub_(state["mean"], alpha=group["lr"])


CASES = {
    "AdamW": lambda: fs.from_torch(optim.AdamW, lr=0.1),
    "AdamW fused": lambda: fs.from_torch(optim.AdamW, lr=0.1, fused=True),
    "AdamW scheduled": lambda: fs.from_torch(optim.AdamW, lr=lambda count: 0.1 / (1 + int(count))),
    "SGD": lambda: fs.from_torch(optim.SGD, lr=0.1),
    "SGD momentum fused": lambda: fs.from_torch(optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "ASGD": lambda: fs.from_torch(optim.ASGD, lr=0.1),
    "Rprop": lambda: fs.from_torch(optim.Rprop, lr=0.1),
    "NAdam foreach": lambda: fs.from_torch(optim.NAdam, lr=0.1, foreach=True),
    "counting": lambda: fs.from_torch(Counting),
    "replacing": lambda: fs.from_torch(Replacing),
}


def start(name):
    tx = CASES[name]()
    full = {"a": torch.linspace(0, 1, 12).reshape(4, 3), "b": [torch.ones(5)]}
    return tx, fs.TrainState.create(fs.shard(full, fs.zero2(one_axis(), min_shard_elements=0)), tx)


def gradients(state, step):
    return fs.tree_map(lambda x: torch.cos(x * (step + 1) + step), state.params)


def assert_same(found, expected):
    assert_same_bits(fs.tree_leaves(found), fs.tree_leaves(expected))
    assert all(tensor.grad is None for tensor in fs.tree_leaves(found.params))


def both(tx, donated, plain, grads):
    """One update of a state that is donated, and of one that is not."""
    return fs.update(tx, donated, grads, donate=True), fs.update(tx, plain, grads)


@pytest.mark.parametrize("name", CASES)
@on_ranks(2)
def test_copies_of_a_state_go_their_own_ways(name):
    tx, plain = start(name)
    donated = copy.deepcopy(plain)
    for step in range(3):
        donated, plain = both(tx, donated, plain, gradients(plain, step))
    other, other_plain = copy.deepcopy(donated), copy.deepcopy(plain)
    for step in range(3, 6):
        donated, plain = both(tx, donated, plain, gradients(plain, step))
        other, other_plain = both(tx, other, other_plain, gradients(other_plain, step + 10))
    assert_same(donated, plain)
    assert_same(other, other_plain)


def twice(tree):
    """All of a tree but single numbers."""
    return fs.tree_map(lambda x: x * 2 if x.dim() else x, tree)


@pytest.mark.parametrize("name", CASES)
@on_ranks(2)
def test_leaves_that_were_replaced_are_seen(name):
    tx, plain = start(name)
    donated = copy.deepcopy(plain)
    donated, plain = both(tx, donated, plain, gradients(plain, 0))
    donated, plain = (s._replace(params={**s.params, "a": twice(s.params["a"])}) for s in (donated, plain))
    donated, plain = both(tx, donated, plain, gradients(plain, 1))
    donated, plain = (
        s._replace(opt_state=s.opt_state._replace(slots=twice(s.opt_state.slots))) for s in (donated, plain)
    )
    assert_same(*both(tx, donated, plain, gradients(plain, 2)))


MISFITS = {
    "a leaf less": lambda g: {"a": g["a"]},
    "another shape": lambda g: fs.tree_map(lambda x: x[:1], g),
    "another dtype": lambda g: fs.tree_map(torch.Tensor.double, g),
    "a plain tensor": lambda g: {"a": g["a"].local, "b": g["b"]},
    "another node": lambda g: {"a": g["a"], "b": tuple(g["b"])},
}


@pytest.mark.parametrize("misfit", MISFITS)
@pytest.mark.parametrize("name", ("AdamW", "SGD momentum fused"))
@on_ranks(2)
def test_gradients_that_do_not_fit_are_refused_with_the_state_whole(name, misfit):
    tx, plain = start(name)
    donated = copy.deepcopy(plain)
    donated, plain = both(tx, donated, plain, gradients(plain, 0))
    with pytest.raises(ValueError, match="update"):
        fs.update(tx, donated, MISFITS[misfit](gradients(plain, 1)), donate=True)
    assert_same(donated, plain)
    assert_same(*both(tx, donated, plain, gradients(plain, 1)))


@pytest.mark.rows(1)
@pytest.mark.parametrize("name", CASES)
@on_ranks(2)
def test_nothing_is_kept_alive(name):
    tx, state = start(name)
    for step in range(3):
        state = fs.update(tx, state, gradients(state, step), donate=True)
    held = weakref.ref(state.params["a"].local)
    del state
    gc.collect()
    assert held() is None


def test_an_optimizer_that_has_run_goes_to_another_process(workers):
    tx = CASES["AdamW"]()
    state = fs.TrainState.create({"w": torch.ones(3)}, tx)
    for _ in range(2):
        state = fs.update(tx, state, {"w": torch.ones(3)}, donate=True)

    def program():
        fresh = fs.TrainState.create(fs.shard({"w": torch.ones(3)}, fs.ddp(one_axis())), tx)
        return fs.unshard(fs.update(tx, fresh, fresh.params, donate=True).params)["w"]

    first, second = spmd(program, workers(2))
    assert first.equal(second)
    assert copy.deepcopy(tx).init({"w": torch.ones(3)})
