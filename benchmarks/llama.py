"""The model that `predict.py` plans: Llama 2, with layer norms in the place of RMS norms: one operator everywhere."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from trained_gpt import SEED


class Block(nn.Module):
    """One layer: causal attention with rotary positions and shared keys, and a gated MLP, a norm before each."""

    def __init__(self, width: int, size: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.size = size
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.q, self.proj = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, kv_heads * size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:  # (batch, time, width)
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = (t * cos + torch.cat((-t[..., self.size // 2 :], t[..., : self.size // 2]), -1) * sin for t in (q, k))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))  # (batch, heads, time, size)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """Tokens and the tokens that follow them in, the mean cross entropy out."""

    def __init__(self, sizes: "Sizes") -> None:
        super().__init__()
        size = sizes.width // sizes.heads
        self.size = size
        self.checkpointed = sizes.checkpointed
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        blocks = (Block(sizes.width, size, sizes.kv_heads, sizes.hidden) for _ in range(sizes.layers))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(sizes.width, bias=False)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # (batch, time) twice, to a scalar
        h = self.tokens(x)  # (batch, time, width)
        turns = 10000.0 ** -(torch.arange(0, self.size, 2, device=x.device).repeat(2) / self.size)
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * turns  # (time, size)
        cos, sin = angles.cos().to(h.dtype), angles.sin().to(h.dtype)
        for block in self.blocks:
            h = checkpoint(block, h, cos, sin, use_reentrant=False) if self.checkpointed else block(h, cos, sin)
        return F.cross_entropy(self.head(self.norm(h)).float().flatten(0, 1), y.flatten())


class Sizes(NamedTuple):
    """Sizes of a model and of a rank's batch; the defaults are those of Llama 2 7B."""

    block = Block

    batch: int
    checkpointed: bool
    time: int = 4096
    width: int = 4096
    layers: int = 32
    heads: int = 32
    kv_heads: int = 32
    hidden: int = 11008
    vocabulary: int = 32000

    def module(self) -> Llama:
        """The model with the same values on every rank, on the default device."""
        torch.manual_seed(SEED)
        return Llama(self)

    def tokens(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The batch of a rank, each (batch, time): tokens, and those that follow them."""
        generator = torch.Generator().manual_seed(rank)
        tokens = torch.randint(self.vocabulary, (self.batch, self.time + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
