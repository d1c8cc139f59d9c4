"""workload: a module and a batch to plan with, under any strategy, without values."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fshard import _compat
from fshard.apply import functionalize
from fshard.errors import Problem, leaf_error
from fshard.jit.jit import jit
from fshard.optim import from_torch
from fshard.random import fold_in
from fshard.shard import check_masks, laid_out
from fshard.strategies import MIN_SHARD_ELEMENTS, ddp, zero1, zero2, zero3
from fshard.train_state import TrainState
from fshard.transforms import ShardTransform, compose, fully_shard, replicate
from fshard.tree import Axis, Sharded, Spec, Tree, flatten, names_of, unflatten
from fshard.unit_rules import select
from fshard.update import update
from fshard.value_and_grad import value_and_grad

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "hsdp")


class Workload(NamedTuple):
    """What is trained.

    Attributes:
        name: What it is called.
        make: Makes the module of a depth, on the meta device; called with the batch it returns a scalar loss.
        batch: One rank's batch, tensors of any kind.
        units: What is gathered together, as for `fs.functionalize`.
        layers: The depth; None where the module has one depth only.
    """

    name: str
    make: Callable[[int], nn.Module]
    batch: tuple[Any, ...]
    units: Any
    layers: int | None


class Options(NamedTuple):
    """How it is trained.

    Attributes:
        strategy: "ddp", "zero1", "zero2", "zero3" or "hsdp".
        units: What is gathered together, as for `fs.functionalize`; None means what the workload says.
        regather: As for `fs.zero3`; it alone, and hsdp, have it.
        param_dtype: As for `fs.zero3`.
        checkpointed: Whether units compute their activations again in the backward.
    """

    strategy: str = "zero3"
    units: Any = None
    regather: bool = True
    param_dtype: torch.dtype | None = None
    checkpointed: bool = False


def prepared(workload: Workload, options: Options, layers: int | None = None) -> tuple[Callable[..., Any], TrainState]:
    """The jitted step of a workload, with AdamW and its state given up, and the state on one rank without values.

    Args:
        workload: What is trained.
        options: How.
        layers: Another depth than the workload's.
    """
    module = workload.make(layers or workload.layers or 0)
    units = workload.units if options.units is None else options.units
    if options.checkpointed:
        _compute_again(module, units)
    model, tx = functionalize(module, units), from_torch(torch.optim.AdamW, lr=1e-4, fused=True)

    def loss(params: Tree, buffers: Tree, key: torch.Tensor, *batch: Any) -> tuple[torch.Tensor, Tree]:
        return model.apply(params, *batch, buffers=buffers, key=key)

    def step(state: TrainState, *batch: Any) -> tuple[TrainState, torch.Tensor]:
        key = fold_in(0, state.step)
        (value, buffers), grads = value_and_grad(loss, has_aux=True)(state.params, state.buffers, key, *batch)
        return update(tx, state, grads)._replace(buffers=buffers), value

    params = without_values(module, strategy_of(options))
    return jit(step, donate_argnums=0), TrainState.create(params, tx, buffers=model.buffers)


def strategy_of(options: Options) -> ShardTransform:
    """A strategy on axes of one rank each, which a plan gives their sizes."""
    axis, more = Axis("shard", 1, ""), {"regather": options.regather, "param_dtype": options.param_dtype}
    plain = {"ddp": ddp, "zero1": zero1, "zero2": zero2}
    if options.strategy in plain:
        if more != {"regather": True, "param_dtype": None}:
            raise ValueError(f"plan: expected zero3 or hsdp for regather and param_dtype, got {options.strategy}")
        return plain[options.strategy](axis)  # type: ignore[arg-type]
    if options.strategy not in STRATEGIES:
        raise ValueError(f"plan: expected strategy to be one of {STRATEGIES}, got {options.strategy!r}")
    if options.strategy == "zero3":
        return zero3(axis, **more)  # type: ignore[arg-type]
    inner = fully_shard(axis, min_shard_elements=MIN_SHARD_ELEMENTS)
    layout = compose(replicate(Axis("replicate", 1, "")), inner)
    return zero3(axis, layout=layout, **more)  # type: ignore[arg-type]


def without_values(module: nn.Module, strategy: ShardTransform) -> Tree:
    """A module's parameters as they are sharded, without values; tied ones once.

    Args:
        module: The module, on any device.
        strategy: How to shard them.

    Returns:
        The tree that `model.init` makes, of tensors that say they are on the processor.
    """
    flat = flatten(dict(module.named_parameters()))
    names = names_of(flat.treedef)
    check_masks("plan", strategy, names)
    problems: list[Problem] = []
    # Not on the meta device, which fused optimizers refuse.
    leaves, fake = [], _compat.fake_maker()
    for path, name, leaf in zip(flat.paths, names, flat.leaves, strict=True):
        spec = laid_out(path, Spec(tuple(leaf.shape), frozen=not leaf.requires_grad), strategy.at(name), problems)
        leaves.append(Sharded(fake(torch.empty(spec.local_shape, dtype=leaf.dtype, device="meta")), spec))
    if problems:
        raise leaf_error("plan: leaves cannot be sharded", problems, "choose a strategy that fits their shapes")
    return unflatten(flat.treedef, leaves)


def _compute_again(module: nn.Module, units: Any) -> None:
    """Put activation checkpoints around the units."""
    if units is None:
        raise ValueError("plan: expected units that compute activations again, got none; name them, or keep all")
    made: dict[type, type] = {}
    for part in map(module.get_submodule, select(module, units)):
        own = type(part)
        if own not in made:

            def forward(self: nn.Module, *args: Any, own: type = own, **kwargs: Any) -> Any:
                return checkpoint(own.forward, self, *args, use_reentrant=False, **kwargs)  # type: ignore[attr-defined]

            made[own] = type(own.__name__, (own,), {"forward": forward})
        part.__class__ = made[own]
