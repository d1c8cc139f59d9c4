"""Progress: a line on a terminal, by which a long trace shows that it goes on."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# How long a trace is silent, and between two changes of its line.
SECONDS = 2.0
THREAD_NAME = "fshard progress"


@contextmanager
def show_progress(name: str, count_nodes: Callable[[], int], rank: int) -> Iterator[None]:
    """Say while a long trace runs what is traced, on rank 0 and if standard error is a terminal.

    Args:
        name: The name of the function that is traced.
        count_nodes: Counts the nodes that have been recorded; called in another thread.
        rank: The number of this rank.

    Yields:
        Nothing.
    """
    stream = sys.stderr
    # A process that was started without a standard error has None there.
    if rank != 0 or stream is None or not stream.isatty():
        yield
        return
    ended = threading.Event()

    def show() -> None:
        is_shown = False
        while not ended.wait(SECONDS):
            stream.write(f"\rfs.jit: tracing {name} ... {count_nodes()} nodes")
            stream.flush()
            is_shown = True
        if is_shown:
            stream.write("\n")
            stream.flush()

    thread = threading.Thread(target=show, name=THREAD_NAME, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
