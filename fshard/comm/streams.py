"""Streams of an accelerator, and the memory of one stream that another one reads."""

from collections.abc import Iterable
from functools import cache

import torch

from fshard import _compat


def current_stream(device: torch.device) -> torch.Stream | None:
    """Find the stream that works are queued on; None on a processor, and in a trace, whose graph runs on one stream."""
    if device.type in ("cpu", "meta") or _compat.is_tracing():
        return None
    return torch.accelerator.current_stream(device)


def copy_stream(device: torch.device) -> torch.Stream | None:
    """Find the stream on which copies run beside what computes: one for each device; None as for `current_stream`."""
    current = current_stream(device)
    # The device of a stream has an index, by which streams are kept.
    return current and _make_stream(current.device)


_make_stream = cache(torch.Stream)


def keep_for_current(tensors: Iterable[torch.Tensor], made_on: torch.Stream | None) -> None:
    """Keep the memory of tensors of another stream until the current one has run what it was given so far.

    Otherwise the stream that made them could write to their memory as soon as nobody holds them.

    Args:
        tensors: Tensors that the current stream reads, or that work reads which the current stream waits for.
        made_on: The stream on which they were made; None as for `current_stream`.
    """
    if made_on is None:
        return
    current = torch.accelerator.current_stream(made_on.device)
    if current == made_on:
        return
    for tensor in tensors:
        tensor.record_stream(current)
