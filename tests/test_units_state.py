"""Random numbers of models cut into units."""

from itertools import product

import torch
from torch import nn

import fshard as fs
from fshard.testing import assert_trees_close
from tests.ranks import my_rank, on_ranks
from tests.trees import assert_same_bits, one_axis
from tests.unit_models import WIDTH, Dropped, filled, full, near, vectors, zero3


class Network(nn.Module):
    """Returns the loss, and ones that were dropped out as the rest is."""

    def __init__(self, checkpointed):
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


def with_keys(module, keys):
    """Each rank's loss and gradients with full parameters and its key, averaged; and its mask."""
    model = fs.functionalize(module)
    leaves = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    losses, masks = zip(*(model.apply(leaves, *batch, key=key) for batch, key in zip(vectors(len(keys)), keys)))
    loss = sum(losses) / len(keys)
    return (loss.detach(), dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))), masks


# On processes, because a generator belongs to one.
@on_ranks("2 processes")
def test_keys_decide_the_masks(world_size):
    """One key gives every rank the same masks, and a key for each rank others, by each rule and in each call."""
    mesh, rank = one_axis(), my_rank()
    modules = [filled(Network(checkpointed)) for checkpointed in (False, True)]
    torch.manual_seed(rank)
    (x,), generator_state = vectors(world_size)[rank], torch.get_rng_state()
    for is_folded, module, rule in product((False, True), modules, (None, nn.Module)):
        # A number stands for a rank as its axis does.
        keys = [fs.fold_in(7, n) if is_folded else 7 for n in range(world_size)]
        expected, masks = with_keys(modules[0], keys)
        assert masks[0].equal(masks[1]) is not is_folded
        key = fs.fold_in(7, fs.axis_of(mesh)) if is_folded else 7
        model = fs.functionalize(module, rule)
        run = fs.value_and_grad(lambda p, m=model, key=key: m.apply(p, x, key=key), has_aux=True)
        params = model.init(zero3()(mesh))
        (first, first_mask), first_grads = run(params)
        assert_trees_close(full((first, first_grads)), expected, **near(expected))
        (second, second_mask), second_grads = run(params)
        assert_same_bits(fs.tree_leaves((second, second_grads)), fs.tree_leaves((first, first_grads)))
        assert_same_bits([first_mask, second_mask], [masks[rank]] * 2)
    # A key changes nothing of the generator that code without keys draws from.
    assert torch.get_rng_state().equal(generator_state)
