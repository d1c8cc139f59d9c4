"""The GPT that every system trains, its configurations and its batches."""

import re
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

SEED = 0


class Block(nn.Module):
    """One transformer layer: causal attention and an MLP, each with a norm before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, time, width)
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))  # (batch, time, 3, heads, width / heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, time, width / heads)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (batch, heads, time, width / heads)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))  # (batch, time, width)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Tokens and the tokens that follow them in, the mean cross entropy out."""

    def __init__(self, width: int, layers: int, heads: int, context: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # (batch, time) twice, to a scalar
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))  # (batch, time, width)
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h)).flatten(0, 1)  # (batch * time, vocabulary)
        return F.cross_entropy(logits, y.flatten())  # y: (batch * time,)


class Configuration(NamedTuple):
    """Sizes of a run; its name spells them, such as d512-L8-B4-T256, or d128-L4-B8-T128-V256 with a vocabulary."""

    width: int
    layers: int
    batch: int
    time: int
    vocabulary: int = 8192

    block = Block

    @classmethod
    def parse(cls, name: str) -> "Configuration":
        match = re.fullmatch(r"d(\d+)-L(\d+)-B(\d+)-T(\d+)(?:-V(\d+))?", name)
        if match is None:
            raise ValueError(
                f"expected configuration to be width, layers, batch and time, as in d512-L8-B4-T256, got {name!r}"
            )
        return cls(*(int(number) for number in match.groups() if number))

    @property
    def name(self) -> str:
        name = f"d{self.width}-L{self.layers}-B{self.batch}-T{self.time}"
        return name if self.vocabulary == Configuration._field_defaults["vocabulary"] else f"{name}-V{self.vocabulary}"

    def module(self) -> GPT:
        """The model with the same values on every rank, or without values on the meta device."""
        torch.manual_seed(SEED)
        # As in GPT-3, whose large models have heads of 128.
        size = 64 if self.width < 2048 else 128
        return GPT(self.width, self.layers, max(1, self.width // size), self.time, self.vocabulary)

    def tokens(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The batch of a rank, each (batch, time): tokens, and those that follow them."""
        generator = torch.Generator().manual_seed(rank)
        tokens = torch.randint(self.vocabulary, (self.batch, self.time + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
