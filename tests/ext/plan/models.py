"""Steps to plan: a transformer under every strategy, with and without activation checkpoints."""

from functools import reduce
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import fshard as fs
from tests.jit.steps import adamw, train_step
from tests.unit_models import filled

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "hsdp")
WIDTH, LAYERS = 64, 2


class Block(nn.TransformerEncoderLayer):
    """A transformer layer."""

    def __init__(self, checkpointed: bool = False):
        super().__init__(WIDTH, 1, WIDTH, dropout=0.0, batch_first=True)
        self.checkpointed = checkpointed

    def forward(self, x):
        run = super().forward
        return checkpoint(run, x, use_reentrant=False) if self.checkpointed else run(x)


class Masked(nn.Module):
    """Layers, and buffers that its constructor makes, to one of which it writes."""

    def __init__(self, layers: int):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers)))
        self.register_buffer("mask", torch.ones(64, 64).tril(), persistent=False)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        return (self.layers(x) @ self.mask).square().mean()


def prepare_step(strategy: str, activations: str, mesh: Any) -> tuple[Any, Any, torch.Tensor]:
    """Make a jitted step, its state on a mesh, and a rank's batch.

    Activations are "kept", or computed again by a "checkpoint" of torch or by fs."remat".
    """
    transform = getattr(fs, strategy)(mesh)
    if activations == "remat":
        block = filled(Block(), None)
        run = fs.remat(lambda params, x: functional_call(block, fs.gather(params), (x,)))
        params = fs.shard([dict(block.named_parameters())] * LAYERS, transform)

        def forward(params, x):
            return reduce(lambda x, layer: run(layer, x), params, x)
    else:
        blocks = nn.Sequential(*(Block(activations == "checkpoint") for _ in range(LAYERS)))
        model = fs.functionalize(filled(blocks, None), Block)
        params, forward = model.init(transform), model.apply

    step = fs.jit(train_step(lambda params, x: forward(params, x).square().mean(), adamw()), donate_argnums=0)
    return step, fs.TrainState.create(params, adamw()), torch.zeros(2, 8, WIDTH)
