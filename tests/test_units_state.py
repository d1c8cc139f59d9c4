"""Buffers and random numbers of models cut into units, and evaluation outside value_and_grad."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard.testing import assert_trees_close, spmd
from tests.ranks import on_ranks
from tests.trees import assert_same_bits, one_axis
from tests.unit_models import (
    BOUND,
    CHOSEN,
    RULES,
    WIDTH,
    Block,
    Language,
    filled,
    full,
    one_process,
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


@pytest.mark.parametrize("rule", RULES)
@on_ranks(1, 2, 3)
def test_buffers_go_in_and_out(world_size, rule):
    """Over several steps each rank's buffers are those of one process that runs its batches, bit by bit."""
    module = filled(Normalised())
    batches = [vectors(world_size * STEPS)[step::STEPS] for step in range(STEPS)]
    expected = list(in_one_process(module, batches))
    mesh, model = one_axis(), fs.functionalize(module, RULES[rule])
    rank = mesh.get_rank()

    def loss(params, buffers, x):
        return model.apply(params, x, buffers=buffers)

    for strategy in CHOSEN[world_size].values():
        params, buffers = model.init(strategy(mesh)), model.buffers
        assert {"counter.scale", "counter.calls", "blocks.1.counter.mean", "norm.running_var"} <= set(buffers)
        for step, (value, grads, after) in zip(batches, expected):
            found = fs.value_and_grad(loss, has_aux=True)(params, buffers, *step[rank])
            (objective, buffers), sharded = found
            assert_trees_close(full((objective, sharded)), (value, grads), rtol=0, atol=BOUND)
            assert_same_bits(buffers, after[rank])


class Evaluated(Language):
    """A language model that returns what it computes."""

    def forward(self, tokens):
        return self.logits(self.hidden(self.embedding(tokens)))


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode, torch.enable_grad))
@pytest.mark.parametrize("rule", RULES)
@on_ranks(1, 2, 3)
def test_evaluation(world_size, rule, mode):
    """Outside value_and_grad units are gathered once each, whatever the mode."""
    module = filled(Evaluated())
    batches = tokens(world_size)
    expected = [module(*batch).detach() for batch in batches]
    mesh, model = one_axis(), fs.functionalize(module, RULES[rule])
    rank = mesh.get_rank()
    for strategy in CHOSEN[world_size].values():
        params = model.init(strategy(mesh))
        with mode():
            outputs = [model.apply(params, *batches[rank]) for _ in range(2)]
        assert_same_bits(outputs, [expected[rank]] * 2)
        assert not any(out.requires_grad for out in outputs)
        with fs.comm.record() as record:
            model.apply(params, *batches[rank])
        padded = sum(leaf.local.numel() * leaf.local.element_size() * world_size for leaf in params.values())
        assert sum(entry.bytes for entry in record if not entry.scalar) == (padded if world_size > 1 else 0)


class Inputs(nn.Module):
    def __init__(self, checkpointed):
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, (13, 12, 11)))
        self.checkpointed = checkpointed

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x.square().mean()


@pytest.mark.parametrize("rule", RULES)
@on_ranks(1, 2, 3)
def test_gradients_of_inputs_outside_value_and_grad(world_size, rule):
    """As for saliency maps: the caller differentiates what was evaluated, with parameters that take no gradient."""
    module = filled(Inputs(checkpointed=False))
    batches = vectors(world_size)
    inputs = [x.clone().requires_grad_() for (x,) in batches]
    expected = [torch.autograd.grad(module(x), x) for x in inputs]
    mesh, model = one_axis(), fs.functionalize(module, RULES[rule])
    rank = mesh.get_rank()
    for strategy in CHOSEN[world_size].values():
        params = model.init(strategy(mesh))
        x = batches[rank][0].clone().requires_grad_()
        found = torch.autograd.grad(model.apply(params, x), x)
        assert_trees_close(found, expected[rank], rtol=0, atol=BOUND)


@pytest.mark.parametrize("checkpointed", (False, True))
@on_ranks(1, 2, 3)
def test_a_graph_of_the_caller(world_size, checkpointed):
    """Parameters that take part in a graph of the caller's own are differentiated by it."""
    module = filled(Inputs(checkpointed))
    batches = vectors(world_size)
    value, grads = one_process(module, batches, lambda apply, p, b: sum(apply(p, *x) for x in b) / world_size)
    mesh, model = one_axis(), fs.functionalize(module, Block)
    (x,) = batches[mesh.get_rank()]
    params = fs.tree_map(lambda leaf: leaf.requires_grad_(), model.init(zero3()(mesh)))
    loss = fs.objective(model.apply(params, x), like=params)
    found = iter(torch.autograd.grad(loss, fs.tree_leaves(params)))
    assert_trees_close(
        full((loss.detach(), fs.tree_map(lambda _: next(found), params))), (value, grads), rtol=0, atol=BOUND
    )


