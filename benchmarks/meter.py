"""Meters of a process's memory: the malloc counter, or resident memory where it cannot be built.

    python benchmarks/meter.py torchrun --standalone --nproc_per_node 2 examples/ddp_parity.py

runs a command with the counter, or without it where it cannot be built.
"""

import contextlib
import ctypes
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parent / "malloc_counter.c"
COUNTER = "malloc counter"
RESIDENT = "peak RSS"


class Meter(NamedTuple):
    """What reads this process's memory, in bytes.

    Attributes:
        name: What it measures.
        current: Bytes now.
        peak: Most bytes since the last reset.
        reset: Start the peak from what there is now.
    """

    name: str
    current: Callable[[], int]
    peak: Callable[[], int]
    reset: Callable[[], object]


class Counter(NamedTuple):
    """The built counter, or why there is none."""

    library: Path | None
    reason: str

    def environment(self) -> dict[str, str]:
        """The environment for processes that are to be measured."""
        if self.library is None:
            # Makes glibc map larger blocks one by one and unmap them at once: resident memory then follows use.
            return os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        # One loaded already, such as another allocator, would come between the counter and glibc.
        return os.environ | {"LD_PRELOAD": str(self.library)}


def build_counter(folder: Path) -> Counter:
    """Compile the counter and see that a process runs with it."""
    library = folder / "malloc_counter.so"
    compiler = os.environ.get("CC", "cc")
    try:
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", SOURCE, "-o", library], check=True, capture_output=True)
    except OSError:
        return Counter(None, f"there is no compiler {compiler!r}")
    except subprocess.CalledProcessError:
        return Counter(None, f"{compiler!r} could not compile {SOURCE.name}")
    counter = Counter(library, "")
    probe = "import meter, sys; sys.exit(meter.meter().name != meter.COUNTER)"
    command = [sys.executable, "-c", probe]
    if subprocess.run(command, env=counter.environment(), cwd=SOURCE.parent, capture_output=True).returncode:
        return Counter(None, "the counter cannot be loaded before this system's allocator")
    return counter


def meter() -> Meter:
    """The best meter there is in this process."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_counter_current"):
        current, peak = library.malloc_counter_current, library.malloc_counter_peak
        current.restype = peak.restype = ctypes.c_long
        return Meter(COUNTER, current, peak, library.malloc_counter_reset)
    if Path("/proc/self/status").exists():
        return Meter(RESIDENT, lambda: status("VmRSS"), lambda: status("VmHWM"), reset_status)
    return Meter(RESIDENT, lifetime_peak, lifetime_peak, lambda: None)


def status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def reset_status() -> None:
    # 5 resets the peak; where that is forbidden, it stays the peak of the process's whole life.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def lifetime_peak() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        counter = build_counter(Path(folder))
        if counter.library is None:
            print(f"meter.py: memory is not counted: {counter.reason}", flush=True)
        environment = counter.environment() if counter.library else None
        sys.exit(subprocess.run(sys.argv[1:], env=environment).returncode)


if __name__ == "__main__":
    main()
