"""Bits that flip while a step is verified."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.fx import Node

from fshard.ext.replay import repeat
from fshard.ext.replay.places import name_operator, origin_of
from fshard.extend import graph_nodes

Site = Callable[[Node], bool]


def operator(name: str, module: str | None = None, phase: str | None = None) -> Site:
    """The operators of a name, in a module or a phase."""

    def is_site(node: Node) -> bool:
        origin = origin_of(node)
        return name_operator(node) == name and module in (None, origin.module) and phase in (None, origin.phase)

    return is_site


def arrival(op: str, unit: str) -> Site:
    """The buffers of collectives of a unit, once they have arrived."""

    def is_site(node: Node) -> bool:
        if not graph_nodes.is_wait(node):
            return False
        collective = graph_nodes.find_collective(node.args[0].args[0])
        return collective.op == op and collective.unit == unit

    return is_site


@contextmanager
def flipping(rank: int, is_site: Site, runs: Sequence[int] = (0,), bit: int = 0) -> Iterator[None]:
    """Flip a bit of the first result at a site on one rank, in some of the runs of a step."""
    runs_begun: Counter[int] = Counter()
    run_nodes = repeat.run_nodes

    def run(traced: Any, tensors: Any, watch: Any) -> Any:
        number = runs_begun[dist.get_rank()]
        runs_begun[dist.get_rank()] += 1
        remaining = [1] if dist.get_rank() == rank and number in runs else []

        def flip(node: Node, operands: Any, results: Sequence[torch.Tensor]) -> None:
            if remaining and results and is_site(node):
                remaining.pop()
                first = results[0].as_strided((1,), (1,), results[0].storage_offset())
                first.view(torch.int32).bitwise_xor_(1 << bit)
            watch(node, operands, results)

        return run_nodes(traced, tensors, flip)

    with patch.object(repeat, "run_nodes", run):
        yield
