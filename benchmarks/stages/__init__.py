"""The stages of quarter_hour.py, and here what they share.

A stage is a function of a `Place` that yields findings: dictionaries with a `name`, and with `passed`, which says
whether all is as expected. In a rehearsal a stage runs the same lines with small sizes on the tests' device. Where only
CUDA has something, a stand-in takes its place, so that few lines run on CUDA alone.
"""

import gc
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch

import fshard as fs

ROOT = Path(__file__).parents[2]
Findings = Iterator[dict[str, Any]]
T = TypeVar("T")


class Place(NamedTuple):
    """Where a stage runs.

    Attributes:
        device: The type of the device: "cuda", or "emu" in a rehearsal.
        emu: The module of the tests' device in a rehearsal.
        library: The file of that module, for ranks that a stage starts.
        nccl: The file of an NCCL that takes several ranks on one device, if there is one.
    """

    device: str
    emu: Any = None
    library: Path | None = None
    nccl: Path | None = None

    @property
    def is_rehearsal(self) -> bool:
        return self.emu is not None

    def sized(self, full: T, small: T) -> T:
        """Return the size for a measurement, or that for a rehearsal."""
        return small if self.is_rehearsal else full

    def name(self) -> str:
        """Return the name by which the device's figures are known; rehearsals use those of an H100."""
        return "H100" if self.is_rehearsal else torch.cuda.get_device_name()

    def memory(self) -> Any:
        """Return the functions of torch.accelerator that count the device's memory."""
        if not self.is_rehearsal:
            return torch.accelerator
        return SimpleNamespace(
            empty_cache=lambda: None,
            memory_allocated=self.emu.allocated_bytes,
            max_memory_allocated=self.emu.peak_bytes,
            max_memory_reserved=self.emu.peak_bytes,
            reset_peak_memory_stats=self.emu.reset_peak,
        )


def peak_of(place: Place, run: Callable[[], object]) -> int:
    """Run a function; return how many more bytes of the device than before were in use at most."""
    memory = place.memory()
    gc.collect()
    torch.accelerator.synchronize()
    memory.empty_cache()
    memory.reset_peak_memory_stats()
    before = memory.memory_allocated()
    run()
    torch.accelerator.synchronize()
    return int(memory.max_memory_allocated() - before)


@contextmanager
def reported(name: str) -> Iterator[dict[str, Any]]:
    """Make a finding that has not passed until it says so; it holds the error that leaves the block."""
    row: dict[str, Any] = {"name": name, "passed": False}
    try:
        yield row
    except Exception:
        row["error"] = traceback.format_exc()[-1500:]


@contextmanager
def no_waits(place: Place) -> Iterator[None]:
    """Raise where the host waits for CUDA; in a rehearsal at the end of the block, by the device's log."""
    if place.is_rehearsal:
        place.emu.take_events()
        yield
        waits = [event for event in place.emu.take_events() if event.startswith("sync")]
        if waits:
            raise RuntimeError(f"the host waits: {', '.join(waits[:4])}")
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def copied(tree: Any) -> Any:
    """Copy all tensors of a tree."""
    return fs.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, tree)


def is_equal(tree: Any, other: Any) -> bool:
    """Tell whether two trees have the same numbers."""
    pairs = zip(fs.tree_leaves(tree), fs.tree_leaves(other), strict=True)
    return all(torch.equal(torch.as_tensor(leaf).cpu(), torch.as_tensor(twin).cpu()) for leaf, twin in pairs)
