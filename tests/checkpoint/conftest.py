"""Fixtures of the tests of checkpoints."""

import os
import threading

import pytest

from fshard.checkpoint import files
from tests.checkpoint.states import SECONDS


@pytest.fixture(autouse=True)
def synced(monkeypatch, request):
    """The files that were synced, by name, in order; nothing waits for the disk, which outlives each test."""
    names = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: names.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    return names


@pytest.fixture
def held(monkeypatch):
    """Writes wait until the event is set, before they read a tensor."""
    event, bytes_of = threading.Event(), files.bytes_of
    monkeypatch.setattr(files, "bytes_of", lambda tensor: event.wait(SECONDS) and bytes_of(tensor))
    yield event
    event.set()
