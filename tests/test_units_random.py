"""Random numbers of models cut into units, from explicit keys: on processes, because a generator belongs to one."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard.testing import assert_trees_close, spmd
from tests.ranks import on_ranks
from tests.trees import assert_same_bits, one_axis
from tests.unit_models import BOUND, WIDTH, Block, filled, full, vectors, zero3

KEY = 7
RANKS = 2


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


RULES = {"one unit": None, "blocks": Block, "every module": nn.Module}


def network(checkpointed=False):
    return filled(Network(checkpointed))


def one_process(module, keys):
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
    expected, masks = one_process(network(), [fs.fold_in(KEY, rank) if folded else KEY for rank in range(RANKS)])
    assert masks[0].equal(masks[1]) is not folded
    mesh, module = one_axis(), network(checkpointed)
    (x,) = vectors(RANKS)[mesh.get_rank()]
    key = fs.fold_in(KEY, fs.axis_of(mesh)) if folded else KEY
    torch.manual_seed(mesh.get_rank())
    state = torch.get_rng_state()
    for rule in RULES.values():
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
    masks = [one_process(module, [key])[1][0] for key in (KEY, KEY + 1, fs.fold_in(KEY, 0), fs.fold_in(KEY, 1))]
    assert len({tuple(mask.tolist()) for mask in masks}) == len(masks)
    assert_same_bits(one_process(module, [torch.tensor(KEY)])[1][0], masks[0])


@on_ranks("2 processes")
def test_calls_in_one_loss_draw_from_their_keys():
    """The order of calls does not matter, nor what is drawn in between."""
    module = network()
    mesh, model = one_axis(), fs.functionalize(module, Block)
    params = model.init(zero3()(mesh))
    (x,) = vectors(RANKS)[mesh.get_rank()]

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
        (x,) = vectors(RANKS)[mesh.get_rank()]
        for module in (plain, again, copy.deepcopy(plain)):
            model = fs.functionalize(module, RULES["every module"])
            torch.manual_seed(mesh.get_rank())
            (value, mask), grads = fs.value_and_grad(lambda p: model.apply(p, x), has_aux=True)(  # noqa: B023
                model.init(zero3()(mesh))
            )
            results.append((value, mask, fs.unshard(grads)))
        for result in results[1:]:
            assert_same_bits(result, results[0])
        return results[0][1]

    first, second = spmd(program, workers(RANKS))
    assert not first.equal(second)
