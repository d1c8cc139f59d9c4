"""Tests whose body is the program of a rank, and errors that break one."""

import inspect
import warnings
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch.distributed as dist

from fshard.testing import Workers, spmd

Test = Callable[..., Any]


def on_ranks(*worlds: int | str, timeout: float = 60.0) -> Callable[[Test], Test]:
    """Make a test's body the program of a rank; ranks must return equal values.

    Args:
        *worlds: A row of the test each: a number of simulated ranks, or a text such as "2 processes". The test may take
            the number of ranks as `world_size`. Without any the test is parametrized by `world_size` itself.
        timeout: Seconds after which ranks are stuck.

    Returns:
        A decorator of a test, whose other arguments every rank is given.
    """

    def decorate(test: Test) -> Test:
        parameters = inspect.signature(test).parameters

        @wraps(test)
        def run(**given: Any) -> None:
            size = str(given["world_size"]).partition(" ")[0]
            arguments = {name: int(size) if name == "world_size" else given[name] for name in parameters}
            world = world_of(given["world_size"], given.get("workers"))
            first, *others = spmd(partial(test, **arguments), world, timeout=timeout)
            assert others == [first] * len(others)

        processes = any(isinstance(size, str) for world in worlds for size in getattr(world, "values", [world]))
        names = dict.fromkeys(("world_size", *["workers"] * processes, *parameters))
        run.__signature__ = inspect.Signature([inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in names])
        return pytest.mark.parametrize("world_size", worlds)(run) if worlds else run

    return decorate


def world_of(world_size: int | str, workers: Callable[[int], Workers]) -> int | Workers:
    """A number of simulated ranks, or the processes of "2 processes"."""
    return workers(int(world_size.partition(" ")[0])) if isinstance(world_size, str) else world_size


class StrictWorkers(Workers):
    """Workers in whose programs a warning is an error, as pytest makes it in this process."""

    def run(self, f: Callable[[], Any], timeout: float | None = None) -> list[Any]:
        def program() -> Any:
            with warnings.catch_warnings(action="error"):
                # Modules that torch imports late may deprecate names that other parts of it use.
                warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\.")
                # torch's forward-mode AD scripts functions when it is first used.
                warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated", category=FutureWarning)
                return f()

        return super().run(program, timeout)


def my_rank() -> int:
    """The number of the rank that calls."""
    return dist.get_rank()


class BrokenError(Exception):
    """An error of a program's own."""
