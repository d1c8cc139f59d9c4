"""What programs differentiate: a plain function, a perceptron and a transformer block, and rows split over ranks."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call

import fshard as fs
from tests.trees import normal

EPS = torch.finfo(torch.float64).eps

# Rows of each rank, by world size: unequal, and one of eight ranks has none.
COUNTS = {1: (11,), 2: (7, 4), 3: (3, 6, 2), 4: (2, 5, 1, 3), 8: (1, 2, 0, 1, 3, 1, 2, 1)}
ROWS = 11

# No size is a multiple of every number of ranks, and some are smaller than it.
FEATURES, HIDDEN, CLASSES = 5, 7, 3
POSITIONS, WIDTH, HEADS, INNER = 3, 4, 2, 5

Predict = Callable[[Any, torch.Tensor], torch.Tensor]
Tree = Any


class Norm(nn.LayerNorm):
    """LayerNorm by elementary operations: torch's own has wrong Hessians (pytorch#196700, functorch#534)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        deviation = (centred.square().mean(-1, keepdim=True) + self.eps).sqrt()
        return centred / deviation * self.weight + self.bias


class Attention(nn.Module):
    """A transformer block with its norms before, averaged over positions and read out."""

    def __init__(self) -> None:
        super().__init__()
        # The first one's input depends on no parameter.
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), Norm(WIDTH)])
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.inner, self.outer = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norms[0](x)
        # With the weights asked for, attention is made of operations that have every derivative.
        x = x + self.attention(h, h, h, need_weights=True)[0]
        x = x + self.outer(nn.functional.gelu(self.inner(self.norms[1](x))))
        return self.head(x.mean(-2))


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def function(params: Tree, x: torch.Tensor) -> torch.Tensor:
    """A perceptron over a nested tree, one leaf of which has no dims."""
    first, second = params["layers"]
    hidden = torch.tanh(x @ first["weight"] + first["bias"])
    return (hidden @ second["weight"] + second["bias"]) * params["scale"]


class Subject(NamedTuple):
    """A model and its parameters, whole.

    Attributes:
        name: Its name in SUBJECTS.
        params: The parameters.
        dense: The model as a function of whole parameters and inputs.
        sharded: Makes, on a rank, the model as a function of sharded or whole parameters and inputs.
        shape: Of the inputs of one row.
        terms: How many terms an element of a gradient adds up: rows, positions and the fans-in of all layers.
    """

    name: str
    params: Tree
    dense: Predict
    sharded: Callable[[], Predict]
    shape: tuple[int, ...]
    terms: int

    def batch(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs, and the class of every row as a row of zeros and a one."""
        draw = normal(seed)
        return draw(ROWS, *self.shape), torch.eye(CLASSES, dtype=torch.float64)[draw(ROWS, CLASSES).argmax(-1)]

    def like_params(self, seed: int) -> Tree:
        """Other values in the place of the parameters."""
        draw = normal(seed)
        return fs.tree_map(lambda leaf: draw(*leaf.shape) / 2, self.params)

    @property
    def size(self) -> int:
        return sum(leaf.numel() for leaf in fs.tree_leaves(self.params))

    def basis(self) -> Tree:
        """Every direction along one parameter, stacked."""
        leaves = iter(
            torch.eye(self.size, dtype=torch.float64).split([n.numel() for n in fs.tree_leaves(self.params)], 1)
        )
        return fs.tree_map(lambda leaf: next(leaves).reshape(self.size, *leaf.shape), self.params)


def of_function() -> Subject:
    draw = normal(1)
    layers = [
        {"weight": draw(FEATURES, HIDDEN) / 2, "bias": draw(HIDDEN)},
        {"weight": draw(HIDDEN, CLASSES) / 2, "bias": draw(CLASSES)},
    ]
    params = {"layers": layers, "scale": draw()}

    def gathering() -> Predict:
        return lambda params, x: function(fs.gather(params), x)

    terms = ROWS * (FEATURES + HIDDEN + CLASSES)
    return Subject("function", params, function, gathering, (FEATURES,), terms)


def of_module(name: str, build: Callable[[], nn.Module], units: Any, shape: tuple[int, ...], terms: int) -> Subject:
    module, draw = build().double(), normal(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(draw(*parameter.shape) / 2)
    params = {name: parameter.detach() for name, parameter in module.named_parameters()}

    def dense(params: Tree, x: torch.Tensor) -> torch.Tensor:
        return functional_call(module, params, (x,))

    return Subject(name, params, dense, lambda: fs.functionalize(module, units).apply, shape, terms)


# Attention sums over the width for queries, keys, values and outputs, over a head for scores, and over positions.
FANS_IN = 4 * WIDTH + WIDTH // HEADS + POSITIONS + WIDTH + INNER + 2 * WIDTH + POSITIONS + WIDTH

SUBJECTS: dict[str, Callable[[], Subject]] = {
    "function": of_function,
    "perceptron": lambda: of_module(
        "perceptron", Perceptron, nn.Linear, (FEATURES,), ROWS * (FEATURES + HIDDEN + CLASSES)
    ),
    "transformer": lambda: of_module(
        "transformer", Attention, ["norms.*", "attention"], (POSITIONS, WIDTH), ROWS * POSITIONS * FANS_IN
    ),
}


@cache
def subject(name: str) -> Subject:
    return SUBJECTS[name]()
