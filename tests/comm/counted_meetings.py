"""Ranks that make a mesh and count what it costs them, for test_many_ranks.py."""

import json
import os
import resource
import stat
import sys
import threading
from collections import Counter
from functools import partial

import torch
import torch.distributed as dist

import fshard as fs

REQUESTS = ("set", "get", "add", "wait", "check", "compare_set", "multi_get", "multi_set", "delete_key", "append")
STORES = (dist.Store, dist.PrefixStore, dist.TCPStore)


def count_sockets() -> int:
    sockets = 0
    for name in os.listdir("/dev/fd"):
        try:
            sockets += stat.S_ISSOCK(os.fstat(int(name)).st_mode)
        except OSError:
            # The descriptor of the listing itself has gone.
            continue
    return sockets


def print_sockets(shape: str) -> None:
    """Make the first mesh of a run, and print how many sockets that has opened."""
    before = count_sockets()
    mesh = fs.init_mesh(json.loads(shape), device="cpu")
    print(count_sockets() - before)
    # Nobody ends its connections before all have counted.
    for name in mesh.mesh_dim_names:
        fs.psum(torch.ones(()), fs.axis_of(mesh, name))


def count_requests(requests: Counter[str]) -> None:
    """Count the requests to stores that functions of fshard make; those of torch and gloo are not counted.

    A rank that waits for long asks again, and looks at the others from another thread; both are left out.
    """

    def run(method, *args, **kwargs):
        # Behind the method below.
        caller = sys._getframe(2)
        is_first = method.__name__ != "wait" or not requests["wait"]
        is_main = threading.current_thread() is threading.main_thread()
        if caller.f_globals["__name__"].startswith("fshard") and is_main and is_first:
            requests[method.__name__] += 1
        return method(*args, **kwargs)

    for store in STORES:
        for name in REQUESTS:
            if name in vars(store):
                # A function is bound to its store as a method is.
                counted = partial(run, getattr(store, name))
                setattr(store, name, lambda *args, counted=counted, **kwargs: counted(*args, **kwargs))


def print_requests(shape: str) -> None:
    """Make meshes: the first of a run, the same, and one with groups of its own; print what each asks of the store."""
    requests = Counter[str]()
    count_requests(requests)
    for timeout in (60.0, 60.0, 59.0):
        requests.clear()
        mesh = fs.init_mesh(json.loads(shape), device="cpu", timeout=timeout)
        print(sum(requests.values()))
        for name in mesh.mesh_dim_names:
            fs.psum(torch.ones(()), fs.axis_of(mesh, name))


def print_limits(victim: int, soft: int, hard: int) -> None:
    """Make a mesh, with another limit of open files on one rank; print the error and the limit."""
    if int(os.environ["RANK"]) == victim:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        mesh = fs.init_mesh({"a": 2, "b": -1}, device="cpu")
        for name in mesh.mesh_dim_names:
            fs.psum(torch.ones(()), fs.axis_of(mesh, name))
        print("none")
    except ValueError as error:
        print(error)
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))
