"""Bounds of a train step's memory by a formula, which reads shapes and one plain forward, no meter and no schedule."""

from collections.abc import Iterable

import torch
from architectures import Configured
from rivals import fine_units

# Of the units that a system holds full at one moment: none, the two largest, or all from the forward to the backward.
NONE, TWO, ALL = slice(0, 0), slice(-2, None), slice(None)
FULL_UNITS = {"ddp": NONE, "zero1": ALL, "zero2": ALL, "zero3": TWO, "fsdp1": TWO, "fsdp2": TWO, "fsdp2-fine": TWO}
PARTS = ("parameters", "optimizer state", "full units", "reduced gradients", "saved by autograd", "bound")


def bound_of(system: str, configuration: Configured, ranks: int) -> dict[str, int] | None:
    """Bound the bytes that a rank holds above idle in a step with AdamW, and its parts; None for an unknown system."""
    kind = system.removeprefix("fshard-").removesuffix("-graph")
    if kind not in FULL_UNITS:
        return None
    with torch.device("meta"):
        module = configuration.module()
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    stored, reduced = (1 if kind in whole else ranks for whole in (["ddp"], ["ddp", "zero1"]))
    parts = fine_units(module) if kind == "fsdp2-fine" else []
    parts += [part for part in module.modules() if isinstance(part, configuration.block)]
    parts += reversed([*module.modules()]) if system.startswith("fshard") else [module]
    states = shard_bytes(module.parameters(), stored), 2 * shard_bytes(trained, stored)
    full, gradients = sum(unit_bytes(parts)[FULL_UNITS[kind]]), shard_bytes(trained, reduced)
    sizes = *states, full, gradients, saved_bytes(configuration)
    return dict(zip(PARTS, (*sizes, sum(sizes))))


def shard_bytes(parameters: Iterable[torch.nn.Parameter], ranks: int) -> int:
    """Add up the largest shards of tensors whose first dim is divided among ranks; a tied one counts once."""
    return sum(-(-len(parameter) // ranks) * parameter[0].nbytes for parameter in parameters)


def unit_bytes(parts: Iterable[torch.nn.Module]) -> list[int]:
    """List bytes of the units, in growing order: of each part, without parameters of those before it."""
    units: list[set[torch.nn.Parameter]] = []
    for part in parts:
        units.append(set(part.parameters()).difference(*units))
    return sorted(sum(parameter.nbytes for parameter in unit) for unit in units)


def saved_bytes(configuration: Configured) -> int:
    """Add up the memory that autograd saves in one forward of plain PyTorch, without parameters and batch."""
    module, batch = configuration.module(), configuration.tokens(rank=0)
    given = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *batch)}
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = module(*batch)  # holds what is saved, so that no memory is used twice
    return sum(size for place, size in saved.items() if place not in given) + loss.nbytes
