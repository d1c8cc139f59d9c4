"""Buffers and random numbers of models cut into units, and evaluation outside value_and_grad."""

import copy
from itertools import product

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
    Block,
    Dropped,
    Language,
    filled,
    full,
    tokens,
    vectors,
    zero3,
)


class Counter(nn.Module):
    """Buffers that are saved and not, written in place and replaced, shared and empty."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64), persistent=False)
        self.register_buffer("calls", torch.tensor(0), persistent=False)
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))
        self.register_buffer("nothing", None)

    def forward(self, x):
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        return x * self.scale + self.mean / self.calls


class Normalised(nn.Module):
    """Batch normalisation inside units and between them."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(13), Counted(11), Block(5)])
        self.norm, self.counter = nn.BatchNorm1d(WIDTH, momentum=None), Counter()

    def forward(self, x):
        for block in self.blocks:
            x = self.counter(block(x))
        return self.norm(x.flatten(0, 1)).pow(3).mean()


class Counted(Block):
    def __init__(self, hidden):
        super().__init__(hidden)
        self.batch_norm, self.counter = nn.BatchNorm1d(WIDTH), Counter()

    def forward(self, x):
        return self.counter(super().forward(self.batch_norm(x.flatten(0, 1)).unflatten(0, x.shape[:2])))


STEPS = 3


def in_one_process(module, batches):
    """Each step's mean loss and gradients, and each rank's buffers after it."""
    ranks = [copy.deepcopy(module) for _ in batches[0]]
    for step in batches:
        losses = [model(*batch) for model, batch in zip(ranks, step)]
        grads = [torch.autograd.grad(loss, list(model.parameters())) for loss, model in zip(losses, ranks)]
        means = [sum(of_ranks) / len(ranks) for of_ranks in zip(*grads)]
        buffers = [{name: buffer.clone() for name, buffer in model.named_buffers()} for model in ranks]
        yield sum(losses).detach() / len(ranks), dict(zip(dict(module.named_parameters()), means)), buffers


@on_ranks(1, 2, 3)
def test_buffers_go_in_and_out(world_size):
    """Over several steps each rank's buffers are those of one process that runs its batches, bit by bit."""
    module, mesh = filled(Normalised()), one_axis()
    batches = [vectors(world_size * STEPS)[step::STEPS] for step in range(STEPS)]
    expected, rank = list(in_one_process(module, batches)), mesh.get_rank()
    for rule, strategy in product(RULES.values(), CHOSEN[world_size].values()):
        model = fs.functionalize(module, rule)
        run = fs.value_and_grad(lambda p, b, x, m=model: m.apply(p, x, buffers=b), has_aux=True)
        params, buffers = model.init(strategy(mesh)), model.buffers
        assert {"counter.scale", "counter.calls", "blocks.1.counter.mean", "norm.running_var"} <= set(buffers)
        for step, (value, grads, after) in zip(batches, expected):
            (objective, buffers), sharded = run(params, buffers, *step[rank])
            assert_trees_close(full((objective, sharded)), (value, grads), rtol=0, atol=BOUND)
            assert_same_bits(buffers, after[rank])


class Evaluated(Language):
    """A language model that returns what it computes."""

    def forward(self, tokens):
        return self.logits(self.hidden(self.embedding(tokens)))


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
    for folded, module, rule in product((False, True), modules, (None, Block, nn.Module)):
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
