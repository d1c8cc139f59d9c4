"""fit: a pass that makes a step hold no more bytes than a budget, by running some of its operators again.

A copy of an operator has "recompute" or "gather" in `node.meta["fit"]`, of which the report of `jitted.memory` is made.
"""

import re
from collections import Counter
from typing import Any, NamedTuple

from torch.fx import GraphModule

from fshard.ext.fit.schedule import Schedule, build
from fshard.ext.fit.search import find_plan
from fshard.ext.fit.step import StepFacts
from fshard.extend import PassedGraph, Rates, Traced, check_rates, expect, files

# The n-th prefix stands for the n-th power of 1000, or of 1024 if an "i" follows.
_PREFIXES = " KMGT"


class Fit(NamedTuple):
    """The pass that `fit` returns.

    Attributes:
        budget: The bytes that a rank may hold, arguments included.
        rates: The speed of the device and its links, by which the cheapest operators are found.
        name: What errors and facts call the pass.
    """

    budget: int
    rates: Rates
    name: str = "fit"

    def __call__(self, traced: Traced) -> PassedGraph:
        """Return a graph that computes the same bits and holds no more bytes than the budget."""
        step = StepFacts(traced.module.graph, self.rates)
        schedule = find_plan(step, self.budget)
        if schedule.peak > self.budget:
            raise ValueError(_refuse(schedule, self.budget))
        if schedule.copies:
            traced = traced._replace(module=GraphModule(traced.module, build(schedule)))
        return PassedGraph(traced, _digest(schedule))


def fit(budget: int | str, rates: Rates = Rates()) -> Fit:  # noqa: B008
    """Make a pass for `jit` that keeps the memory of a step within a budget.

    The pass knows when each byte of the step's graph is taken and freed. While more is held than the budget allows, it
    chooses results that are not needed for a while, frees them, and computes or gathers them again right before their
    next use: those first that free the most bytes for the longest time in the fewest seconds. The results of the step
    keep their bits. Random numbers are not drawn again, and updates run once, as before.

    The budget counts what a rank holds at a time, including the state, the batch and other arguments. What the
    allocator, kernels and the backend of collectives take for themselves is not counted. A larger budget never needs
    more copies or more estimated seconds. Ranks compare what they chose.

    Args:
        budget: Bytes, or a text such as "10GB" or "512MiB".
        rates: The speed of the device and its links, as for `plan`. They decide what is cheap to run again. All ranks
            must give the same.

    Returns:
        The pass, for `passes=` of `jit`.

    Raises:
        ValueError: if the budget is no number of bytes or a rate makes no sense; by the jitted function, if an axis
            that it gathers over has no rate, or if the step cannot fit: the error says with how many bytes it can, and
            what is held then.

    >>> import torch, fshard as fs
    >>> def loss(w, x):
    ...     for _ in range(8):
    ...         x = (x @ w).sin()
    ...     return x.sum()
    >>> step = fs.jit(torch.func.grad(loss), passes=(fs.fit("28kB"),))
    >>> step(torch.eye(16), torch.ones(64, 16)).shape
    torch.Size([16, 16])
    """
    check_rates("fit", rates)
    return Fit(_read_bytes(budget), rates)


def _read_bytes(budget: Any) -> int:
    """Read a number of bytes, or a text of one with its unit."""
    nbytes = budget
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(|k|[KMGT]i|[MGT])B?\s*", str(budget))
    if isinstance(budget, str) and match:
        base = 1024 if "i" in match[2] else 1000
        nbytes = int(float(match[1]) * base ** _PREFIXES.index(match[2][:1].upper()))
    is_number = type(nbytes) is int and nbytes > 0
    expect(is_number, "fit", 'budget to be bytes (at least 1), or a text such as "10GB" or "512MiB"', f"{budget!r:.40}")
    return nbytes


def _digest(schedule: Schedule) -> str:
    """Write what was chosen in few letters. Names of nodes may differ between ranks, so they are left out."""
    numbers = {node: number for number, node in enumerate(schedule.step.graph.nodes)}
    copies = [f"{entry.node.target} {numbers[entry.node]} {numbers[entry.time]}" for entry in schedule.copies]
    return f"{len(copies)} copies, {schedule.peak} bytes, {files.digest(str(copies).encode())}"


def _refuse(schedule: Schedule, budget: int) -> str:
    """Say what the smallest budget is, and what is held at its peak."""
    peak = schedule.held.argmax()
    held = Counter[str]()
    for buffer in schedule.buffers:
        if buffer.uses[0] <= peak <= buffer.uses[-1]:
            held[schedule.placed[buffer.uses[0]].node.name] += buffer.bytes
    largest = ", ".join(f"{name} ({nbytes})" for name, nbytes in held.most_common(5))
    return (
        f"the step needs at least {schedule.peak} bytes, and the budget is {budget}. With {schedule.peak} bytes, most "
        f"are held at {schedule.placed[peak].node.name}: {schedule.step.arguments} bytes of arguments, and the results "
        f"of {largest}. Raise the budget, make the batch smaller, or shard over more ranks."
    )
