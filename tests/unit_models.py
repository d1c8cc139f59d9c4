"""Modules cut into units in every way, whose forward returns this rank's loss, and the numbers of one process."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard.testing import assert_trees_close, spmd
from tests.tolerance import within
from tests.trees import assert_same_bits, normal, one_axis

# No size is a multiple of the number of ranks. HIDDEN makes a weight large enough to be reduced by itself.
RANKS, SEQUENCES, LENGTH, WIDTH, HIDDEN, VOCABULARY = 3, 2, 4, 8, 4099, 1001

# Sums over the places of a rank's sequences and over the ranks, in another order than one process has, which a few
# layers hand on, forward and backward.
near = partial(within, terms=RANKS * SEQUENCES * LENGTH, steps=4)

Batches = Sequence[tuple[Any, ...]]


class Perceptron(nn.Module):
    def __init__(self, hidden=13):
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x):
        return x + self.outer(F.gelu(self.inner(x)))


class Block(nn.Module):
    """A unit with submodules that may be units in turn, and a parameter used before and after them."""

    def __init__(self, hidden=13):
        super().__init__()
        self.norm, self.perceptron = nn.LayerNorm(WIDTH), Perceptron(hidden)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return self.perceptron(self.norm(x * self.scale)) * self.scale


class Dropped(Block):
    """A block with dropout; `checkpointed` computes it again in the backward."""

    def __init__(self, hidden, checkpointed):
        super().__init__(hidden)
        self.dropout, self.checkpointed = nn.Dropout(0.5), checkpointed

    def run(self, x):
        return self.dropout(super().forward(self.dropout(x)))

    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=False) if self.checkpointed else self.run(x)


def tie_head(model):
    model.head.weight = model.embedding.weight


class Language(nn.Module):
    """A language model; `tie` is applied to it once it is made."""

    def __init__(self, tie=lambda model: None, hidden=(13, HIDDEN, 11)):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(map(Block, hidden))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        tie(self)

    def hidden(self, h):
        for block in self.blocks:
            h = block(h)
        return h

    def logits(self, h):
        return self.head(self.norm(h))

    def forward(self, tokens):
        logits = self.logits(self.hidden(self.embedding(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def filled(module: nn.Module, dtype: torch.dtype | None = torch.float64) -> nn.Module:
    """Draw a module's values from a generator of its own: ranks share torch's default one."""
    draw = normal(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(draw(*parameter.shape) / max(parameter.dim() and parameter.shape[-1], 1) ** 0.5)
    return module.to(dtype) if dtype else module


def tokens(ranks: int = RANKS) -> Batches:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randint(VOCABULARY, (SEQUENCES, LENGTH), generator=generator),) for _ in range(ranks)]


def vectors(ranks: int = RANKS) -> Batches:
    draw = normal(3)
    return [(draw(SEQUENCES, LENGTH, WIDTH),) for _ in range(ranks)]


# Rules for models of blocks: units next to each other, and inside each other.
RULES: dict[str, Any] = {"a class": Block, "two classes": (Block, nn.Linear), "every module": nn.Module}
MORE_RULES: dict[str, Any] = RULES | {
    "one unit": None,
    "a pattern": "blocks.*.perceptron",
    "a list": ["embedding", "blocks.*.norm", "blocks.*.perceptron", "head"],
    "a size": 100,
    "a function": lambda path, module: path.endswith("inner") or path == "blocks",
}

Strategy = Callable[[Any], fs.ShardTransform]


def zero3(**options: Any) -> Strategy:
    """ZeRO-3 of every leaf, without merging units."""
    return lambda mesh: fs.zero3(mesh, **{"min_shard_elements": 0, "bucket_bytes": 0, **options})


# Names of units are those of submodules; "(root)" is the whole module.
SOME = ("*1*", "*weight*", "*head*", "(root)")

STRATEGIES: dict[str, Strategy] = {
    **{f"prefetch {n}": zero3(prefetch=n) for n in (0, 1, 2)},
    **{f"kept, prefetch {n}": zero3(prefetch=n, regather=False) for n in (0, 2)},
    **{f"some kept, prefetch {n}": zero3(prefetch=n, regather=SOME) for n in (0, 1, 2)},
    "merged": zero3(bucket_bytes=3000),
    "small leaves whole": zero3(min_shard_elements=50),
    "zero1": lambda mesh: fs.zero1(mesh, min_shard_elements=0),
    "zero2": lambda mesh: fs.zero2(mesh, min_shard_elements=0),
    "ddp": fs.ddp,
}

# Some of them, where the whole table would take long.
CHOSEN = ("prefetch 1", "prefetch 0", "merged", "some kept, prefetch 2")

Loss = Callable[..., torch.Tensor]


def of_module(apply: Callable[..., Any], params: Any, *batch: Any) -> torch.Tensor:
    """The loss that a module's forward returns."""
    return apply(params, *batch)


def mean_of(loss: Loss) -> Callable[[Callable[..., Any], Any, Batches], torch.Tensor]:
    """The objective of one process: the mean of the losses of all ranks' batches."""
    return lambda apply, params, batches: sum(loss(apply, params, *batch) for batch in batches) / len(batches)


def one_process(
    module: nn.Module, batches: Batches, objective: Callable[..., torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    """An objective and its gradients: None where a parameter is unused or frozen."""
    leaves = {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in module.named_parameters()}
    value = objective(lambda params, *args: functional_call(module, params, args), leaves, batches)
    trained = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    grads = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
    return value.detach(), dict.fromkeys(leaves) | dict(zip(trained, grads))


class Row(NamedTuple):
    """A model that is cut into units, the arguments and the loss of a rank, and what one process runs instead."""

    module: nn.Module
    units: Any
    batches: Callable[[int], Batches] = tokens
    loss: Loss = of_module
    reference: nn.Module | None = None


def assert_each_is_one_process(
    rows: dict[str, Row], ranks: int, strategies: dict[str, Strategy], again: bool = False, each: bool = True
) -> None:
    """Assert that every rank has one process's objective and gradients by the same collectives, in one run of ranks.

    Each row by each strategy, or by one of them after another; perhaps twice, for the same bits.
    """
    expected = {
        name: one_process(row.reference or row.module, row.batches(ranks), mean_of(row.loss))
        for name, row in rows.items()
    }
    chosen = list(strategies.items())

    def program():
        mesh, records = one_axis(), []
        for number, (name, row) in enumerate(rows.items()):
            model, batch = fs.functionalize(row.module, row.units), row.batches(ranks)[mesh.get_rank()]
            run = fs.value_and_grad(lambda p: row.loss(model.apply, p, *batch))  # noqa: B023
            for way, strategy in chosen if each else [chosen[number % len(chosen)]]:
                try:
                    params = model.init(strategy(mesh))
                    with fs.comm.record() as record:
                        result = full(run(params))
                    assert_trees_close(result, expected[name], **near(expected[name]))
                    records.append(record)
                    if again:
                        assert_same_bits(full(run(params)), result)
                except Exception as error:
                    error.add_note(f"{name}, by {way}")
                    raise
        return records

    first, *others = spmd(program, ranks, timeout=600.0)
    assert all(records == first for records in others)


def full(result: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
    """What value_and_grad returned, with full gradients."""
    value, grads = result
    return value, fs.unshard(grads)
