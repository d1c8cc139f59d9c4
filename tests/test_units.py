"""Models cut into units in every way have the loss and gradients of one process."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.unit_models import (
    LENGTH,
    MORE_RULES,
    RULES,
    STRATEGIES,
    VOCABULARY,
    WIDTH,
    Block,
    Language,
    Perceptron,
    assert_one_process,
    assert_one_process_on_ranks,
    by_strategies,
    filled,
    tokens,
    vectors,
    zero3,
)


def tie_head(model):
    model.head.weight = model.embedding.weight


def tie_blocks(model):
    """Units that share a leaf: one next to the other, and one far away."""
    first, second, third = (block.perceptron for block in model.blocks)
    third.inner.weight, third.outer.weight = first.inner.weight, first.outer.weight
    model.blocks[1].norm = model.blocks[0].norm
    second.outer.bias = first.outer.bias
    model.blocks[2].scale = model.norm.weight


def share_block(model):
    model.blocks = nn.ModuleList([model.blocks[0], model.blocks[1], model.blocks[0]])


class TiedByAttribute(Language):
    def logits(self, h):
        return F.linear(self.norm(h), self.embedding.weight)


class ReadsAhead(Language):
    """Reads weights of units before, after and inside their turns, as some models do for their dtypes."""

    def hidden(self, h):
        h = h.to(self.blocks[2].perceptron.inner.weight.dtype)
        for i, block in enumerate(self.blocks):
            h = block(h) + self.blocks[i - 1].scale
        return h * self.blocks[1].perceptron.outer.bias


class TwiceInARow(Language):
    def hidden(self, h):
        for block in self.blocks:
            h = block(block(h))
        return h


class TwiceAround(Language):
    def hidden(self, h):
        return super().hidden(super().hidden(h))


class Backwards(Language):
    """Enters units in an order that is not the one of their registration."""

    def hidden(self, h):
        for block in reversed(self.blocks):
            h = block(h)
        return h


class ComputesAside(Language):
    """Uses a unit's outputs after others have run, and one unit inside another's forward."""

    def hidden(self, h):
        first, second, third = self.blocks
        early = first(h)
        return second(third(early)) + early * first.scale


class LooksFirst(Block):
    """Reads each weight without a gradient before it reads it with one."""

    def forward(self, x):
        with torch.no_grad():
            size = sum(parameter.square().mean() for parameter in self.parameters())
        return super().forward(x) * torch.cos(size)


def look_first(model):
    model.blocks = nn.ModuleList(LooksFirst(hidden) for hidden in (13, 11))
    model.blocks.append(Block(5))


class Everything(TwiceAround, ReadsAhead, TiedByAttribute):
    """All of it at once."""


def freeze_leaves(model):
    for name in ("embedding.weight", "blocks.0.scale", "blocks.1.perceptron.inner.weight", "norm.bias"):
        model.get_parameter(name).requires_grad_(False)


def freeze_units(model):
    model.blocks[0].requires_grad_(False)
    model.blocks[2].perceptron.requires_grad_(False)
    model.norm.requires_grad_(False)


def freeze_front(model):
    for part in (model.embedding, model.blocks[0], model.blocks[1]):
        part.requires_grad_(False)


def freeze_tied(model):
    tie_head(model)
    model.embedding.weight.requires_grad_(False)


def add_unused(model):
    model.blocks.insert(1, Block(5))
    model.blocks[3].register_parameter("unused", nn.Parameter(torch.empty(3, 5)))
    model.register_parameter("unused", nn.Parameter(torch.empty(2)))


class Unused(Language):
    def hidden(self, h):
        for i in (0, 2, 3):
            h = self.blocks[i](h)
        return h


LANGUAGES = {
    "language": Language,
    "tied": lambda: Language(tie_head),
    "tied by attribute": TiedByAttribute,
    "tied blocks": lambda: Language(tie_blocks, hidden=(13, 11, 13)),
    "shared block": lambda: Language(share_block),
    "reads ahead": ReadsAhead,
    "twice in a row": TwiceInARow,
    "twice around": TwiceAround,
    "twice around, tied": lambda: TwiceAround(tie_head),
    "backwards": Backwards,
    "computes aside": ComputesAside,
    "read without a gradient first": lambda: Language(look_first),
    "frozen leaves": lambda: Language(freeze_leaves),
    "frozen units": lambda: Language(freeze_units),
    "frozen front": lambda: Language(freeze_front),
    "frozen and tied": lambda: Language(freeze_tied),
    "unused": lambda: Unused(add_unused),
}


@pytest.mark.rows(1)
@by_strategies("rule", ("two classes", "every module"), MORE_RULES)
@pytest.mark.parametrize("name", LANGUAGES)
def test_language_models(name, rule, strategies):
    assert_one_process_on_ranks(filled(LANGUAGES[name]()), tokens, MORE_RULES[rule], strategies)


@pytest.mark.rows(1)
@pytest.mark.parametrize("rule", RULES)
def test_every_strategy(rule):
    assert_one_process(filled(Everything(tie_head)), tokens(), MORE_RULES[rule], STRATEGIES)


@pytest.mark.rows(2)
@pytest.mark.parametrize("prefetch", (0, 1, 2))
def test_a_list_says_the_order_of_gathering(prefetch):
    """Units that a model enters backwards are gathered ahead in that order, each once."""
    rule = ["embedding", "blocks.2", "blocks.1", "blocks.0", "norm", "head"]
    module = filled(Backwards())
    assert_one_process(module, tokens(), rule, {"zero3": zero3(prefetch=prefetch)}, again=True)


class Loss(nn.Module):
    """A module's output, or the first of several, as a loss."""

    def __init__(self, *modules):
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, x):
        for part in self.parts:
            out = part(x)
            x = out[0] if isinstance(out, tuple) else out
        return x.square().mean()


