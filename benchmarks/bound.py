"""Bounds of a train step's memory by a formula, which reads shapes and one plain forward, no meter and no schedule."""

import torch
from gpt import Block, Configuration
from torch import nn

# Of the units that a system holds full at one moment: none, the two largest, or all from the forward to the backward.
TWO, ALL = -2, 0
FULL_UNITS = {"zero1": ALL, "zero2": ALL, "zero3": TWO, "fsdp1": TWO, "fsdp2": TWO}


def bound_of(system: str, configuration: Configuration, ranks: int) -> dict[str, int] | None:
    """Bound the bytes that a rank holds above idle in a step with AdamW, part by part; None for an unknown system."""
    kind = system.removeprefix("fshard-").removesuffix("-graph")
    if kind not in (*FULL_UNITS, "ddp"):
        return None
    with torch.device("meta"):
        module = configuration.module()
    whole = sum(parameter.nbytes for parameter in module.parameters())
    shards = sum(-(-len(parameter) // ranks) * parameter[0].nbytes for parameter in module.parameters())
    stored = whole if kind == "ddp" else shards
    units = unit_bytes(module, apart=system.startswith("fshard"))[FULL_UNITS[kind] :] if kind in FULL_UNITS else []
    reduced = whole if kind in ("ddp", "zero1") else shards
    return {
        **{"parameters": stored, "optimizer state": 2 * stored, "reduced gradients": reduced},
        **{"full units": sum(units), "saved by autograd": saved_bytes(configuration)},
    }


def unit_bytes(module: nn.Module, apart: bool) -> list[int]:
    """List bytes of each unit, in growing order: the blocks, and other modules' own leaves, apart or as one unit."""
    blocks = [block for block in module.modules() if isinstance(block, Block)]
    inside = {parameter for block in blocks for parameter in block.parameters()}
    owned = [set(owner.parameters(recurse=False)) - inside for owner in module.modules()]
    others = owned if apart else [set().union(*owned)]
    return sorted(sum(parameter.nbytes for parameter in unit) for unit in (*(b.parameters() for b in blocks), *others))


def saved_bytes(configuration: Configuration) -> int:
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
