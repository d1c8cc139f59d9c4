"""Ctrl-C that comes while the main thread waits for another rank, as the watcher finds it out."""

import os
import signal
import threading

import pytest

from fshard.comm.interrupts import Interrupts


@pytest.fixture(autouse=True)
def nobody_listens():
    before = signal.set_wakeup_fd(-1)
    yield
    signal.set_wakeup_fd(before)


@pytest.fixture
def interrupts(nobody_listens):
    """One that listens."""
    interrupts = Interrupts()
    interrupts.listen()
    yield interrupts
    interrupts.stop()


def press(interrupts, number=signal.SIGINT):
    """Write a signal's number, as Python does when it comes."""
    os.write(interrupts._write_end, bytes([number]))


def test_ctrl_c_is_heard_once_and_no_other_signal(interrupts):
    assert not interrupts.has_come()
    press(interrupts)
    press(interrupts)
    assert interrupts.has_come()
    assert not interrupts.has_come()
    press(interrupts, signal.SIGUSR1)
    assert not interrupts.has_come()


def test_what_python_has_handled_or_the_program_handles_is_left_to_them(interrupts):
    press(interrupts)
    # The next call begins.
    interrupts.listen()
    assert not interrupts.has_come()
    handler = signal.signal(signal.SIGINT, lambda *_: None)
    press(interrupts)
    assert not interrupts.has_come()
    signal.signal(signal.SIGINT, handler)
    assert not interrupts.has_come()
    interrupts.stop()
    assert signal.set_wakeup_fd(-1) == -1


def test_those_who_listened_before_hear_all_signals():
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    interrupts = Interrupts()
    interrupts.listen()
    assert signal.set_wakeup_fd(write) == write
    interrupts.stop()
    assert signal.set_wakeup_fd(-1) == write
    os.close(read)
    os.close(write)


def test_a_signal_is_heard_by_one_who_listens_and_its_pipe_ends_with_it():
    interrupts = Interrupts()
    ends = interrupts._read_end, interrupts._write_end
    interrupts.listen()
    handler = signal.signal(signal.SIGINT, lambda *_: None)
    os.kill(os.getpid(), signal.SIGINT)
    signal.signal(signal.SIGINT, handler)
    interrupts.stop()
    assert interrupts.has_come()
    del interrupts
    for end in ends:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(end)


def test_one_who_has_closed_the_file_that_signals_go_to_stops_no_call():
    interrupts = Interrupts()
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    os.close(write)
    os.close(read)
    interrupts.listen()
    interrupts.stop()
    assert signal.set_wakeup_fd(-1) == -1


def test_a_call_of_another_thread_does_not_end_that_of_the_main_thread(interrupts):
    errors = []

    def stop():
        try:
            interrupts.stop()
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=stop)
    thread.start()
    thread.join()
    assert not errors
    assert signal.set_wakeup_fd(-1) == interrupts._write_end
