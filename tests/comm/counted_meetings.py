"""Ranks that make a mesh and count what it costs them, for test_many_ranks.py."""

import json
import os
import resource
import sys
import threading
from collections import Counter
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import fshard as fs
from fshard._compat.collectives import _open_sockets

REQUESTS = ("set", "get", "add", "wait", "check", "compare_set", "multi_get", "multi_set", "delete_key", "append")
STORES = (dist.Store, dist.PrefixStore, dist.TCPStore)


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


def sum_over(mesh: DeviceMesh) -> None:
    """Send something over each axis; nobody ends its connections before all are here."""
    for name in mesh.mesh_dim_names:
        fs.psum(torch.ones(()), fs.axis_of(mesh, name))


def print_costs_of_meshes(shape: str) -> None:
    """Make meshes: the first of a run, the same, and one with groups of its own.

    Print how many sockets the first one opens, and what each asks of the store.
    """
    requests = Counter[str]()
    count_requests(requests)
    before = len(_open_sockets())
    for number, timeout in enumerate((60.0, 60.0, 59.0)):
        requests.clear()
        mesh = fs.init_mesh(json.loads(shape), device="cpu", timeout=timeout)
        if number == 0:
            print(len(_open_sockets()) - before)
        print(sum(requests.values()))
        sum_over(mesh)


def print_limits(victim: int, soft: int, hard: list[int]) -> None:
    """Make meshes, each with another limit of open files on one rank; print the errors, and the limit at the end.

    A process may lower its hard limit alone, so the first mesh is checked against a function that tells a lower one.
    """
    is_victim = int(os.environ["RANK"]) == victim
    if is_victim:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard[-1]))
    limits = resource.getrlimit
    for each in hard:
        resource.getrlimit = lambda kind, each=each: (soft, each) if is_victim else limits(kind)
        try:
            sum_over(fs.init_mesh({"a": 2, "b": -1}, device="cpu"))
            print("none")
        except ValueError as error:
            print(error)
    print(*limits(resource.RLIMIT_NOFILE))
