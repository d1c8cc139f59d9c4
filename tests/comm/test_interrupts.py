"""Ctrl-C that comes while the main thread waits for another rank, as the watcher finds it out."""

import os
import signal
import time

import pytest

from fshard.comm.groups import ChainEntry, PendingCollective
from fshard.comm.interrupts import Interrupts


def wait_since(since):
    return PendingCollective(None, None, None, ChainEntry(1, 0, ""), since=since)


@pytest.fixture
def ends():
    """The file that signals were written to before, and where its bytes come out."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write)
    yield write, read
    signal.set_wakeup_fd(before)
    os.close(read)
    os.close(write)


def press(interrupts, number=signal.SIGINT):
    """Write a signal's number, as Python does when it comes."""
    os.write(interrupts._write_end, bytes([number]))


def test_a_wait_is_interrupted_if_it_began_before_ctrl_c_or_goes_on_after_it(ends):
    interrupts = Interrupts()
    interrupts.listen()
    long = wait_since(time.monotonic())
    assert not interrupts.has_come(long)
    # It may have begun after the signal came: another look decides.
    for goes_on in (True, False):
        press(interrupts)
        assert not interrupts.has_come(long)
        assert interrupts.has_come(long if goes_on else wait_since(time.monotonic())) is goes_on
        assert not interrupts.has_come(long)
    press(interrupts, signal.SIGUSR1)
    assert not interrupts.has_come(long)
    interrupts.close()


def test_what_python_has_handled_or_the_program_handles_is_left_to_them(ends):
    interrupts = Interrupts()
    interrupts.listen()
    long = wait_since(time.monotonic())
    assert not interrupts.has_come(long)
    press(interrupts)
    # The next call begins.
    interrupts.listen()
    assert not any(interrupts.has_come(long) for _ in range(2))
    press(interrupts)
    assert not any(interrupts.has_come(place) for place in (None, long))
    handler = signal.signal(signal.SIGINT, lambda *_: None)
    press(interrupts)
    assert not any(interrupts.has_come(long) for _ in range(2))
    signal.signal(signal.SIGINT, handler)
    interrupts.close()


def test_signals_are_passed_on_to_those_who_listened_before(ends):
    write, read = ends
    interrupts = Interrupts()
    interrupts.listen()
    press(interrupts, signal.SIGUSR1)
    interrupts.has_come(None)
    assert os.read(read, 10) == bytes([signal.SIGUSR1])
    interrupts.close()
    assert signal.set_wakeup_fd(write) == write