# Random numbers, from explicit keys: on processes, because a generator belongs to one.

KEY = 7
PROCESSES = 2


class Dropped(Block):
    """A block with dropout; `checkpointed` computes it again in the backward."""

    def __init__(self, hidden, checkpointed):
        super().__init__(hidden)
        self.dropout, self.checkpointed = nn.Dropout(0.5), checkpointed

    def run(self, x):
        return self.dropout(super().forward(self.dropout(x)))

    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=False) if self.checkpointed else self.run(x)


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


KEY_RULES = {"one unit": None, "blocks": Block, "every module": nn.Module}


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


@pytest.mark.rows(2)
@pytest.mark.parametrize("prefetch", (0, 1, 2))
@pytest.mark.parametrize("checkpointed", (False, True))
@pytest.mark.parametrize("folded", (False, True))
@on_ranks("2 processes")
def test_keys_decide_the_masks(folded, checkpointed, prefetch):
    """One key gives every rank the same masks, and a key for each rank others, by each rule and in each call."""
    # A number stands for a rank as its axis does.
    expected, masks = with_keys(network(), [fs.fold_in(KEY, rank) if folded else KEY for rank in range(PROCESSES)])
    assert masks[0].equal(masks[1]) is not folded
    mesh, module = one_axis(), network(checkpointed)
    (x,) = vectors(PROCESSES)[mesh.get_rank()]
    key = fs.fold_in(KEY, fs.axis_of(mesh)) if folded else KEY
    torch.manual_seed(mesh.get_rank())
    state = torch.get_rng_state()
    for rule in KEY_RULES.values():
        model = fs.functionalize(module, rule)
        params = model.init(zero3(prefetch=prefetch)(mesh))
        run = fs.value_and_grad(lambda p: model.apply(p, x, key=key), has_aux=True)  # noqa: B023
        (value, mask), grads = run(params)
        found = full((value, grads))
        assert_trees_close(found, expected, rtol=0, atol=BOUND)
        assert_same_bits(mask, masks[mesh.get_rank()])
        (value, mask), grads = run(params)
        assert_same_bits((full((value, grads)), mask), (found, masks[mesh.get_rank()]))
    # A key changes nothing of the generator that code without keys draws from.
    assert torch.get_rng_state().equal(state)


def test_another_key_gives_other_masks():
    module = network()
    masks = [with_keys(module, [key])[1][0] for key in (KEY, KEY + 1, fs.fold_in(KEY, 0), fs.fold_in(KEY, 1))]
    assert len({tuple(mask.tolist()) for mask in masks}) == len(masks)
    assert_same_bits(with_keys(module, [torch.tensor(KEY)])[1][0], masks[0])


@on_ranks("2 processes")
def test_calls_in_one_loss_draw_from_their_keys():
    """The order of calls does not matter, nor what is drawn in between."""
    module = network()
    mesh, model = one_axis(), fs.functionalize(module, Block)
    params = model.init(zero3()(mesh))
    (x,) = vectors(PROCESSES)[mesh.get_rank()]

    def loss(p, order):
        found = {}
        for key in order:
            torch.rand(3)
            found[key] = model.apply(p, x, key=key)
        return found[1][0] - 2 * found[2][0], (found[1][1], found[2][1])

    run = fs.value_and_grad(loss, has_aux=True)
    (one, masks), grads = run(params, (1, 2))
    (two, again), others = run(params, (2, 1))
    assert_same_bits(masks, again)
    assert not masks[0].equal(masks[1])
    assert_trees_close((one, grads), (two, others), rtol=0, atol=BOUND)


def test_without_a_key_masks_come_from_the_ambient_generator(workers):
    """And those of a unit that is computed again are the same."""
    plain, again = network(), network(checkpointed=True)

    def program():
        mesh, results = one_axis(), []
        (x,) = vectors(PROCESSES)[mesh.get_rank()]
        for module in (plain, again, copy.deepcopy(plain)):
            model = fs.functionalize(module, KEY_RULES["every module"])
            torch.manual_seed(mesh.get_rank())
            (value, mask), grads = fs.value_and_grad(lambda p: model.apply(p, x), has_aux=True)(  # noqa: B023
                model.init(zero3()(mesh))
            )
            results.append((value, mask, fs.unshard(grads)))
        for result in results[1:]:
            assert_same_bits(result, results[0])
        return results[0][1]

    first, second = spmd(program, workers(PROCESSES))
    assert not first.equal(second)
