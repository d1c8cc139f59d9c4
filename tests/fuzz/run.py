"""Run programs of the sampler."""

import linecache
import warnings
from typing import Any, NamedTuple

from fshard.testing import Workers


class Result(NamedTuple):
    """What a program did: how many runs were made, which were refused, and how it failed."""

    runs: int = 0
    refused: tuple[str, ...] = ()
    failed: str = ""


def run(source: str, name: str, pool: Workers | None = None) -> Result:
    """Run a program in this process."""
    file = f"<{name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    space: dict[str, Any] = {"__name__": "program"}
    try:
        with warnings.catch_warnings():
            # Programs do what torch warns of, such as a checkpoint whose inputs take no gradient.
            warnings.simplefilter("ignore")
            exec(compile(source, file, "exec"), space)
            runs, refused = space["main"](pool if space["TORCH_DDP"] else None)
    except Exception as error:
        return Result(failed=f"{type(error).__name__}: {error}")
    return Result(runs, tuple(refused))


def report(seed: int, source: str, result: Result) -> str:
    """A failure and its program, to paste."""
    return f"seed {seed}: {result.failed}\n\n{'#' * 80}\n{source}{'#' * 80}"
