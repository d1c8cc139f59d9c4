"""What ranks do that keep generations in memory until one of them is killed, for test_generations_killed.py.

Each writes lines: "restored" and a step at its start, and "saved" and a step when `save` has returned.
"""

import os
import signal
from datetime import timedelta

import torch
import torch.distributed as dist

import fshard as fs
from fshard import checkpoint
from fshard.ext.memory import generations, slots
from tests.checkpoint.saving_process import mesh, state, write_line
from tests.checkpoint.states import assert_same, zeros_like

# Calls in which a rank is killed: in the middle of the first two, before or after the others.
PHASES = {
    "open": (slots, "_allocate"),
    "copy": (slots, "copy_into"),
    "mark": (slots.SlotWriter, "_put"),
    "agree": (generations, "make_private"),
    "find": (slots, "list_parts"),
    "read": (slots.SlotPart, "read"),
}


def kill_in(phase, is_due):
    """Kill this process in a call of a phase, as soon as it is due."""
    owner, name = PHASES[phase]
    call = getattr(owner, name)

    def run(*arguments, **options):
        if not is_due():
            return call(*arguments, **options)
        if phase == "copy":
            targets, tensors = arguments
            call(targets[:1], tensors[:1])
        elif phase != "read":
            call(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, run)


def run(directory, phase, victim, is_early):
    """Restore, and save step after step until the victim is killed in a phase: of its start, or after three steps."""
    os.environ["FSHARD_JOB_ID"] = "1"
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    saved = 0
    if rank == victim:
        kill_in(phase, lambda: is_early or saved >= 3)
    if ranks > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    kept = checkpoint.Manager(f"{directory}/disk", memory=f"{directory}/memory", every=10**6)
    restored = kept.restore_or(lambda: state(0))
    first = restored["step"]
    assert_same(restored, state(first))
    write_line("restored", first)
    for step in range(first + 1, 10**6):
        if ranks > 1:
            # As a step does, which needs the gradients of all ranks.
            fs.psum(torch.ones(()), fs.axis_of(mesh()))
        kept.save(state(step), step)
        saved += 1
        write_line("saved", step)


def look(directory):
    """Restore what the killed ranks have left, and end the run."""
    os.environ["FSHARD_JOB_ID"] = "1"
    with checkpoint.Manager(f"{directory}/disk", memory=f"{directory}/memory") as kept:
        step = kept.latest_step()
        assert_same(kept.restore(zeros_like(state(0))), state(step))
        write_line("restored", step)
