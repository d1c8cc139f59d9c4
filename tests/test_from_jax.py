"""What the guide says to users of JAX and Optax: the patterns work, and what does not work says what does."""

import re
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.func import grad, grad_and_value, vmap

import fshard as fs
from fshard.testing import assert_trees_close
from tests.ranks import my_rank, on_ranks
from tests.trees import assert_same_bits, normal, one_axis

ROUNDING = {"rtol": 0.0, "atol": 1000 * torch.finfo(torch.float64).eps}
RATE, RANKS = 0.1, 2
STRATEGIES = {"zero3": partial(fs.zero3, min_shard_elements=0), "zero2": fs.zero2, "ddp": fs.ddp}


class Task(NamedTuple):
    support: torch.Tensor
    query: torch.Tensor


def full():
    draw = normal()
    return {"w": draw(4, 6), "v": draw(6, 1)}


def tasks(rank):
    draw = normal(10 + rank)
    return Task(draw(3, 5, 4), draw(3, 5, 4))


def net(params, x):
    return (x @ params["w"]).tanh() @ params["v"]


def inner(params, x):
    return (net(params, x) - x.sum(-1, keepdim=True).sin()).square().mean()


def adapted(params, task):
    return fs.tree_map(lambda p, g: p - RATE * g, params, grad(inner)(params, task.support))


def outer(params, task):
    params = fs.gather(params)
    return vmap(lambda task: inner(adapted(params, task), task.query))(task).mean()


# Strategies that gather nothing again: torch.func has no gradients under hooks of saved tensors.
KEEPING = STRATEGIES | {"zero3": partial(STRATEGIES["zero3"], regather=False)}


@pytest.mark.parametrize("strategy", KEEPING)
@on_ranks(RANKS)
def test_gradients_inside_of_a_loss_are_this_ranks_own_after_a_gather(strategy):
    def dense(params):
        return torch.stack(
            [vmap(lambda task: inner(adapted(params, task), task.query))(tasks(rank)).mean() for rank in range(RANKS)]
        ).mean()

    params = fs.shard(full(), KEEPING[strategy](one_axis()))
    step, task = fs.value_and_grad(outer), tasks(my_rank())
    eager, jitted = step(params, task), fs.jit(step)(params, task)
    assert_same_bits(fs.tree_leaves(jitted), fs.tree_leaves(eager))
    grads, loss = grad_and_value(dense)(full())
    assert_trees_close((eager[0], fs.unshard(eager[1])), (loss, grads), **ROUNDING)


@on_ranks(RANKS)
def test_members_are_stacked_after_they_were_sharded():
    strategy, x = STRATEGIES["zero3"](one_axis()), tasks(0).query[0]
    members = [fs.shard(fs.tree_map(lambda leaf, n=n: leaf + n, full()), strategy) for n in range(3)]
    stacked = fs.tree_map(lambda *leaves: torch.stack(leaves), *members)

    def loss(params):
        return inner(fs.gather(params), x)

    values, grads = vmap(fs.value_and_grad(loss))(stacked)
    for n, member in enumerate(members):
        value, gradient = fs.value_and_grad(loss)(member)
        one = fs.tree_map(lambda leaf, n=n: leaf[n], grads)
        assert_trees_close((values[n], fs.unshard(one)), (value, fs.unshard(gradient)), **ROUNDING)
    unsplit = fs.shard(fs.tree_map(lambda leaf: torch.stack([leaf] * 3), full()), strategy)
    with pytest.raises(ValueError, match=r"expected a local tensor of shape .* as local tensor"):
        vmap(fs.value_and_grad(loss))(unsplit)
    with pytest.raises(RuntimeError, match="Batching rule not implemented"):
        vmap(fs.unshard)(stacked)


class Noise(nn.Module):
    def __init__(self, like):
        super().__init__()
        self.size = like

    def forward(self):
        return torch.randn(self.size)


def test_a_module_that_draws_makes_random_numbers_of_a_key():
    noise = fs.functionalize(Noise(5))
    draw = partial(noise.apply, {})
    jitted = fs.jit(lambda key: draw(key=key))
    for n in range(3):
        key = fs.fold_in(0, n)
        assert jitted(key).equal(draw(key=key))
    assert len(jitted.traces) == 1
    text = (
        "apply: expected one key, from which torch's generator draws, got a batch of keys, by vmap; loop over the "
        "keys, or draw before vmap and pass what was drawn"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        vmap(lambda key: draw(key=key), randomness="different")(torch.arange(3))
