"""Ranks of which one breaks in init_mesh, for test_meeting.py and test_retry.py."""

import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import fshard as fs
from fshard import _compat, comm
from fshard.comm import connect

# Where the functions are that a rank may break in, where that is not `_compat`.
OWNERS = {
    "init_process_group": dist,
    "create_default_device": dist.ProcessGroupGloo,
    "agree": comm.Meeting,
    "connect": comm.Meeting,
    "_read": comm.Meeting,
    "_wait_for_all": connect,
}


def make(timeout: float):
    return fs.init_mesh({"a": 2, "b": -1}, device="cpu", timeout=timeout)


def break_once(place: str, breaks: Callable[[], None], behind: bool = False) -> None:
    """Let the next call of a function break, before it does anything or behind its end."""
    owner = OWNERS.get(place, _compat)
    function = getattr(owner, place)

    def run(*args, **kwargs):
        setattr(owner, place, function)
        if behind:
            function(*args, **kwargs)
        breaks()
        return function(*args, **kwargs)

    setattr(owner, place, run)


def kill(timeout: float) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang(timeout: float) -> None:
    time.sleep(timeout + 8)
    os._exit(0)


def stop(timeout: float) -> None:
    subprocess.Popen(["sh", "-c", f"sleep {timeout + 8}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def interrupt(timeout: float) -> None:
    raise KeyboardInterrupt


def use_up_files(timeout: float) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
    with suppress(OSError):
        while os.dup(0):
            pass


def fail() -> None:
    raise MemoryError("no memory")


FAULTS = {"kill": kill, "hang": hang, "stop": stop, "interrupt": interrupt, "files": use_up_files}


def break_in_last_mesh(victim: int, place: str, fault: str, meshes: int, timeout: float) -> None:
    """Make some meshes, in the last of which the victim breaks; print how long that took, and the error."""
    for _ in range(meshes - 1):
        # Of another timeout, so that the last mesh has groups of its own.
        make(60.0)
    if int(os.environ["RANK"]) == victim:
        break_once(place, lambda: FAULTS[fault](timeout))
    begin = time.monotonic()
    try:
        make(timeout)
    except BaseException as error:
        print(time.monotonic() - begin, type(error).__name__, str(error), sep="\n")


def fail_and_call_again(victim: int, places: list[str], moment: str, meshes: int) -> None:
    """Make meshes, in which the victim fails once for each place; print the errors, and what two later meshes do."""
    for _ in range(meshes):
        make(60.0)
    if int(os.environ["RANK"]) == victim:
        for place in places:
            break_once(place, fail, behind=moment == "behind")
    begin = time.monotonic()
    for _ in places:
        try:
            make(30.0)
            print("none")
        except BaseException as error:
            print(type(error).__name__, str(error).splitlines()[0])
    for _ in range(2):
        mesh = make(30.0)
        print(sum_over(mesh), len(dist.distributed_c10d._world.pg_map))
    print(time.monotonic() - begin)


def start_on_two_nodes(port: int, ranks: list[int], timeout: float) -> None:
    """Make a mesh on some ranks, as torchrun starts them on two nodes by the store of a port.

    If both are there, the last one fails at first, and they call again.
    """
    rank = int(os.environ["RANK"])
    os.environ |= {"MASTER_PORT": f"{port}", "TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_WORLD_SIZE": "2"}
    os.environ["TORCHELASTIC_RESTART_COUNT"] = f"{rank}"
    if rank not in ranks:
        return
    if rank == len(ranks) - 1 == 1:
        break_once("agree", fail)
    for _ in ranks:
        try:
            print(sum_over(fs.init_mesh({"a": -1}, device="cpu", timeout=timeout)))
        except BaseException as error:
            print(type(error).__name__, str(error).splitlines()[0])


def sum_over(mesh: DeviceMesh) -> float:
    """Count the ranks of a mesh by sums over its axes."""
    total = torch.ones(())
    for name in mesh.mesh_dim_names:
        total = fs.psum(total, fs.axis_of(mesh, name))
    return total.item()
