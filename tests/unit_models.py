"""Modules cut into units in every way, whose forward returns this rank's loss, and the numbers of one process."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import fshard as fs
from fshard.testing import assert_trees_close, spmd
from tests.trees import assert_same_bits, normal, one_axis

# No size is a multiple of the number of ranks. HIDDEN makes a weight large enough to be reduced by itself.
RANKS, SEQUENCES, LENGTH, WIDTH, HIDDEN, VOCABULARY = 3, 2, 4, 8, 4099, 1001

# A gradient adds up at most HIDDEN terms below 1, in another order than one process does.
BOUND = HIDDEN * torch.finfo(torch.float64).eps

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
RULES: dict[str, Any] = {
    "a class": Block,
    "two classes": (Block, nn.Linear),
    "every module": nn.Module,
}
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
    return lambda mesh: fs.zero3(mesh, **{"min_shard_elements": 0, "merge_bytes": 0, **options})


# Names of units are those of submodules; "(root)" is the whole module.
SOME = ("*1*", "*weight*", "*head*", "(root)")

STRATEGIES: dict[str, Strategy] = {
    **{f"prefetch {n}": zero3(prefetch=n) for n in (0, 1, 2)},
    **{f"kept, prefetch {n}": zero3(prefetch=n, regather=False) for n in (0, 2)},
    **{f"some kept, prefetch {n}": zero3(prefetch=n, regather=SOME) for n in (0, 1, 2)},
    "merged": zero3(merge_bytes=3000),
    "small leaves whole": zero3(min_shard_elements=50),
    "zero1": lambda mesh: fs.zero1(mesh, min_shard_elements=0),
    "zero2": lambda mesh: fs.zero2(mesh, min_shard_elements=0),
    "ddp": fs.ddp,
}

# Which of them where the whole table would take long, by world size.
CHOSEN = {
    1: {"prefetch 1": STRATEGIES["prefetch 1"]},
    2: {name: STRATEGIES[name] for name in ("prefetch 0", "merged")},
    3: {"some kept, prefetch 2": STRATEGIES["some kept, prefetch 2"]},
}
EVERY = dict.fromkeys((1, 2, RANKS), STRATEGIES)


def by_strategies(column: str, few: Iterable[str], all_of_them: Iterable[str]) -> pytest.MarkDecorator:
    """Rows of another column and strategies: few with those that are chosen, and all of them with every one, slow."""
    chosen = [pytest.param(name, CHOSEN, id=f"{name}-chosen") for name in few]
    every = [pytest.param(name, EVERY, id=f"{name}-every", marks=pytest.mark.slow) for name in all_of_them]
    return pytest.mark.parametrize(f"{column}, strategies", chosen + every)


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


def assert_one_process(
    module: nn.Module,
    batches: Batches,
    units: Any,
    strategies: dict[str, Strategy],
    *,
    loss: Loss = of_module,
    objective: Callable[..., torch.Tensor] | None = None,
    reference: nn.Module | None = None,
    again: bool = False,
) -> None:
    """Assert that every rank has one process's objective and gradients.

    Args:
        module: The model.
        batches: The arguments of each rank.
        units: The rule.
        strategies: To try.
        loss: A rank's loss, of a function that applies the module to parameters, the parameters and the batch.
        objective: What one process computes from all batches; by default the mean of their losses.
        reference: What one process runs, of the same values; by default the model.
        again: Whether to run each twice, for the same bits by the same collectives on every rank.
    """
    expected = one_process(reference or module, batches, objective or mean_of(loss))

    def program():
        mesh, model = one_axis(), fs.functionalize(module, units)
        batch, records = batches[mesh.get_rank()], []
        run = fs.value_and_grad(lambda p: loss(model.apply, p, *batch))
        for name, strategy in strategies.items():
            try:
                params = model.init(strategy(mesh))
                found = full(run(params))
                assert_trees_close(found, expected, rtol=0, atol=BOUND)
                if again:
                    with fs.comm.record() as record:
                        second = run(params)
                    assert_same_bits(full(second), found)
                    records.append(record)
            except Exception as error:
                error.add_note(f"strategy: {name}")
                raise
        return records

    first, *others = spmd(program, len(batches))
    assert all(records == first for records in others)


def assert_one_process_on_ranks(
    module: nn.Module,
    batches: Callable[[int], Batches],
    units: Any,
    strategies: dict[int, dict[str, Strategy]],
    **options: Any,
) -> None:
    """The same for each number of ranks that strategies are given for, and with all of them twice."""
    for ranks, table in strategies.items():
        assert_one_process(module, batches(ranks), units, table, again=strategies is EVERY, **options)


def full(result: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
    """What value_and_grad returned, with full gradients."""
    value, grads = result
    return value, fs.unshard(grads)
