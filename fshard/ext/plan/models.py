"""models: what to plan for without values, GPTs of known sizes or those of a user's factory, and estimates of it."""

import importlib
import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard.ext.plan.plan import plan
from fshard.ext.plan.report import Bytes, Rates, StepPlan, readable
from fshard.extend import describe, expect, fake_maker, select

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "hsdp")
# Those whose full parameters may be dropped after the forward, and have a dtype of their own.
CHOOSE = ("zero3", "hsdp")
# Depths that are traced of a deeper model.
DEPTHS = (2, 3, 4)

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
        make: Makes the module of a depth, on the meta device; called with the batch it returns a scalar loss.
        batch: One rank's batch, tensors of any kind.
        units: The units, as for `fs.functionalize`.
        layers: The depth; None where the module has one depth only.
    """

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
    return Workload(lambda layers: make(layers)[0], inputs, _repeated(module), depth)


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


class Options(NamedTuple):
    """How a workload is trained.

    Attributes:
        strategy: "ddp", "zero1", "zero2", "zero3" or "hsdp".
        regather: As for `fs.zero3`; it alone, and hsdp, have it.
        param_dtype: As for `fs.zero3`; it alone, and hsdp, have it.
        checkpointed: Whether units compute their activations again in the backward.
    """

    strategy: str = "zero3"
    regather: bool = True
    param_dtype: torch.dtype | None = None
    checkpointed: bool = False


class Estimate(NamedTuple):
    """The cost of one step of one rank.

    Attributes:
        options: How the workload is trained.
        mesh: Ranks on each axis.
        peak: Bytes held when most are.
        bytes_sent: Nominal ring bytes, scalars left out.
        collectives: How many; about so many where the depth is extrapolated, because small gradients of several layers
            share a collective and fill it at depths that were not traced.
        flops: Floating-point operations.
        seconds: An estimate of the time, from stated rates.
        traced: Whether the full depth was traced.
    """

    options: Options
    mesh: dict[str, int]
    peak: Bytes
    bytes_sent: float
    collectives: int
    flops: int
    seconds: float
    traced: bool

    def __str__(self) -> str:
        """Write one row of a table."""
        activations = "again" if self.options.checkpointed else "kept"
        regather, count = "yes" if self.options.regather else "no", f"{'' if self.traced else '~'}{self.collectives}"
        return (
            f"{self.options.strategy:<6} {' x '.join(map(str, self.mesh.values())):>12} {activations:>6} {regather:>9} "
            f"{readable(self.peak.total):>10} {readable(self.bytes_sent):>10} {count:>12} "
            f"{self.flops:>9.3g} {self.seconds:>9.3g}"
        )


def estimate(
    workload: Workload,
    options: Options,
    mesh: Mapping[str, int],
    rates: Rates = Rates(),  # noqa: B008
    full_depth: bool = False,
) -> Estimate:
    """Plan a workload, by extrapolation over its depth where that is known and large.

    Args:
        workload: The module and its batch.
        options: How it is trained.
        mesh: Ranks on each axis.
        rates: As for `fs.plan`.
        full_depth: Whether to trace all layers instead.

    Returns:
        The estimate.

    Raises:
        ValueError: as by `fs.plan`.
    """

    def row(layers: int | None) -> tuple[float, ...]:
        step, state = prepared(workload, options, layers)
        found: StepPlan = plan(step, state, *workload.batch, mesh=mesh, rates=rates)
        return (*found.peak, found.bytes_sent(), len(found.collectives()), found.flops, found.seconds)

    deeper = 0 if full_depth or workload.layers is None else max(0, workload.layers - DEPTHS[-1])
    columns = zip(*map(row, DEPTHS if deeper else [None]), strict=True)
    # Where growth is uneven, the mean of the traced depths goes on.
    *held, sent, count, flops, seconds = (
        last + deeper * (last - middle if last - middle == middle - first else (last - first) / 2)
        for first, middle, last in ((column[0], column[len(column) // 2], column[-1]) for column in columns)
    )
    peak = Bytes(*(max(0, round(size)) for size in held))
    return Estimate(options, dict(mesh), peak, sent, round(count), round(flops), seconds, not deeper)


def mesh_of(strategy: str, ranks: int, node: int = 8) -> dict[str, int]:
    """Choose the mesh of a strategy: one axis, or hsdp's two."""
    if strategy != "hsdp":
        return {"shard": ranks}
    needed = f"world size to be a multiple of hsdp's {node} ranks a node"
    expect(node > 0 and not ranks % node, "plan", needed, str(ranks), "pass another")
    return {"replicate": ranks // node, "shard": node}


def prepared(
    workload: Workload, options: Options, layers: int | None = None
) -> tuple[Callable[..., Any], fs.TrainState]:
    """Make the jitted step of a workload, with AdamW and its state donated, and the state on one rank without values.

    Args:
        workload: The module and its batch.
        options: How it is trained.
        layers: Another depth than the workload's.
    """
    module = workload.make(layers or workload.layers)
    named, remedy = not options.checkpointed or workload.units is not None, "name them, or keep all"
    expect(named, "plan", "units that compute activations again", "none", remedy)
    for part in map(module.get_submodule, select(module, workload.units) if options.checkpointed else ()):
        part.forward = partial(checkpoint, part.forward, use_reentrant=False)
    model, tx = fs.functionalize(module, workload.units), fs.from_torch(torch.optim.AdamW, lr=1e-4, fused=True)

    def loss(params: Any, buffers: Any, key: torch.Tensor, *batch: Any) -> tuple[torch.Tensor, Any]:
        return model.apply(params, *batch, buffers=buffers, key=key)

    def step(state: fs.TrainState, *batch: Any) -> tuple[fs.TrainState, torch.Tensor]:
        key = fs.fold_in(0, state.step)
        (value, buffers), grads = fs.value_and_grad(loss, has_aux=True)(state.params, state.buffers, key, *batch)
        return fs.update(tx, state, grads)._replace(buffers=buffers), value

    # Not on the meta device, which fused optimizers refuse.
    fake = fake_maker()
    whole = {name: nn.Parameter(fake(p), p.requires_grad) for name, p in module.named_parameters()}
    mesh = fs.init_mesh(dict.fromkeys(mesh_of(options.strategy, 8), 1), device="cpu")
    given = {"regather": options.regather, "param_dtype": options.param_dtype} if options.strategy in CHOOSE else {}
    params = fs.shard(whole, getattr(fs, options.strategy)(mesh, **given))
    return fs.jit(step, donate_argnums=0), fs.TrainState.create(params, tx, buffers=model.buffers)
