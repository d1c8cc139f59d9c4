"""Ranks that make a mesh and count what it costs them, for test_many_ranks.py."""

import json
import os
import stat

import torch

import fshard as fs


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
