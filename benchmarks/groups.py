"""Groups of systems that fit into the memory of this machine at once, each rank of each in a process of its own."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from rivals import total_bytes
from trained_gpt import Configuration

# What a system keeps between steps, in sizes of the parameters, where it does not shard everything.
COPIES = {"plain": 3.0, "ddp": 4.0, "zero-redundancy": 3.0, "fshard-ddp": 3.0, "fshard-ddp-graph": 3.0}
# A running step gathers parameters and makes gradients; and the allocator keeps much of what was freed.
RUNNING_COPIES, ALLOCATOR_FACTOR = 2.0, 1.2
# What a process with torch in it takes, and one that compiles.
PROCESS_BYTES = 500 * 2**20


def grouped(
    what: str,
    names: Sequence[str],
    references: Sequence[str],
    configuration: Configuration,
    ranks: int,
    memory_fraction: float,
) -> list[list[str]]:
    """Split systems into groups that fit into memory.

    Args:
        what: The program that asks, for its error.
        names: The systems.
        references: Those that are in each group.
        configuration: What they train.
        ranks: Processes of each.
        memory_fraction: Of the available memory, to use at most.

    Returns:
        The groups.
    """
    with torch.device("meta"):
        size = total_bytes(configuration.module().parameters())
    budget = memory_fraction * available_memory()

    def needed(group: Sequence[str]) -> float:
        copies = sum(RUNNING_COPIES + COPIES.get(name, 3.0 / ranks + 0.5) for name in group)
        return ranks * (ALLOCATOR_FACTOR * size * copies + PROCESS_BYTES * len(group))

    groups = [list(references)]
    for name in (name for name in names if name not in references):
        if needed([*groups[-1], name]) > budget and len(groups[-1]) > len(references):
            groups.append(list(references))
        groups[-1].append(name)
    for group in groups:
        if needed(group) > budget:
            found = f"expected about {needed(group) / 2**30:.1f} GiB of memory, got {budget / 2**30:.1f}"
            raise SystemExit(f"{what}: {found} for {', '.join(group)}; choose a smaller configuration")
    return groups


def available_memory() -> int:
    """Bytes that can be allocated without swapping; everything there is where the system does not tell."""
    information = Path("/proc/meminfo")
    lines = information.read_text().splitlines() if information.exists() else []
    sizes = (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return next(sizes, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
