"""What the guide says to users of JAX and Optax: the patterns work, and what does not work says what does."""

import re
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.func import grad, grad_and_value, vmap

import fshard as fs
from fshard.testing import assert_trees_close, spmd
from tests.ranks import my_rank, on_ranks
from tests.test_custom_transforms import TopK, lossy
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


def failure(f):
    try:
        f()
    except ValueError as error:
        return str(error)
    return None


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


@on_ranks(RANKS)
def test_norms_of_shards_are_sums_over_ranks():
    """A transformation of Optax by the user's own hand."""

    def update(grads, state, params):
        norm = fs.global_norm(grads)
        return fs.tree_map(lambda g: g / (norm + 1e-6).clamp(min=1.0), grads), state

    params = fs.shard(full(), STRATEGIES["zero3"](one_axis()))
    transformations = fs.GradientTransformation(lambda params: (), update), fs.clip_by_global_norm(1.0)
    own, built_in = (fs.unshard(tx.update(params, tx.init(params), params)[0]) for tx in transformations)
    norm = torch.cat([leaf.flatten() for leaf in full().values()]).norm()
    assert_trees_close(own, built_in, **ROUNDING)
    assert_trees_close(built_in, fs.tree_map(lambda leaf: leaf / (norm + 1e-6), full()), **ROUNDING)


class Rounded(torch.autograd.Function):
    """To bfloat16, up or down by noise, whose mean is the number; its gradient passes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, noise):
        bits = x.contiguous().view(torch.int32) + noise
        return (bits & -65536).view(torch.float32).bfloat16()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx, gradient):
        return gradient.to(ctx.dtype), None


def rounded(leaf, key):
    number = fs.fold_in(key, torch.arange(leaf.numel()))
    return Rounded.apply(leaf, (number & 65535).int().reshape(leaf.shape))


@on_ranks(RANKS)
def test_shards_may_be_rounded_by_a_key_before_they_are_gathered():
    mesh = one_axis()
    single = fs.tree_map(torch.Tensor.float, full())
    params, x = fs.shard(single, STRATEGIES["zero3"](mesh)), tasks(mesh.get_rank()).query[0].float()

    def loss_fn(params, key, x):
        key = fs.fold_in(key, fs.axis_of(mesh))
        low = fs.gather(fs.tree_map(lambda leaf: rounded(leaf, key), params))
        return inner(fs.tree_map(torch.Tensor.float, low), x)

    step = fs.value_and_grad(loss_fn)
    jitted, losses = fs.jit(step), []
    for n in range(3):
        key = fs.fold_in(0, n)
        with fs.comm.record() as record:
            eager = step(params, key, x)
        assert_same_bits(fs.tree_leaves(jitted(params, key, x)), fs.tree_leaves(eager))
        losses.append(float(eager[0]))
    assert len(set(losses)) == 3
    assert len(jitted.traces) == 1
    # Numbers of two bytes, and gradients as well.
    assert [entry.bytes for entry in record if entry.label in ("gather", "scatter")] == [2 * (24 + 6)] * 2


def test_state_of_transforms_belongs_to_its_number_of_ranks(tmp_path):
    tx, error = fs.sgd(RATE, momentum=0.9), []

    def state_of():
        return fs.TrainState.create(fs.shard(full(), fs.zero3(one_axis(), layout=lossy(TopK, 0.5))), tx)

    def save():
        state = state_of()
        fs.checkpoint.save(tmp_path / "run", state).wait()
        # A composition has a state for each of its parts.
        return isinstance(state.transform_state["w"], tuple)

    def restore():
        like = state_of()
        error.append(failure(lambda: fs.checkpoint.restore(tmp_path / "run", like)))
        keep = fs.checkpoint.restore(
            tmp_path / "run", like, only=lambda name, leaf: not name.startswith("transform_state")
        )
        return fs.unshard(keep.params)

    assert spmd(save, RANKS) == [True] * RANKS
    (params,) = spmd(restore, 1)
    assert_same_bits(fs.tree_leaves(params), fs.tree_leaves(full()))
    assert "transform_state" in error[0]
