"""Faults to plant in a step that runs: in an operator of the tests that passes its input on, or in one of torch's.

A fault is armed on one rank. It changes one element of what one call returns, and no other code knows of it.
"""

import hashlib
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch._subclasses import FakeTensor

from fshard import _compat

# How a fault changes an element: NaN or infinity in every run, or the last bit of one that is not 0, in one run.
KINDS = ("nan", "inf", "bit")
# Operators of torch that the steps call in one line each; the backward is that of the same line.
OF_TORCH = {"gelu": torch.ops.aten.gelu.default, "gelu_backward": torch.ops.aten.gelu_backward.default}
NAMES = {operator: name for name, operator in OF_TORCH.items()}


class Call(NamedTuple):
    """One call of an operator in a step."""

    place: str  # the name of the place, such as "gathered", or of torch's operator
    index: int  # the number of the block or the leaf, that the place was given; -1 for torch's operators
    digest: str  # a hash of its input
    # How many calls of the place before it had the same index and input, as where a value is recomputed.
    occurrence: int = 0


class Fault(NamedTuple):
    """What is wrong with which call."""

    call: Call
    kind: str  # one of KINDS
    element: int  # the number of the element, modulo how many there are
    per_step: int  # how many calls of a step are equal but for their occurrence; 1 if it is in all of them


class Recorded(NamedTuple):
    """A call of a run without a fault, and what it returned."""

    call: Call
    result: torch.Tensor


class Watcher(_compat.DispatchMode):
    """Sees the calls on this rank; records them, or makes one of them return something wrong."""

    def __init__(self, fault: Fault | None = None) -> None:
        super().__init__()
        self.fault = fault
        self.records: list[Recorded] = []
        self.counts: Counter[Call] = Counter()
        self.fired = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        # Tensors of a trace have no values.
        if operator in NAMES and type(result) is torch.Tensor:
            self.visit(NAMES[operator], -1, args[0], result)
        return result

    def visit(self, place: str, index: int, given: torch.Tensor, result: torch.Tensor) -> None:
        """Note a call, and change its result where the fault is."""
        name = Call(place, index, digest(given))
        call = name._replace(occurrence=self.counts[name])
        self.counts[name] += 1
        if self.fault is None:
            self.records.append(Recorded(call, result.clone()))
        elif self.is_hit(call):
            self.fired += 1
            spoil(result, self.fault)

    def is_hit(self, call: Call) -> bool:
        """Whether the fault is in this call: in each run, or in the first alone."""
        fault = self.fault
        if call[:3] != fault.call[:3]:
            return False
        if fault.kind == "bit":
            return call.occurrence == fault.call.occurrence
        return call.occurrence % fault.per_step == fault.call.occurrence


class _OfRank(threading.local):
    """The watcher of this rank."""

    watcher: Watcher | None = None


OF_RANK = _OfRank()


@contextmanager
def watching(fault: Fault | None = None) -> Iterator[Watcher]:
    """Record the calls of this rank in the block, or plant a fault there."""
    OF_RANK.watcher = watcher = Watcher(fault)
    try:
        with watcher:
            yield watcher
    finally:
        OF_RANK.watcher = None


def digest(tensor: torch.Tensor) -> str:
    return hashlib.blake2b(tensor.detach().contiguous().numpy().tobytes(), digest_size=8).hexdigest()


def spoil(tensor: torch.Tensor, fault: Fault) -> None:
    """Change an element in place."""
    flat = tensor.detach().view(-1)
    if fault.kind == "bit":
        # The last bit of 0 would make a number that is flushed to 0 again.
        numbers = flat.nonzero().view(-1)
        place = numbers[fault.element % len(numbers)]
        flat.view(torch.int32)[place] ^= 1
    else:
        flat[fault.element % len(flat)] = float(fault.kind)


LIBRARY = torch.library.Library("fshard_replay_tests", "DEF")
LIBRARY.define("plant(Tensor x, str place, int index) -> Tensor")


@torch.library.impl(LIBRARY, "plant", "CompositeExplicitAutograd")
def _plant(x: torch.Tensor, place: str, index: int) -> torch.Tensor:
    result = x.clone(memory_format=torch.contiguous_format)
    if OF_RANK.watcher is not None and type(x) is not FakeTensor:
        OF_RANK.watcher.visit(place, index, x, result)
    return result


torch.library.register_fake(
    "fshard_replay_tests::plant",
    lambda x, place, index: torch.empty_like(x, memory_format=torch.contiguous_format),
    lib=LIBRARY,
)
torch.library.register_autograd(
    "fshard_replay_tests::plant",
    lambda ctx, grad: (grad, None, None),
    lib=LIBRARY,
)


# The identity, as an operator that stays in graphs, where a fault may be: plant(x, place, index).
plant = torch.ops.fshard_replay_tests.plant
