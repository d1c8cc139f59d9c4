"""models: GPTs of known sizes, without values."""

import importlib
import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from fshard.checks import kind
from fshard.plan.workload import Workload

# What a factory returns.
RETURNED = "(module, batch), where module(*batch) is the loss"


class Sizes(NamedTuple):
    """The shape of a GPT.

    Attributes:
        width: Of its residual stream.
        layers: Its depth.
        heads: Of its attention.
        vocabulary: How many tokens it knows.
        context: Tokens in a sequence.
    """

    width: int
    layers: int
    heads: int
    vocabulary: int = 50304
    context: int = 2048


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
        """Add what attention and the MLP compute."""
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))  # (batch, time, 3, heads, width / heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, time, width / heads)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (batch, heads, time, width / heads)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))  # (batch, time, width)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Tokens and the tokens that follow them in, the mean cross entropy out."""

    def __init__(self, sizes: Sizes) -> None:
        """Make the parameters."""
        super().__init__()
        width = sizes.width
        self.tokens, self.positions = nn.Embedding(sizes.vocabulary, width), nn.Embedding(sizes.context, width)
        self.blocks = nn.ModuleList(Block(width, sizes.heads) for _ in range(sizes.layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, sizes.vocabulary, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # (batch, time) twice, to a scalar
        """The loss of a batch."""
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))  # (batch, time, width)
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h)).flatten(0, 1)  # (batch * time, vocabulary)
        return F.cross_entropy(logits, y.flatten())


def model_sizes() -> dict[str, Sizes]:
    """The shapes of known models by name: those of Brown et al. (2020), and one of 10^12 parameters."""
    return {
        "gpt-125m": Sizes(768, 12, 12),
        "gpt-1.3b": Sizes(2048, 24, 16),
        "gpt-13b": Sizes(5120, 40, 40),
        "gpt-175b": Sizes(12288, 96, 96),
        "gpt-1t": Sizes(25600, 128, 160),
    }


def gpt(name: str, batch: int = 1) -> Workload:
    """A known model with a batch of sequences.

    Args:
        name: One of `model_sizes`.
        batch: Sequences of one rank.

    Returns:
        The workload.

    Raises:
        ValueError: if there is no model of that name.
    """
    sizes = model_sizes().get(name)
    if sizes is None:
        known = ", ".join(model_sizes())
        raise ValueError(f"plan: expected model to be one of {known}, or a module as package:factory, got {name!r}")
    tokens = torch.empty(batch, sizes.context, dtype=torch.int64, device="meta")

    def make(layers: int) -> GPT:
        with torch.device("meta"):
            return GPT(sizes._replace(layers=layers))

    return Workload(name, make, (tokens, tokens), Block, sizes.layers)


def workload_of(name: str, batch: int = 1) -> Workload:
    """A known model, or what a factory of one's own makes.

    Args:
        name: As for `gpt`, or package:factory: a function of nothing that returns (module, batch), where module(*batch)
            is the loss, a scalar. It may take `layers`, and then has its depth as the default.
        batch: Sequences of one rank, for known models.

    Returns:
        The workload.

    Raises:
        ValueError: if there is no such model or factory, or it returns something else.
    """
    if ":" not in name:
        return gpt(name, batch)
    package, _, attribute = name.partition(":")
    try:
        factory = getattr(importlib.import_module(package), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"plan: expected model to be package:factory of what can be imported, got {name!r}: {error}"
        ) from None
    if not callable(factory):
        raise ValueError(f"plan: expected {name} to be a function that returns {RETURNED}, got {kind(factory)}")
    if (why := _misfit(factory)) is not None:
        raise ValueError(f"plan: expected defaults for all arguments of {name}, got none for some ({why})")

    def make(layers: int | None) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        with torch.device("meta"):
            made = factory() if layers is None else factory(layers=layers)
        if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
            raise ValueError(f"plan: expected {name} to return {RETURNED}, got {kind(made)}")
        module, batch = made[0], made[1] if isinstance(made[1], tuple) else (made[1],)
        if (why := _misfit(module.forward, *batch)) is not None:
            found = f"a batch of {len(batch)} for the forward of {kind(module)} ({why})"
            raise ValueError(f"plan: expected {name} to return {RETURNED}, got {found}")
        return module, batch

    parameter = inspect.signature(factory).parameters.get("layers")
    layers = parameter.default if parameter is not None and isinstance(parameter.default, int) else None
    module, inputs = make(None)
    return Workload(name, lambda depth: make(depth if layers else None)[0], inputs, _repeated(module), layers)


def _misfit(function: Callable[..., Any], *args: Any) -> str | None:
    """Why a function cannot be called so; None where it can."""
    try:
        inspect.signature(function).bind(*args)
    except TypeError as error:
        return str(error)
    return None


def _repeated(module: nn.Module) -> Any:
    """The class of the submodules that follow each other most often; None where none do."""
    found = [list(part.children()) for part in module.modules() if isinstance(part, nn.ModuleList | nn.Sequential)]
    classes = Counter(type(children[0]) for children in found if children for _ in children)
    return max(classes, key=lambda cls: classes[cls], default=None)
