"""Eight shapes of models, written with torch alone: those whose classes `tests/ext/test_architectures.py` trains.

They have the operators that take memory: fused and plain attention, rotary and relative positions, shared heads of
keys, low-rank attention, experts with routed and shared parts, an encoder with a decoder, convolutions, and images
among tokens. Each takes a batch of tensors and returns its loss.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, HIDDEN, LAYERS, VOCABULARY = 192, 6, 512, 2, 768
SIZE = WIDTH // HEADS
SEQUENCES, TIME = 4, 96
IMAGE, PATCH, CLASSES = 64, 8, 10


def split_heads(x: Tensor) -> Tensor:
    """(batch, time, width) to (batch, heads, time, size)."""
    return x.unflatten(-1, (-1, SIZE)).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def rotate(x: Tensor) -> Tensor:  # (batch, heads, time, size)
    """Turn pairs of features by angles that grow with the position."""
    size = x.shape[-1]
    turns = 10000.0 ** -(torch.arange(0, size, 2, device=x.device).repeat(2) / size)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * turns
    low, high = x.chunk(2, -1)
    return x * angles.cos() + torch.cat((-high, low), -1) * angles.sin()


class Attention(nn.Module):
    """Attention with rotary positions; several heads of queries may share one of keys and values."""

    def __init__(self, kv_heads: int = HEADS, is_causal: bool = True, is_rotary: bool = True) -> None:
        super().__init__()
        self.is_causal, self.is_rotary = is_causal, is_rotary
        self.q, self.proj = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, kv_heads * SIZE, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(linear(x)) for linear in (self.q, self.k, self.v))
        if self.is_rotary:
            q, k = rotate(q), rotate(k)
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        return self.proj(join_heads(F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)))


class LowRankAttention(nn.Module):
    """DeepSeek's attention: queries, keys and values from narrow vectors, and a part of the keys with positions."""

    def __init__(self, rank: int = WIDTH // 4, rotary: int = SIZE // 2) -> None:
        super().__init__()
        self.rotary = rotary
        self.q_down, self.q_up = nn.Linear(WIDTH, rank), nn.Linear(rank, HEADS * (SIZE + rotary))
        self.kv_down, self.kv_up = nn.Linear(WIDTH, rank + rotary), nn.Linear(rank, 2 * WIDTH)
        self.q_norm, self.kv_norm = nn.RMSNorm(rank), nn.RMSNorm(rank)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_up(self.q_norm(self.q_down(x))).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        narrow, turned = self.kv_down(x).split((self.kv_norm.weight.shape[0], self.rotary), -1)
        k, v = map(split_heads, self.kv_up(self.kv_norm(narrow)).chunk(2, -1))
        turned = rotate(turned[:, None]).expand(-1, HEADS, -1, -1)
        q = torch.cat((q[..., :SIZE], rotate(q[..., SIZE:])), -1)
        k = torch.cat((k, turned), -1)
        scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        return self.proj(join_heads(scores.masked_fill(mask, -torch.inf).softmax(-1) @ v))


class RelativeAttention(nn.Module):
    """T5's attention, with a learned bias for each distance, to the same sequence or to another."""

    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.q, self.k, self.v, self.proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.bias = nn.Embedding(2 * TIME, HEADS)

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        q, k, v = split_heads(self.q(x)), split_heads(self.k(source)), split_heads(self.v(source))
        positions = torch.arange(x.shape[1], device=x.device)
        distances = positions[:, None] - positions + TIME
        scores = q @ k.transpose(-2, -1) + self.bias(distances).permute(2, 0, 1)
        if self.is_causal:
            scores = scores.masked_fill(distances < TIME, -torch.inf)
        return self.proj(join_heads(scores.softmax(-1) @ v))


class Gated(nn.Module):
    """Llama's gated MLP."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, hidden, bias=False), nn.Linear(WIDTH, hidden, bias=False)
        self.down = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Gated experts of which a token takes two, by a product for each token's weights; perhaps one shared by all."""

    def __init__(self, experts: int = 4, hidden: int = 16, has_shared: bool = False) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 2 * hidden) * 0.02)
        self.down = nn.Parameter(torch.randn(experts, hidden, WIDTH) * 0.02)
        self.shared = Gated(hidden) if has_shared else None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        rows = tokens[:, None, None].expand(-1, 2, -1, -1).flatten(0, 1)
        gate, up = (rows @ self.up[chosen.flatten()]).chunk(2, -1)
        out = (F.silu(gate) * up) @ self.down[chosen.flatten()]
        out = (out.view(*chosen.shape, WIDTH) * weights[..., None]).sum(1).view_as(x)
        return out if self.shared is None else out + self.shared(x)


