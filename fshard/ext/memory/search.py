"""Search: which generations are in the memory of the hosts, and which rank can read which part."""

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from fshard.ext.memory.job_directory import check_private
from fshard.ext.memory.slots import SlotPart, list_parts
from fshard.extend import Exchange, files, join_ranks


class Generation(NamedTuple):
    """A generation of which there is a part at least.

    Attributes:
        number: The number of the generation, which counts on over restarts.
        ranks: How many ranks wrote it.
        parts: The parts of it that this rank can read, by the ranks that wrote them.
        holders: The ranks that can read the part of each rank, the same on every rank.
        is_readable: Whether it is whole, and each rank that there is now can read a part of it.
    """

    number: int
    ranks: int
    parts: Mapping[str, SlotPart]
    holders: Mapping[str, list[int]]
    is_readable: bool

    @property
    def step(self) -> int:
        """The step of its state."""
        part, *_ = self.parts.values()
        return part.content.step

    def manifest(self) -> files.Manifest:
        """Return a manifest with the chunks that this rank can read."""
        part, *_ = self.parts.values()
        # Each host has a box that ranks of several hosts hold.
        outline = files.merge([other.outline for other in self.parts.values()])
        return part.content._replace(tensors=outline.tensors)

    def read_chunk(self, path: str, chunk: files.Chunk, memory: torch.Tensor) -> None:
        """Read the chunk of a leaf into contiguous memory on the host."""
        self.parts[f"{chunk.file}"].read(path, memory)


def search_generations(exchange: Exchange, directory: Path) -> list[Generation]:
    """Find the generations that are in the memory of all hosts, that which was saved last first.

    Args:
        exchange: The ranks that ask, as many as there are now.
        directory: The job's directory on this host.
    """
    parts_of = defaultdict[str, dict[str, SlotPart]](dict)
    with exchange.raise_on_all_ranks(directory):
        if directory.exists():
            check_private(directory)
        for part in list_parts(directory):
            parts_of[part.generation][f"{part.outline.values['rank']}"] = part
    here = {}
    for name, parts in parts_of.items():
        here[name] = {writer: [exchange.rank] for writer in parts}
    generations = []
    for name, holders in exchange.merge_objects(here, join_ranks).items():
        number, ranks, *_ = json.loads(name)
        readers = set[int]().union(*holders.values())
        is_readable = len(holders) == ranks and len(readers) == exchange.ranks.size
        generations.append(Generation(number, ranks, parts_of[name], holders, is_readable))
    return sorted(generations, reverse=True, key=lambda each: each.number)
