"""What simulated ranks do without kills, whose bits are those of processes."""

import threading
import time

import torch.distributed as dist

from fshard.testing import spmd
from tests.ext.recovery import kills, program
from tests.ext.recovery.launch import Event


class Recorder:
    """Takes the events of simulated ranks."""

    def __init__(self, ledger):
        self._ledger = ledger
        self._lock = threading.Lock()

    def write(self, name, **values):
        rank = dist.get_rank()
        with self._lock:
            self._ledger.add(Event(rank, rank, name, time.monotonic(), values))


def simulate(ranks, form, steps, directory, *options):
    """What simulated ranks do without kills, whose bits are those of processes."""
    ledger = kills.Ledger(ranks, {})
    args = program.parse_args(["", f"{directory}", "--steps", f"{steps}", "--every", "1000", "--form", form, *options])
    spmd(lambda: program.train(args, Recorder(ledger)), ranks)
    return ledger
