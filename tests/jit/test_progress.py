"""The line by which a long trace shows on a terminal that it goes on."""

import io
import sys
import threading

import pytest
import torch

import fshard as fs
from fshard.jit import progress
from fshard.testing import spmd

SHOWN = "\rfs.jit: tracing train_step ... "


class Terminal(io.StringIO):
    """A standard error that is a terminal, and says when something is written to it."""

    def __init__(self, *, is_terminal=True):
        super().__init__()
        self.is_terminal = is_terminal
        self.written = threading.Event()

    def isatty(self):
        return self.is_terminal

    def write(self, text):
        super().write(text)
        self.written.set()
        return len(text)


def list_progress_threads():
    return [thread for thread in threading.enumerate() if thread.name == progress.THREAD_NAME]


def make_terminal(monkeypatch, **options):
    terminal = Terminal(**options)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "SECONDS", 0.01)
    return terminal


def test_a_long_trace_says_so_until_it_ends(monkeypatch):
    terminal = make_terminal(monkeypatch)

    def train_step(x):
        y = x.sin()
        # The first of these writes may have counted before the operator was recorded.
        for _ in range(2):
            terminal.written.clear()
            assert terminal.written.wait(60)
        return y

    step = fs.jit(train_step)
    step(torch.ones(2))
    *_, line = terminal.getvalue().removesuffix("\n").split("\r")
    assert f"\r{line}".startswith(SHOWN)
    assert line.endswith(" nodes")
    # The input and the operator.
    assert int(line.split()[-2]) >= 2
    assert terminal.getvalue().count("\n") == 1
    assert not list_progress_threads()
    # Another call of the graph has nothing to say.
    shown = terminal.getvalue()
    step(torch.ones(2))
    assert terminal.getvalue() == shown


def test_a_trace_that_fails_ends_its_line(monkeypatch):
    terminal = make_terminal(monkeypatch)

    def train_step(x):
        assert terminal.written.wait(60)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fs.jit(train_step)(torch.ones(2))
    assert terminal.getvalue().startswith(SHOWN)
    assert terminal.getvalue().endswith(" nodes\n")
    assert not list_progress_threads()


def test_a_short_trace_is_silent(monkeypatch):
    terminal = make_terminal(monkeypatch)
    monkeypatch.setattr(progress, "SECONDS", 600)
    threads = []

    def train_step(x):
        threads.extend(list_progress_threads())
        return x.sin()

    fs.jit(train_step)(torch.ones(2))
    assert len(threads) == 1
    assert terminal.getvalue() == ""
    assert not list_progress_threads()


def test_without_a_terminal_nothing_is_said(monkeypatch):
    terminal = make_terminal(monkeypatch, is_terminal=False)
    threads = []

    def train_step(x):
        threads.extend(list_progress_threads())
        return x.sin()

    fs.jit(train_step)(torch.ones(2))
    monkeypatch.setattr(sys, "stderr", None)
    fs.jit(train_step)(torch.ones(2))
    assert not threads
    assert terminal.getvalue() == ""


def test_rank_0_alone_says_it(monkeypatch):
    make_terminal(monkeypatch)

    def count_threads():
        mesh = fs.init_mesh({"shard": -1}, device="cpu")
        counts = []

        def train_step(x):
            # One rank at a time traces.
            counts.append(len(list_progress_threads()))
            return x.sin()

        fs.jit(train_step)(torch.ones(2))
        return mesh.get_rank(), counts

    assert spmd(count_threads, 2) == [(0, [1]), (1, [0])]
