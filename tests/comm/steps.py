"""A small model and its step, each unit gathered by itself, to watch what it sends."""

import torch
from torch import nn

import fshard as fs
from tests.trees import one_axis

UNITS = ("layers.0", "layers.1", "layers.2")


class Layers(nn.Module):
    """Three layers, between which something may happen."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, between=lambda place: None):
        for place, layer in enumerate(self.layers):
            between(place)
            x = torch.tanh(layer(x))
        return x.square().mean()


def make_step(axis=None, between=None):
    """A function that makes one step, each unit gathered by itself."""
    model = fs.functionalize(Layers(), units=nn.Linear)
    strategy = fs.zero3(axis or one_axis(), min_shard_elements=0, bucket_bytes=0)
    tx = fs.sgd(0.1)
    state = fs.TrainState.create(model.init(strategy, seed=0), tx)
    arguments = () if between is None else (between,)

    def step(state, x):
        loss, grads = fs.value_and_grad(lambda params: model.apply(params, x, *arguments))(state.params)
        return fs.update(tx, state, grads), loss

    return step, state, torch.ones(2, 8)
