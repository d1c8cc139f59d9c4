"""One row of the table of programs."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Program(NamedTuple):
    """A program as one process runs it and as a rank of several does.

    Attributes:
        dense: Called with a Dense; returns named results.
        sharded: Called with an OfRank; returns the same ones, sharded or whole.
        sweeps: How often it goes through the model, each time summing as many terms again.
    """

    dense: Callable[[Any], dict[str, Any]]
    sharded: Callable[[Any], dict[str, Any]]
    sweeps: int


def alike(run: Callable[[Any], dict[str, Any]], sweeps: int) -> Program:
    """A program whose text is the same on both sides."""
    return Program(run, run, sweeps)
