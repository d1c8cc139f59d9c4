"""Modules of every kind, with what to call them on, for the tests of functionalize and apply."""

import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests.trees import assert_same_bits, normal

EVERY_LEAF = "zero2 of every leaf"


class Tied(nn.Module):
    """An embedding and a head that share one matrix, a norm under two names, and a frozen bias."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.first = self.second = nn.LayerNorm(5)
        self.head = nn.Linear(5, 7)
        self.head.weight = self.embedding.weight
        self.head.bias.requires_grad_(False)

    def forward(self, tokens):
        return self.head(self.second(2 * self.first(self.embedding(tokens))))


class Bag(nn.Module):
    """Parameters in containers, keyword arguments, and an output that is a tree."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([torch.ones(3, 3), torch.full((3,), 2.0)])
        self.scales = nn.ParameterDict({"a": torch.tensor(3.0), "b": torch.ones(1)})
        self.none = None

    def forward(self, x, *, scale="a", shift=0.0):
        y = x @ self.weights[0] + self.weights[1]
        return y * self.scales[scale], {"shifted": [y + shift * self.scales["b"]], "name": scale}


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, num_layers=2, bidirectional=True, proj_size=2, batch_first=True)

    def forward(self, x):
        out, (hidden, cell) = self.lstm(x)
        return out, hidden, cell


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True, add_bias_kv=True, bias=False)

    def forward(self, x):
        return self.attention(x, x, x)


DRAW = normal(1)
ROWS, TOKENS = DRAW(6, 3), torch.tensor([[1, 2, 3], [3, 0, 6]])
SEQUENCES, IMAGES = DRAW(2, 5, 6), DRAW(2, 3, 5, 5)

# Each with its arguments and keyword arguments.
MODULES = {
    "perceptron": (lambda: nn.Sequential(nn.Linear(3, 33), nn.GELU(), nn.Linear(33, 5), nn.LayerNorm(5)), (ROWS,), {}),
    "tied": (Tied, (TOKENS,), {}),
    "bag": (Bag, (ROWS,), {"scale": "b", "shift": 0.5}),
    "embedding": (lambda: nn.Embedding(7, 4, padding_idx=0), (TOKENS,), {}),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)), (IMAGES,), {}),
    "recurrent": (Recurrent, (DRAW(2, 5, 3),), {}),
    "cell": (lambda: nn.LSTMCell(3, 4), (ROWS,), {}),
    "attention": (Attention, (SEQUENCES,), {}),
    "encoder": (lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), (SEQUENCES,), {}),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(3, 4)), (ROWS,), {}),
    "batch norm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval(), (ROWS,), {}),
    "buffers": (lambda: nn.BatchNorm1d(3, affine=False).eval(), (ROWS,), {}),
    "nothing": (nn.ReLU, (ROWS,), {}),
}


def build(name):
    """A module of float64 parameters, with values of a generator of its own: ranks share torch's default one."""
    make, args, kwargs = MODULES[name]
    module, draw = make().double(), normal(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(draw(*parameter.shape))
    return module, args, kwargs


def everything(module):
    """All that a module holds, by identity, and the values of its tensors."""
    held = {
        f"{path}.{name}": [id(value), *map(id, getattr(value, "values", lambda v=value: v)())]
        if isinstance(value, dict | list)
        else value
        for path, submodule in module.named_modules()
        for name, value in vars(submodule).items()
    }
    leaves = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    about = {name: (id(t), t._version, id(t.grad), t.requires_grad) for name, t in leaves.items()}
    return (held, about), {name: t.detach().clone() for name, t in leaves.items()}


def assert_untouched(module, before):
    held, values = everything(module)
    assert held == before[0]
    assert_same_bits(values, before[1])
