"""What pads a shard is unspecified: nothing that optimizers make of it may reach the leaf."""

import pytest
import torch

import fshard as fs
from fshard.shard import without_padding
from fshard.testing import assert_trees_close
from tests.ranks import on_ranks
from tests.trees import STRATEGIES, meshes

FULL = {"matrix": (5, 3), "vector": (7,), "stack": (2, 5, 3)}
LAYOUTS = ("zero2 of every leaf", "last dim", "hsdp", "two dims")
TRANSFORMATIONS = {
    "adafactor": lambda: fs.adafactor(0.1),
    "adam": lambda: fs.adam(0.1),
    "adamw": lambda: fs.adamw(0.1, weight_decay=0.1),
    "clip_by_global_norm": lambda: fs.chain(fs.clip_by_global_norm(0.1), fs.sgd(0.1)),
    "clip_by_norm": lambda: fs.chain(fs.clip_by_norm(0.1), fs.sgd(0.1)),
    "dynamic_loss_scale": lambda: fs.dynamic_loss_scale(fs.sgd(0.1)),
    "ema": lambda: fs.ema(fs.sgd(0.1), decay=0.9),
    "from_torch": lambda: fs.from_torch(torch.optim.AdamW, lr=0.1),
    "lamb": lambda: fs.lamb(0.1),
    "lars": lambda: fs.lars(0.1, momentum=0.9),
    "sgd": lambda: fs.sgd(0.1, momentum=0.9),
    "skip_nonfinite": lambda: fs.skip_nonfinite(fs.sgd(0.1)),
    "whole": lambda: fs.whole(fs.sgd(0.1, momentum=0.9)),
}


def with_padding(tree, value):
    """The tree with something else where shards are padded."""

    def padded(leaf):
        local = torch.full_like(leaf.local, value)
        out = fs.Sharded(local, leaf.spec)
        without_padding(out).copy_(without_padding(leaf))
        return out

    return {name: padded(leaf) for name, leaf in tree.items()}


def trained(tx, strategy, value):
    generator = torch.Generator().manual_seed(0)
    draws = [
        {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in FULL.items()}
        for _ in range(4)
    ]
    params, *grads = (with_padding(fs.shard(draw, strategy), value) for draw in draws)
    state = fs.TrainState.create(params, tx)
    for grad in grads:
        state = fs.update(tx, state, grad)
    return fs.unshard(state.params)


# What needs whole leaves sends them over one axis.
PAIRS = [(name, layout) for name in TRANSFORMATIONS for layout in LAYOUTS if (name, layout) != ("whole", "two dims")]


@pytest.mark.rows(1)
@pytest.mark.parametrize(("name", "layout"), PAIRS)
@on_ranks(4)
def test_padding_is_never_looked_at(name, layout):
    tx, strategy = TRANSFORMATIONS[name](), STRATEGIES[layout](meshes())
    expected = trained(tx, strategy, 0.0)
    for value in (3.0, float("nan")):
        assert_trees_close(trained(tx, strategy, value), expected, exact=True)