class Block(nn.Module):
    """A layer of a decoder: attention and an MLP, a norm before each."""

    def __init__(self, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.mlp = attention, mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ParallelBlock(nn.Module):
    """A layer of GPT-J: attention and MLP of the same norm, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.attention(h) + self.down(F.gelu(self.up(h), approximate="tanh"))


class EncoderBlock(nn.Module):
    """A layer of BERT: attention to both sides and an MLP, a norm after each."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(is_causal=False, is_rotary=False)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class CrossBlock(nn.Module):
    """A layer of T5: attention to itself, in a decoder to the encoder, and an MLP."""

    def __init__(self, is_decoder: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(3))
        self.itself = RelativeAttention(is_decoder)
        self.other = RelativeAttention(is_causal=False) if is_decoder else None
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor, source: Tensor | None = None) -> Tensor:
        h = self.norms[0](x)
        x = x + self.itself(h, h)
        if self.other is not None:
            x = x + self.other(self.norms[1](x), source)
        return x + self.down(F.relu(self.up(self.norms[2](x))))


class ConvolutionBlock(nn.Module):
    """A layer of ResNet: two convolutions with batch norms, beside a shortcut that may halve the image."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs, track_running_stats=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(h)) + self.norms[2](self.shortcut(x)))


class Decoder(nn.Module):
    """Tokens, perhaps behind patches of images, through blocks to the loss of the next tokens."""

    def __init__(self, block: Callable[[], nn.Module], is_tied: bool = False, has_images: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH) if has_images else None
        self.blocks = nn.ModuleList(block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if is_tied:
            self.head.weight = self.tokens.weight

    def forward(self, x: Tensor, y: Tensor, images: Tensor | None = None) -> Tensor:
        h = self.tokens(x)
        if self.patches is not None:
            h = torch.cat((self.patches(images).flatten(2).mT, h), 1)
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h[:, -x.shape[1] :]))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


class EncoderDecoder(nn.Module):
    """T5: what an encoder makes of one sequence conditions a decoder of another."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList(CrossBlock(is_decoder=False) for _ in range(LAYERS))
        self.decoder = nn.ModuleList(CrossBlock(is_decoder=True) for _ in range(LAYERS))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        source = self.tokens(x)
        for block in self.encoder:
            source = block(source)
        h = self.tokens(y)
        for block in self.decoder:
            h = block(h, source)
        return F.cross_entropy((h @ self.tokens.weight.T).flatten(0, 1), y.flatten())


class ResNet(nn.Module):
    """Images through convolutions to the loss of their classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, 1, 1)
        self.blocks = nn.Sequential(ConvolutionBlock(32, 64, 2), ConvolutionBlock(64, 128, 2))
        self.head = nn.Linear(128, CLASSES)

    def forward(self, images: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.blocks(self.stem(images)).mean((2, 3))), y)


class Architecture(NamedTuple):
    """A shape of model: how to make it, what its units are, and whether its batch has images and tokens."""

    build: Callable[[], nn.Module]
    unit: type[nn.Module]
    has_images: bool = False
    has_tokens: bool = True

    def make_batch(self, rank: int) -> tuple[Tensor, ...]:
        """The batch of a rank."""
        generator = torch.Generator().manual_seed(rank)
        images = torch.randn(SEQUENCES, 3, IMAGE, IMAGE, generator=generator)
        if not self.has_tokens:
            return images, torch.randint(CLASSES, (SEQUENCES,), generator=generator)
        tokens = torch.randint(VOCABULARY, (SEQUENCES, TIME + 1), generator=generator)
        pair = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        return (*pair, images) if self.has_images else pair


ARCHITECTURES = {
    "gptj": Architecture(lambda: Decoder(ParallelBlock), ParallelBlock),
    "llama, tied": Architecture(lambda: Decoder(lambda: Block(Attention(2), Gated()), is_tied=True), Block),
    "mixtral": Architecture(lambda: Decoder(lambda: Block(Attention(2), Experts())), Block),
    "deepseek": Architecture(lambda: Decoder(lambda: Block(LowRankAttention(), Experts(has_shared=True))), Block),
    "bert": Architecture(lambda: Decoder(EncoderBlock), EncoderBlock),
    "t5": Architecture(EncoderDecoder, CrossBlock),
    "resnet": Architecture(ResNet, ConvolutionBlock, has_tokens=False),
    "llava": Architecture(
        lambda: Decoder(lambda: Block(Attention(2), Gated()), has_images=True), Block, has_images=True
    ),
}
