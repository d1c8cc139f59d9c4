"""Passes of the caller: values that map the graph of a function to another graph of the same function."""

from collections.abc import Hashable
from typing import NamedTuple, Protocol, runtime_checkable

from fshard.jit.trace import Traced


class PassedGraph(NamedTuple):
    """What a pass returns.

    Attributes:
        traced: The function as another graph, with the same inputs, results, bits and writes to donated inputs.
        facts: What the pass has decided, as a text that must be the same on all ranks. They compare it in every call,
            besides the collectives of the graph.
    """

    traced: Traced
    facts: str


@runtime_checkable
class GraphPass(Hashable, Protocol):
    """A value that maps a graph to another graph; equal values make the same graph of the same graph.

    Attributes:
        name: What errors and facts call it.
    """

    name: str

    def __call__(self, traced: Traced) -> PassedGraph:
        """Map a graph to another graph.

        Args:
            traced: The function as the graph that would run without the pass: its writes to donated inputs are in it,
                and updates have moved to their gradients. Nodes hold fake tensors in `meta["val"]`. The pass may change
                the graph, or build another one.

        Returns:
            The other graph, whose new nodes hold fake tensors too, and what ranks compare.

        Raises:
            Exception: if there is no such graph. `jit` raises a ValueError with the name of the pass and this text.
        """
