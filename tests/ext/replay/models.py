"""Small models of eight kinds, whose steps are right: a replay may find nothing in them.

They hold what is legal and looks wrong: infinities in masks, rows that may attend to nothing, padded labels, and a
logarithm of 0 that a `where` drops.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fshard as fs
from tests.trees import normal

WIDTH, HEADS, WORDS, TIME, ROWS, LAYERS = 8, 2, 17, 6, 2, 2
IGNORED = -100


def attend(q, k, v, mask=None):  # (batch, time, width) each
    """Attention of several heads, with minus infinity where a mask is False."""
    q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (q, k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = scores.softmax(-1)
    if mask is not None:
        # Rows that may attend to nothing are NaN here, and 0 from here on.
        weights = torch.where(mask.any(-1, keepdim=True), weights, 0.0)
    return (weights @ v).transpose(1, 2).flatten(2)


def causal(time):
    return torch.ones(time, time, dtype=torch.bool).tril()


class Layer(nn.Module):
    """A transformer layer, with attention to another sequence if there is one."""

    def __init__(self, feed_forward, norm=nn.LayerNorm, crosses=False):
        super().__init__()
        self.norms = nn.ModuleList(norm(WIDTH) for _ in range(3 if crosses else 2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed_forward = feed_forward
        self.query, self.memory = (nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)) if crosses else (None, None)

    def forward(self, x, mask=None, memory=None):
        x = x + self.out(attend(*self.qkv(self.norms[0](x)).chunk(3, -1), mask))
        if memory is not None:
            x = x + attend(self.query(self.norms[2](x)), *self.memory(memory).chunk(2, -1))
        return x + self.feed_forward(self.norms[1](x))


def perceptron():
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Mixture(nn.Module):
    """Two of four experts for each token."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 4), nn.ModuleList(Gated() for _ in range(4))

    def forward(self, x):
        scores = self.router(x)
        smallest = scores.topk(2).values[..., -1:]
        weights = scores.masked_fill(scores < smallest, float("-inf")).softmax(-1)
        return sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class StateSpace(nn.Module):
    """A selective scan in the manner of Mamba, a token after another, with its decay in logarithms."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.rates, self.inputs, self.out = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.decay = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        h = self.norm(x)
        rate = F.softplus(self.rates(h))
        value, gate = self.inputs(h).chunk(2, -1)
        state, outputs = torch.zeros_like(x[:, 0]), []
        for time in range(x.shape[1]):
            state = state * torch.exp(-rate[:, time] * self.decay.exp()) + rate[:, time] * value[:, time]
            outputs.append(state)
        return x + self.out(torch.stack(outputs, 1) * F.silu(gate))


class Causal(nn.Module):
    """A language model of layers, whose head may be the embedding."""

    def __init__(self, make_layer, is_tied=False):
        super().__init__()
        self.embed, self.position = nn.Embedding(WORDS, WIDTH), nn.Embedding(TIME, WIDTH)
        self.layers = nn.ModuleList(make_layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, words, labels):
        x = self.embed(words) + self.position.weight[: words.shape[1]]
        for layer in self.layers:
            x = layer(x, causal(words.shape[1])) if isinstance(layer, Layer) else layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


class Bert(Causal):
    """Attends to all but padding. In the second row everything is padding."""

    def forward(self, words, labels):
        x = self.embed(words) + self.position.weight[: words.shape[1]]
        mask = (labels != IGNORED)[:, None, None, :]
        for layer in self.layers:
            x = layer(x, mask)
        # The logarithm of 0 that a where drops.
        share = (labels != IGNORED).float().mean(-1)
        entropy = torch.where(share > 0, share * share.log(), 0.0)
        losses = F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        return losses + entropy.sum()


class T5(nn.Module):
    """An encoder and a decoder, with biases of distances."""

    def __init__(self):
        super().__init__()
        self.embed, self.bias = nn.Embedding(WORDS, WIDTH), nn.Embedding(2 * TIME, WIDTH)
        self.encoder = nn.ModuleList(Layer(perceptron(), nn.RMSNorm) for _ in range(LAYERS))
        self.decoder = nn.ModuleList(Layer(perceptron(), nn.RMSNorm, crosses=True) for _ in range(LAYERS))

    def forward(self, words, labels):
        memory = self.embed(words)
        for layer in self.encoder:
            memory = layer(memory)
        x = self.embed(labels.clamp(min=0)) + self.bias.weight[:TIME]
        for layer in self.decoder:
            x = layer(x, causal(TIME), memory)
        logits = x @ self.embed.weight.mT
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x):
        return F.relu(x + self.norms[1](self.second(F.relu(self.norms[0](self.first(x))))))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.pool = nn.Conv2d(3, WIDTH, 3, padding=1), nn.MaxPool2d(3, 2, padding=1)
        self.layers, self.head = nn.ModuleList(Residual(WIDTH) for _ in range(LAYERS)), nn.Linear(WIDTH, 5)

    def forward(self, images, labels):
        x = self.pool(self.stem(images))
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches, self.position = nn.Conv2d(3, WIDTH, 4, stride=4), nn.Embedding(5, WIDTH)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.layers, self.head = nn.ModuleList(Layer(perceptron()) for _ in range(LAYERS)), nn.Linear(WIDTH, 5)

    def forward(self, images, labels):
        patches = self.patches(images).flatten(2).mT
        x = torch.cat([self.token.expand(len(patches), -1, -1), patches], 1) + self.position.weight
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x[:, 0]), labels)


class Kind(NamedTuple):
    """A kind of model.

    Attributes:
        make: Makes the module.
        units: The classes of its units.
        sees: Whether it takes images.
    """

    make: Callable[[], nn.Module]
    units: tuple[type[nn.Module], ...]
    sees: bool = False

    def batch(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(seed)
        if self.sees:
            images = torch.randn(ROWS, 3, 8, 8, generator=draw)
            return images, torch.randint(5, (ROWS,), generator=draw)
        words, labels = torch.randint(WORDS, (2, ROWS, TIME), generator=draw)
        labels[0, -1] = IGNORED
        labels[1] = IGNORED
        return words, labels


MODELS = {
    "gpt": Kind(lambda: Causal(lambda: Layer(perceptron())), (Layer,)),
    "llama": Kind(lambda: Causal(lambda: Layer(Gated(), nn.RMSNorm), is_tied=True), (Layer,)),
    "mixture": Kind(lambda: Causal(lambda: Layer(Mixture())), (Layer,)),
    "mamba": Kind(lambda: Causal(StateSpace), (StateSpace,)),
    "bert": Kind(lambda: Bert(lambda: Layer(perceptron())), (Layer,)),
    "t5": Kind(T5, (Layer,)),
    "resnet": Kind(ResNet, (Residual,), sees=True),
    "vit": Kind(ViT, (Layer,), sees=True),
}
STRATEGIES = ("zero3", "zero2", "ddp")


def make_step(name: str, strategy: str = "zero3") -> tuple[Callable[..., Any], fs.TrainState, Kind]:
    """Make a train step of a model with buffers, and its state; call it on every rank."""
    kind = MODELS[name]
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    module = kind.make()
    draw = normal(0)
    with torch.no_grad():
        for parameter in module.parameters():
            # Simulated ranks share torch's generator, from which the modules have drawn.
            parameter.copy_(0.3 * draw(*parameter.shape) + (parameter.dim() == 1))
    model = fs.functionalize(module, units=kind.units)
    sharded = getattr(fs, strategy)(mesh)
    tx = fs.chain(fs.clip_by_global_norm(1.0), fs.adamw(1e-3))
    state = fs.TrainState.create(model.init(sharded), tx, buffers=model.buffers)

    def step(state, batch):
        def loss_fn(params):
            return model.apply(params, *batch, buffers=state.buffers)

        (loss, buffers), grads = fs.value_and_grad(loss_fn, has_aux=True)(state.params)
        return fs.update(tx, state._replace(buffers=buffers), grads), loss

    return step, state, kind


def batch_of_rank(kind: Kind, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    return kind.batch(1000 * number + dist.get_rank())
