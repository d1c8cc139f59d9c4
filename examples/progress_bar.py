"""Show how far a loop is: by a bar of tqdm on a terminal, and by a line every ten seconds in a log."""

import sys
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Self, TextIO

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None

SECONDS_ON_A_TERMINAL = 0.5
SECONDS_IN_A_LOG = 10.0


class Lines:
    """A stream for tqdm that writes every state of a bar on a line of its own."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> None:
        # tqdm begins a state with a carriage return, pads it with spaces, and ends the last one with a new line.
        line = text.strip()
        if line:
            self.stream.write(line + "\n")

    def flush(self) -> None:
        self.stream.flush()


class NoBar:
    """Takes the place of a bar where tqdm is not installed, and shows nothing."""

    def __init__(self, steps: Iterable[Any] | None) -> None:
        self.steps = steps

    def __iter__(self) -> Iterator[Any]:
        return iter(self.steps or ())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pass

    def update(self) -> None:
        pass

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        pass


def progress(
    steps: Iterable[Any] | None,
    description: str,
    *,
    shown: bool,
    total: int | None = None,
    first: int = 0,
    unit: str = "step",
) -> Any:
    """Put a bar before a loop over steps, or make one for `update` if steps is None.

    Pass `shown` as `mesh.get_rank() == 0`, so that one rank shows the bar. `set_postfix_str(text, refresh=False)` adds
    a text to what is shown next.
    """
    if tqdm is None:
        return NoBar(steps)
    stream, seconds = sys.stderr, SECONDS_ON_A_TERMINAL
    if not stream.isatty():
        stream, seconds = Lines(stream), SECONDS_IN_A_LOG
    # With miniters=1 tqdm looks at the clock after every step, and does not guess how many steps take that long.
    return tqdm(
        steps,
        description,
        total,
        initial=first,
        unit=unit,
        file=stream,
        mininterval=seconds,
        miniters=1,
        disable=not shown,
    )
