"""A small byte-level GPT, and real text for it: the sources of Python's standard library, which every machine has."""

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn


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
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.proj(attended)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # GPT-2's initialisation: residual branches start smaller the more of them there are.
                residual = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if residual else 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, time) to (batch, time, 256)
        h = self.tokens(x) + self.positions.weight[: x.shape[1]]
        return self.head(self.norm(self.blocks(h)))


def standard_library() -> tuple[torch.Tensor, torch.Tensor]:
    """The standard library's own sources as bytes, for training and, every twentieth file, held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for folder in (".", "asyncio", "email", "json", "http") for path in root.glob(f"{folder}/*.py"))
    texts = [path.read_bytes() for path in files]
    held_out = b"".join(texts[::20])
    train = b"".join(text for i, text in enumerate(texts) if i % 20)
    return tuple(torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (train, held_out))


def batch(text: torch.Tensor, size: int, context: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random windows of a text and the bytes that follow each: two int64 tensors of shape (size, context)."""
    starts = torch.randint(len(text) - context, (size,), generator=torch.Generator().manual_seed(seed))
    windows = torch.stack([text[start : start + context + 1] for start in starts.tolist()]).long()
    return windows[:, :-1], windows[:, 1:]
