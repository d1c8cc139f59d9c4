"""models: modules to plan for without values, GPTs of known sizes and those of a user's factory."""

import importlib
import inspect
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from fshard.extend import describe, expect

# Width, layers and heads: models of Brown et al. (2020), and one of 10^12 parameters.
GPTS = MappingProxyType(
    {
        "gpt-125m": (768, 12, 12),
        "gpt-1.3b": (2048, 24, 16),
        "gpt-13b": (5120, 40, 40),
        "gpt-175b": (12288, 96, 96),
        "gpt-1t": (25600, 128, 160),
    }
)


class GPT(nn.Module):
    """Tokens and the tokens that follow them in, the mean cross entropy out."""

    def __init__(self, width: int, layers: int, heads: int, vocabulary: int = 50304, context: int = 2048) -> None:
        """Make the parameters."""
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        options: dict[str, Any] = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        blocks = (nn.TransformerEncoderLayer(width, heads, 4 * width, **options) for _ in range(layers))
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # (batch, time) twice, to a scalar
        """Compute the loss of a batch."""
        time = x.shape[1]
        h = self.tokens(x) + self.positions(torch.arange(time, device=x.device))  # (batch, time, width)
        mask = torch.ones(time, time, dtype=torch.bool, device=x.device).triu(1)
        for block in self.blocks:
            h = block(h, mask, is_causal=True)
        logits = self.head(self.norm(h)).flatten(0, 1)  # (batch * time, vocabulary)
        return F.cross_entropy(logits, y.flatten())


class Workload(NamedTuple):
    """A module and a batch to train it on.

    Attributes:
        name: Its name.
        make: Makes the module of a depth, on the meta device; called with the batch it returns a scalar loss.
        batch: One rank's batch, tensors of any kind.
        units: The units, as for `fs.functionalize`.
        layers: The depth; None where the module has one depth only.
    """

    name: str
    make: Callable[[int | None], nn.Module]
    batch: tuple[Any, ...]
    units: Any
    layers: int | None


def workload_of(name: str, batch: int = 1) -> Workload:
    """Make the workload of a known model, or of a factory of one's own.

    Args:
        name: One of `GPTS`, or package:factory: a function of nothing that returns (module, batch), where
            module(*batch) is the loss, a scalar. It may take `layers`, and then has its depth as the default.
        batch: Sequences of one rank, for known models.

    Returns:
        The workload.

    Raises:
        ValueError: if there is no such model or factory, or it returns something else.
    """
    factory = partial(_gpt, name, batch, layers=GPTS[name][1]) if name in GPTS else _imported(name)
    layers = inspect.signature(factory).parameters.get("layers")
    depth = layers.default if layers and isinstance(layers.default, int) else None

    def make(layers: int | None) -> tuple[nn.Module, Any]:
        with torch.device("meta"):
            made = factory(layers=layers) if depth and layers else factory()
        pair = isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)
        needed = f"{name} to return (module, batch), where module(*batch) is the loss"
        expect(pair, "plan", needed, describe(made))
        return made

    module, inputs = make(None)
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    return Workload(name, lambda layers: make(layers)[0], inputs, _repeated(module), depth)


def _gpt(name: str, batch: int, layers: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    width, _, heads = GPTS[name]
    module = GPT(width, layers, heads)
    tokens = torch.empty(batch, module.positions.num_embeddings, dtype=torch.int64)
    return module, (tokens, tokens)


def _imported(name: str) -> Any:
    """Import package:factory."""
    package, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(package), attribute)
    except (ImportError, AttributeError) as error:
        needed = f"one of {', '.join(GPTS)}, or package:factory, a function that can be imported"
        raise ValueError(f"plan: expected model to be {needed}, got {name!r}: {error}") from None


def _repeated(module: nn.Module) -> Any:
    """Find the class of the submodules that follow each other most often; None where none do."""
    found = [list(part.children()) for part in module.modules() if isinstance(part, nn.ModuleList | nn.Sequential)]
    classes = Counter(type(children[0]) for children in found if children for _ in children)
    return max(classes, key=lambda cls: classes[cls], default=None)
