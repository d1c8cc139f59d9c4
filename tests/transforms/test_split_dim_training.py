"""split_dim in training: tensor parallelism next to every strategy is one process's training."""

import copy

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.testing import RankError, assert_trees_close
from tests.ranks import on_ranks
from tests.transforms.laws import grid
from tests.trees import WORLD_SIZES, assert_same_bits, every_bit, normal

WIDTH, ROWS, STEPS = 8, 24, 4


class Perceptron(nn.Module):
    """Megatron's: the first layer by columns, the second by rows; with no axis one process's."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3, bias=False)
        self.bias = nn.Parameter(torch.ones(3))

    def forward(self, x, axis=None):
        hidden = self.second(torch.tanh(self.first(x)))
        return (hidden if axis is None else fs.psum_invariant(hidden, axis)) + self.bias


def perceptron():
    module, draw = Perceptron().double(), normal()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(draw(*parameter.shape) / WIDTH**0.5)
    return module


def batches():
    draw = normal(1)
    return [(draw(ROWS, 5), draw(ROWS, 3)) for _ in range(STEPS)]


def megatron(mesh, strategy):
    rows = fs.masked(fs.split_dim(mesh["tp"], dim=1), "second.weight")
    return fs.compose(strategy, fs.masked(fs.split_dim(mesh["tp"], dim=0), "first.*", otherwise=rows))


STRATEGIES = {
    "fully_shard": lambda mesh: fs.fully_shard(mesh["shard"]),
    "the other dim": lambda mesh: fs.fully_shard(mesh["shard"], dim=-1),
    "zero3": lambda mesh: fs.zero3(mesh, min_shard_elements=0, merge_bytes=0),
    "ddp": lambda mesh: fs.ddp(mesh, "shard"),
}
OPTIMIZERS = {
    "clipped SGD": (torch.optim.SGD, dict(lr=0.1, momentum=0.9), 0.05),
    "AdamW": (torch.optim.AdamW, dict(lr=0.01, eps=0.01), None),
}
# As in test_law_ddp: a gradient adds up ROWS terms below 1, an update hands on at most 2 / 0.01 * 0.01 of it, and each
# step what was there before; a norm is a sum of 75 squares, whose rounding moves gradients of norm 0.05 by less.
BOUND = ROWS * torch.finfo(torch.float64).eps * (3**STEPS - 1)


def one_process(optimizer):
    cls, hyper, max_norm = OPTIMIZERS[optimizer]
    module = perceptron()
    run = cls(module.parameters(), **hyper)
    for x, y in batches():
        run.zero_grad()
        (module(x) - y).square().mean(1).mean().backward()
        if max_norm is not None:
            assert nn.utils.clip_grad_norm_(module.parameters(), max_norm) > max_norm
        run.step()
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def train(mesh, module, strategy, optimizer):
    """Train by both spellings of the step; their states must agree bit for bit."""
    cls, hyper, max_norm = OPTIMIZERS[optimizer]
    shard, tp = fs.axis_of(mesh, "shard"), fs.axis_of(mesh, "tp")
    model, own = fs.functionalize(module, units=nn.Linear), copy.deepcopy(module)
    tx = fs.chain(*([] if max_norm is None else [fs.clip_by_global_norm(max_norm)]), fs.from_torch(cls, **hyper))

    def loss_fn(params, x, y):
        return (model.apply(params, x, tp) - y).square().mean(1).mean()

    def in_one_call(state, x, y):
        return fs.update(tx, state, fs.value_and_grad(loss_fn)(state.params, x, y)[1])

    def full_loss(full, x, y):
        return (torch.func.functional_call(own, full, (x, tp)) - y).square().mean(1).mean()

    def with_four_verbs(state, x, y):
        grads = torch.func.grad(full_loss)(fs.gather(state.params), x, y)
        return fs.update(tx, state, fs.scatter_grads(grads, like=state.params))

    states = []
    for step in (in_one_call, with_four_verbs):
        state = fs.TrainState.create(model.init(strategy), tx)
        for batch in batches():
            state = step(state, *(tensor.chunk(shard.size)[fs.comm.rank(shard)] for tensor in batch))
        states.append(state)
    assert_same_bits(fs.tree_leaves(states[0]), fs.tree_leaves(states[1]))
    return states[0]


@pytest.mark.rows(1)
@on_ranks(*WORLD_SIZES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_tensor_parallel_training_is_that_of_one_process(optimizer, world_size):
    module, expected, mesh = perceptron(), one_process(optimizer), grid(world_size)
    for name in STRATEGIES if world_size == 4 else ("fully_shard", "zero3"):
        state = train(mesh, module, megatron(mesh, STRATEGIES[name](mesh)), optimizer)
        assert_trees_close(fs.unshard(state.params), expected, rtol=0, atol=BOUND)
        for moments in state.opt_state[-1].slots.values():
            for key, moment in moments.items():
                if fs.tree_leaves(moment)[0].shape == state.params[key].local.shape:
                    assert moment.spec == state.params[key].spec
    return every_bit(fs.unshard(state.params))


@on_ranks("2 processes")
def test_processes():
    """Two ranks that are both tensor parallel."""
    module, expected = perceptron(), one_process("clipped SGD")
    mesh = grid(2)
    state = train(mesh, module, megatron(mesh, fs.zero3(mesh, min_shard_elements=0)), "clipped SGD")
    assert state.params["first.weight"].local.shape == (WIDTH // 2, 5)
    assert_trees_close(fs.unshard(state.params), expected, rtol=0, atol=BOUND)


@pytest.mark.xfail(strict=True, raises=RankError, reason="apply asks gathered parameters for the module's full shapes")
@on_ranks(2)
def test_apply_takes_gathered_pieces_as_it_takes_shards():
    module = perceptron()
    mesh, model = grid(2), fs.functionalize(module)
    params, tp = model.init(megatron(mesh, fs.fully_shard(mesh["shard"]))), fs.axis_of(mesh, "tp")
    x, _ = batches()[0]
    assert_same_bits(model.apply(fs.gather(params), x, tp), model.apply(params, x, tp))
