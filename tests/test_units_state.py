"""Buffers and random numbers of models cut into units, and evaluation outside value_and_grad."""

from itertools import product

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.testing import assert_trees_close
from tests.ranks import on_ranks
from tests.trees import assert_same_bits, one_axis
from tests.unit_models import (
    BOUND,
    CHOSEN,
    RULES,
    WIDTH,
    Dropped,
    Language,
    filled,
    full,
    tokens,
    vectors,
    zero3,
)


class Evaluated(Language):
    """A language model that returns what it computes."""

    def forward(self, tokens):
        return self.logits(self.hidden(self.embedding(tokens)))


@pytest.mark.rows(1)
@on_ranks(1, 2, 3)
def test_evaluation(world_size):
    """Outside value_and_grad units are gathered once each, whatever the mode."""
    module, mesh = filled(Evaluated()), one_axis()
    batch = tokens(world_size)[mesh.get_rank()]
    expected = module(*batch).detach()
    for rule, strategy in product(RULES.values(), CHOSEN[world_size].values()):
        model = fs.functionalize(module, rule)
        params = model.init(strategy(mesh))
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with mode(), fs.comm.record() as record:
                out = model.apply(params, *batch)
            assert not out.requires_grad
            assert_same_bits(out, expected)
            padded = sum(leaf.local.nbytes * world_size for leaf in params.values())
            assert sum(entry.bytes for entry in record if not entry.scalar) == (padded if world_size > 1 else 0)


# Random numbers, from explicit keys: on processes, because a generator belongs to one.

KEY = 7
PROCESSES = 2


class Network(nn.Module):
    """Returns the loss, and ones that were dropped out as the rest is."""

    def __init__(self, checkpointed=False):
        super().__init__()
        self.blocks = nn.ModuleList(Dropped(hidden, checkpointed) for hidden in (13, 11))
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 11, dropout=0.3, batch_first=True)
        self.lstm = nn.LSTM(WIDTH, 5, num_layers=2, dropout=0.4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        mask = self.dropout(torch.ones(100, dtype=x.dtype))
        for block in self.blocks:
            x = block(x)
        x, _ = self.lstm(self.encoder(x))
        return self.dropout(x).square().mean(), mask


def network(checkpointed=False):
    return filled(Network(checkpointed))


def with_keys(module, keys):
    """Each rank's loss and gradients with full parameters and its key, averaged; and its mask."""
    model, batches = fs.functionalize(module), vectors(len(keys))
    leaves = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    outputs = [model.apply(leaves, *batch, key=key) for batch, key in zip(batches, keys)]
    loss = sum(loss for loss, _ in outputs) / len(keys)
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return (loss.detach(), dict(zip(leaves, grads))), [mask for _, mask in outputs]


@on_ranks("2 processes")
def test_keys_decide_the_masks():
    """One key gives every rank the same masks, and a key for each rank others, by each rule and in each call."""
    mesh, modules = one_axis(), [network(checkpointed) for checkpointed in (False, True)]
    (x,), rank = vectors(PROCESSES)[mesh.get_rank()], mesh.get_rank()
    torch.manual_seed(rank)
    state = torch.get_rng_state()
    for folded, module, rule in product((False, True), modules, (None, nn.Module)):
        # A number stands for a rank as its axis does.
        expected, masks = with_keys(modules[0], [fs.fold_in(KEY, n) if folded else KEY for n in range(PROCESSES)])
        assert masks[0].equal(masks[1]) is not folded
        key = fs.fold_in(KEY, fs.axis_of(mesh)) if folded else KEY
        model = fs.functionalize(module, rule)
        params = model.init(zero3()(mesh))
        run = fs.value_and_grad(lambda p, m=model, key=key: m.apply(p, x, key=key), has_aux=True)
        (value, mask), grads = run(params)
        found = full((value, grads))
        assert_trees_close(found, expected, rtol=0, atol=BOUND)
        assert_same_bits(mask, masks[rank])
        (value, mask), grads = run(params)
        assert_same_bits((full((value, grads)), mask), (found, masks[rank]))
    # A key changes nothing of the generator that code without keys draws from.
    assert torch.get_rng_state().equal(state)
