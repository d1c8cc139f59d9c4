"""Run programs, here or in a process that may hang or die, and shrink those that fail."""

import json
import linecache
import os
import select
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tests.fuzz.plan import Plan, smaller
from tests.fuzz.render import STRATEGIES, render

# How failures are told apart while one is shrunk, in the order in which they are looked for.
MARKS = (
    *(
        "hung",
        "aborted",
        "deadlock",
        "timed out",
        "only ranks",
        "an error that no feature",
        "wrong numbers",
        "other bits",
    ),
    *("jitted step has other bits", "not whole", "changed its state", "although rank", "torch DDP differs"),
)


class Result(NamedTuple):
    """What a program did: how many runs were made, which were refused, and how it failed."""

    runs: int = 0
    refused: tuple[str, ...] = ()
    failed: str = ""

    @property
    def mark(self) -> str:
        return next((mark for mark in MARKS if mark in self.failed), self.failed[:20])


def run(source: str, name: str, workers: Any = None) -> Result:
    """Run a program in this process."""
    file = f"<{name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    space: dict[str, Any] = {"__name__": "program"}
    try:
        with warnings.catch_warnings():
            # Programs do what torch warns of, such as a checkpoint whose inputs take no gradient.
            warnings.simplefilter("ignore")
            exec(compile(source, file, "exec"), space)
            runs, refused = space["main"](workers() if workers and space["TORCH_DDP"] else None)
    except Exception as error:
        return Result(failed=f"{type(error).__name__}: {error}")
    return Result(runs, tuple(refused))


class Process:
    """A process that runs programs one after another, and is made anew after one that hangs or aborts."""

    def __init__(self, seconds: float = 180.0, messages: Path | None = None) -> None:
        self.seconds, self.messages = seconds, messages or Path(os.devnull)
        self._process: subprocess.Popen[str] | None = None

    def run(self, source: str, name: str) -> Result:
        """Run a program there."""
        if self._process is None:
            command = [sys.executable, "-m", "tests.fuzz", "--serve"]
            with self.messages.open("a") as messages:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=messages, text=True
                )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps([source, name]) + "\n")
            self._process.stdin.flush()
        ready, *_ = select.select([self._process.stdout], [], [], self.seconds)
        line = self._process.stdout.readline() if ready else ""
        if line:
            runs, refused, failed = json.loads(line)
            return Result(runs, tuple(refused), failed)
        code = self._process.poll() if ready else None
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(5.0) if ready else None
        self.close()
        return Result(failed=f"aborted with exit code {code}" if ready else f"hung for {self.seconds} s")

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            # Waits for it, and closes its pipes.
            with suppress(BrokenPipeError):
                self._process.communicate()
            self._process = None


def shrink(plan: Plan, result: Result, run: Callable[[str, str], Result], seconds: float) -> tuple[Plan, Result]:
    """Drop one thing after another while the program fails in the same way."""
    deadline, tried = time.monotonic() + seconds, 0

    def fails(candidate: Plan) -> bool:
        nonlocal plan, result
        found = run(render(candidate), f"program {plan.seed}, smaller")
        if found.failed and found.mark == result.mark:
            plan, result = candidate, found
            return True
        return False

    for strategy in STRATEGIES:
        if f": {strategy}, " in result.failed:
            fails(replace(plan, only=strategy))
    # Round and round through the candidates, until none of a whole round fails.
    while (candidates := list(smaller(plan))) and tried >= 0 and time.monotonic() < deadline:
        for i in range(len(candidates)):
            if fails(candidates[(tried + i) % len(candidates)]):
                tried += i
                break
            if time.monotonic() > deadline:
                break
        else:
            tried = -1
    return plan, result


def report(plan: Plan, result: Result) -> str:
    """A failure and its program, to paste."""
    return f"seed {plan.seed}: {result.failed}\n\n{'#' * 80}\n{render(plan)}{'#' * 80}"
