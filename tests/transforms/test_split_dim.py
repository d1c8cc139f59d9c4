"""split_dim and own_dim: leaves that stay split over an axis, alone, next to fully_shard, and in training."""

import itertools
from functools import cache

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.rounding import tolerance
from fshard.testing import assert_trees_close, check_adjoint
from tests.ranks import on_ranks
from tests.test_law_ddp import spellings
from tests.test_law_purity import unchanged
from tests.transforms.laws import grid
from tests.trees import WORLD_SIZES, assert_same_bits, normal, one_axis

# (shape, dim that stays split, dim that is gathered): alike and not, uneven in the axis gathered over, empty.
CASES = [*(((10, 3), 0, 0), ((5, 4), 1, 0), ((5, 4), -1, -1), ((2, 7, 4), 2, 1), ((18,), 0, -1), ((0, 4), 1, 0))]
DTYPES = (torch.float64, torch.bfloat16, torch.complex64, torch.int32, torch.bool, torch.float8_e4m3fn)


@pytest.mark.rows(1)
@on_ranks(*WORLD_SIZES)
def test_pieces_round_trips_and_adjoint(world_size):
    mesh, line = grid(world_size), fs.fully_shard(one_axis())
    shard, tp = fs.axis_of(mesh, "shard"), fs.axis_of(mesh, "tp")
    for case, split in itertools.product(CASES, (fs.split_dim, fs.own_dim)):
        shape, kept, gathered = case
        transform = fs.compose(fs.fully_shard(shard, dim=gathered), split(tp, dim=kept))
        assert transform.axes == ((shard, tp) if split is fs.own_dim else (shard,))
        kept, gathered = kept % len(shape), gathered % len(shape)
        names = [None] * (max(kept, gathered) + 1)
        names[gathered] = "shard"
        names[kept] = ("tp", "shard") if kept == gathered else "tp"
        for dtype in DTYPES if case in CASES[:2] else DTYPES[:1]:
            full = {"w": (normal()(*shape) * 9).to(dtype)}
            params = fs.shard(full, transform)
            spec = params["w"].spec
            assert (spec.roles, spec.scattered_axes) == ({shard: "gathered", tp: "owned"}, (shard,))
            assert spec.partition == fs.P(*names)
            mine = full["w"].chunk(tp.size, kept)[fs.comm.rank(tp)] if shape[kept] else full["w"]
            with unchanged(full, params):
                assert_same_bits(fs.gather(params), {"w": mine})
                assert spec.gathered_shape == tuple(mine.shape)
                assert_same_bits(fs.unshard(params), full)
                moved = fs.reshard(params, line)
                assert_same_bits(fs.unshard(moved), full)
                assert_same_bits(fs.reshard(moved, transform)["w"].local, params["w"].local)
        check_adjoint(transform, [shape])


WIDTH, ROWS, STEPS, MAX_NORM = 8, 24, 3, 0.1
ADAMW = dict(lr=0.01, eps=0.01, weight_decay=0.1)
# A gradient adds up a term below 1 for each row, in another order than one process does. AdamW hands on 2 lr / eps of
# that, and the next gradient, of a loss with curvature about 1, what parameters differ by then.
BOUND = tolerance(torch.float64, ROWS, steps=(1 + 2 * ADAMW["lr"] / ADAMW["eps"]) ** STEPS - 1)


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


def megatron(mesh, strategy):
    rows = fs.masked(fs.split_dim(mesh["tp"], dim=1), "second.weight")
    return fs.compose(strategy, fs.masked(fs.split_dim(mesh["tp"], dim=0), "first.*", otherwise=rows))


@cache
def one_process():
    """Losses and parameters by torch alone."""
    module, draw, losses = perceptron(), normal(1), []
    optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = module(draw(ROWS, 5)).square().sum(1).mean()
        loss.backward()
        assert nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM) > MAX_NORM
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), {name: p.detach() for name, p in module.named_parameters()}


@pytest.mark.rows(2)
@on_ranks(2, 3, 4, 8)
def test_training_is_that_of_one_process(world_size):
    """With rows of several numbers on the ranks of "shard"; and each axis carries its own."""
    tx, mesh = fs.chain(fs.clip_by_global_norm(MAX_NORM), fs.adamw(**ADAMW)), grid(world_size)
    shard, tp = fs.axis_of(mesh, "shard"), fs.axis_of(mesh, "tp")
    module = perceptron()
    ends = [ROWS * n**2 // shard.size**2 for n in range(shard.size + 1)]
    start, end = ends[fs.comm.rank(shard) :][:2]

    def loss_fn(params, x):
        out = torch.func.functional_call(module, fs.gather(params), (x, tp))
        return out.square().sum(), torch.tensor(len(x))

    strategies = fs.zero3(mesh, bucket_bytes=0, min_shard_elements=0), fs.zero2(mesh, min_shard_elements=20)
    for inner, step in zip(strategies, spellings(loss_fn, "weighted")):
        draw, losses = normal(1), []
        params = fs.shard(dict(module.named_parameters()), megatron(mesh, inner))
        state = fs.TrainState.create(params, tx)
        for _ in range(STEPS):
            with fs.comm.record() as record:
                loss, grads = step(state.params, draw(ROWS, 5)[start:end])
            state = fs.update(tx, state, grads)
            losses.append(loss)
        found = torch.stack(losses), fs.unshard(state.params)
        assert_trees_close(found, one_process(), rtol=0.0, atol=BOUND)
        back = fs.reshard(fs.reshard(params, fs.ddp(mesh)), megatron(mesh, inner))
        assert_same_bits(fs.tree_leaves(back), fs.tree_leaves(params))
        labels = {entry.label for entry in record if entry.axis == "tp" and not entry.scalar}
        assert labels <= {"psum_invariant", "pcast"}
