"""Fixtures of the tests of checkpoints."""

import os

import pytest


@pytest.fixture(autouse=True)
def synced(monkeypatch, request):
    """The files that were synced, by name, in order; nothing waits for the disk, which outlives each test."""
    names = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: names.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    return names
