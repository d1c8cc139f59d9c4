"""Fixtures of all tests.

They import torch when they are used: the process that hands out tests to others loads this file, and waits for nothing
else before it starts them.
"""

import gc
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING

# The laws hold to the bit on processors. What accelerators have of them, `benchmarks/quarter_hour.py` tries on one.
# Before torch looks for devices, in this process and in those that it starts.
os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
# Threads of several processes would wait for each other on few cores.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest

from tests.forked_programs import start_forking_process
from tests.tiers import mark_slow_rows

if TYPE_CHECKING:
    from fshard.testing import Workers

# A shell starts what runs in its background with Ctrl-C ignored, and processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Start one process that forks ranks for all workers of pytest-xdist, before they start."""
    if session.config.getoption("numprocesses", None):
        start_forking_process()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Look for no examples in the docstrings of tests, which have none: that takes a second of each process."""
    collectors = yield
    # A module of examples is a kind of pytest.Module.
    return [collector for collector in collectors if type(collector) is pytest.Module]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Choose the tier of each row before pytest selects by marks."""
    mark_slow_rows(items)


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what is loaded now, which stays for all tests, and look at the rest less."""
    gc.freeze()
    # Ten times as many new objects as by default before each look.
    gc.set_threshold(7000, 10, 10)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    """Keep torch from writing its trace for pytest in each test, as `spmd` does in its programs.

    It looks up the stack for every tensor of a trace, and a test that fails would show an empty line for each.
    """
    from fshard._compat import hide_trace_from_pytest

    with hide_trace_from_pytest():
        yield


@pytest.fixture(scope="session", autouse=True)
def preloaded_workers(request: pytest.FixtureRequest) -> None:
    """Start the process that Workers are forked from with more than they would load in it themselves."""
    if any("workers" in getattr(item, "fixturenames", ()) for item in request.session.items):
        forkserver.set_forkserver_preload(["tests.preload"])
        forkserver.ensure_running()


@pytest.fixture(autouse=True)
def process_group_ends_with_the_test() -> Iterator[None]:
    """A mesh made outside simulated ranks starts a process group of one rank, which the next test must not find."""
    import torch.distributed as dist

    if dist.is_initialized():
        # Of a doctest, for which there are no fixtures.
        dist.destroy_process_group()
    excepthook = sys.excepthook
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        # torch puts its own there and leaves it.
        sys.excepthook = excepthook


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Sums of torch's kernels depend on the number of threads, which is one in the worker processes."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def workers() -> Iterator[Callable[[int], "Workers"]]:
    """Real processes to run programs on: workers(2) and workers(3) start on first use and serve the whole session."""
    from tests.ranks import StrictWorkers

    pools: dict[int, Workers] = {}
    # Leaving the stack closes every pool, which raises where a worker's exit code is not 0.
    with ExitStack() as stack:

        def of_size(world_size: int) -> "Workers":
            if world_size not in pools:
                pools[world_size] = stack.enter_context(StrictWorkers(world_size))
            return pools[world_size]

        yield of_size


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The device of `tests/accelerator`, compiled."""
    from tests.accelerator import emu

    return emu.build(tmp_path_factory.mktemp("emu"))
