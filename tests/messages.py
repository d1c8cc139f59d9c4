"""Counts the messages that simulated ranks send each other."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from fshard import _compat
from fshard.comm import recorder


class Messages(list[int]):
    """The bytes of each message that was sent, by all ranks."""


@contextmanager
def counted_messages() -> Iterator[Messages]:
    """Count messages in the context; a rank that is sent no bytes is sent no message."""
    messages = Messages()
    start_swap = _compat.start_swap
    swap_in_rounds = recorder.swap_in_rounds

    def start_and_count(pair, name, send, receive, tag):
        messages.extend(len(row) for row in send.values() if len(row))
        return start_swap(pair, name, send, receive, tag)

    def swap_and_count(issued, known, merge):
        def count_and_merge(known, message):
            messages.append(len(message))
            return merge(known, message)

        return swap_in_rounds(issued, known, count_and_merge)

    with (
        mock.patch.object(_compat, "start_swap", start_and_count),
        mock.patch.object(recorder, "swap_in_rounds", swap_and_count),
    ):
        yield messages
