"""Steps to plan: a transformer under every strategy, with and without activation checkpoints."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import fshard as fs
from tests.jit.steps import adamw, train_step
from tests.unit_models import filled

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "hsdp")


class Case(NamedTuple):
    """What is planned; activations are "kept", or computed again by a "checkpoint" of torch or by fs."remat"."""

    strategy: str
    activations: str = "kept"
    width: int = 64
    layers: int = 2
    batch: int = 2
    time: int = 8
    donated: bool = True


class Block(nn.Module):
    """A transformer layer."""

    def __init__(self, width: int, checkpointed: bool = False):
        super().__init__()
        self.heads, self.checkpointed = max(width // 64, 1), checkpointed
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=False) if self.checkpointed else self.run(x)

    def run(self, x):  # (batch, time, width)
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


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


def sizes_of(strategy: str, ranks: int) -> dict[str, int]:
    """A mesh of a strategy; that of hsdp has two replicas where that goes."""
    if strategy != "hsdp":
        return {"shard": ranks}
    replicas = 2 if ranks % 2 == 0 else 1
    return {"replicate": replicas, "shard": ranks // replicas}


def prepared(case: Case, mesh: Any, **options: Any) -> tuple[Any, Any, torch.Tensor]:
    """The jitted step of a case, its state on a mesh, and a rank's batch."""
    strategy = getattr(fs, case.strategy)(mesh, **options)
    if case.activations == "remat":
        block = filled(Block(case.width), None)

        def run(params, x):
            return functional_call(block, fs.gather(params), (x,))

        def loss(params, x):
            for layer in params:
                x = fs.remat(run)(layer, x)
            return x.square().mean()

        params = fs.shard([dict(block.named_parameters()) for _ in range(case.layers)], strategy)
    else:
        blocks = nn.Sequential(*(Block(case.width, case.activations == "checkpoint") for _ in range(case.layers)))
        model = fs.functionalize(filled(blocks, None), Block)
        params = model.init(strategy)

        def loss(params, x):
            return model.apply(params, x).square().mean()

    step = fs.jit(train_step(loss, adamw()), donate_argnums=0 if case.donated else ())
    return step, fs.TrainState.create(params, adamw()), torch.zeros(case.batch, case.time, case.width)