class Attention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x.flip(0), x)


class Containers(nn.Module):
    """Parameters in lists and dicts, of no dimension, of one element and of none."""

    def __init__(self):
        super().__init__()
        self.list = nn.ParameterList([torch.empty(WIDTH, WIDTH), torch.empty(WIDTH)])
        self.dict = nn.ParameterDict({"scalar": torch.empty(()), "one": torch.empty(1), "cube": torch.empty(1, 1, 1)})
        self.nested = nn.ParameterDict({"list": nn.ParameterList([torch.empty(WIDTH, 1), torch.empty(0, WIDTH)])})
        self.scalar = nn.Parameter(torch.empty(()))

    def forward(self, x):
        y = F.linear(x, self.list[0], self.list[1]) * self.dict["scalar"] + self.dict["one"] * self.dict["cube"]
        for weight in self.list:
            y = y + weight.sum()
        return y * self.scalar + x @ self.nested["list"][0] + self.nested["list"][1].sum()


class Steps(nn.Module):
    """A cell that is called once for each element of a sequence."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        hidden = torch.zeros_like(x[:, 0])
        for i in range(x.shape[1]):
            hidden = self.cell(x[:, i], hidden)
        return hidden


MODULES = {
    "lstm": lambda: Loss(
        nn.LSTM(WIDTH, 5, num_layers=3, batch_first=True, bidirectional=True, proj_size=4), nn.Linear(8, 3)
    ),
    "gru": lambda: Loss(Perceptron(), nn.GRU(WIDTH, WIDTH, num_layers=2), nn.GRU(WIDTH, 3)),
    "cell": lambda: Loss(Perceptron(), Steps(nn.GRUCell(WIDTH, WIDTH))),
    "attention": lambda: Loss(Attention(WIDTH, 2), Attention(WIDTH, 4, bias=False, add_bias_kv=True)),
    "encoder": lambda: Loss(
        *(nn.TransformerEncoderLayer(WIDTH, 2, 19, dropout=0.0, norm_first=first) for first in (True, False))
    ),
    "encoder of layers": lambda: Loss(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 19, dropout=0.0), 2, enable_nested_tensor=False)
    ),
    "containers": lambda: Loss(Containers(), Containers()),
    "convolution": lambda: Loss(nn.Conv1d(LENGTH, 5, 3), nn.GroupNorm(5, 5), nn.Flatten(), nn.Linear(30, 3)),
    "weight norm": lambda: Loss(
        nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)),
    ),
}

MODULE_RULES = {"every module": nn.Module, "parts": "parts.*", "one unit": None, "a size": 30}


@pytest.mark.rows(1)
@by_strategies("rule", ("every module", "parts"), MODULE_RULES)
@pytest.mark.parametrize("name", MODULES)
def test_modules(name, rule, strategies):
    assert_one_process_on_ranks(filled(MODULES[name]()), vectors, MODULE_RULES[rule], strategies)


def test_no_size_divides():
    """The tables test what they say."""
    shapes = {parameter.shape[0] for parameter in Language().parameters()}
    assert VOCABULARY in shapes
    assert all(any(size % ranks for size in shapes) for ranks in (2, 3))
