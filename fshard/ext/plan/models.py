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


class Block(nn.Module):
    """One transformer layer: causal attention and an MLP, each with a norm before it."""

    def __init__(self, width: int, heads: int) -> None:
        """Make the parameters of one layer."""
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, time, width)
        """Add the results of attention and the MLP."""
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))  # (batch, time, 3, heads, width / heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, time, width / heads)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (batch, heads, time, width / heads)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))  # (batch, time, width)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Tokens and the tokens that follow them in, the mean cross entropy out."""

    def __init__(self, width: int, layers: int, heads: int, vocabulary: int = 50304, context: int = 2048) -> None:
        """Make the parameters."""
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # (batch, time) twice, to a scalar
        """Compute the loss of a batch."""
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))  # (batch, time, width)
        for block in self.blocks:
            h = block(h)
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
    needed = f"{name} to return (module, batch), where module(*batch) is the loss"

    def make(layers: int | None) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        with torch.device("meta"):
            made = factory() if layers is None else factory(layers=layers)
        pair = isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)
        expect(pair, "plan", needed, describe(made))
        module, batch = made[0], made[1] if isinstance(made[1], tuple) else (made[1],)
        try:
            inspect.signature(module.forward).bind(*batch)
        except TypeError as error:
            found = f"a batch of {len(batch)} for the forward of {describe(module)} ({error})"
            raise ValueError(f"plan: expected {needed}, got {found}") from None
        return module, batch

    try:
        arguments = inspect.signature(factory).bind()
    except TypeError as error:
        raise ValueError(f"plan: expected {name} to take no arguments without defaults, {error}") from None
    arguments.apply_defaults()
    layers = arguments.arguments.get("layers")
    module, inputs = make(None)
    depth = layers if isinstance(layers, int) else None
    return Workload(name, lambda layers: make(layers if depth else None)[0], inputs, _repeated(module), depth)


def _gpt(name: str, batch: int, layers: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    width, _, heads = GPTS[name]
    module = GPT(width, layers, heads)
    tokens = torch.empty(batch, module.positions.num_embeddings, dtype=torch.int64)
    return module, (tokens, tokens)


def _imported(name: str) -> Any:
    """Import package:factory."""
    package, _, attribute = name.partition(":")
    try:
        if attribute:
            return getattr(importlib.import_module(package), attribute)
        error: Exception | str = "no such model"
    except (ImportError, AttributeError) as caught:
        error = caught
    needed = f"one of {', '.join(GPTS)}, or package:factory, a function that can be imported"
    raise ValueError(f"plan: expected model to be {needed}, got {name!r}: {error}")


def _repeated(module: nn.Module) -> Any:
    """Find the class of the submodules that follow each other most often; None where none do."""
    found = [list(part.children()) for part in module.modules() if isinstance(part, nn.ModuleList | nn.Sequential)]
    classes = Counter(type(children[0]) for children in found if children for _ in children)
    return max(classes, key=lambda cls: classes[cls], default=None)
