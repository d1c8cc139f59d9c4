"""What ranks send over the mesh of an accelerator, whose backend sends itself: they have links alone.

Run by torchrun, with the library of the device and the file of the results.
"""

import json
import os
import sys
from pathlib import Path

import torch

import fshard as fs
from fshard import comm
from tests.accelerator import emu


def send_all_ways(axis, device):
    """Send tensors of a device in every way; returns the results on the processor."""
    rank = fs.axis_index(axis)
    values = torch.arange(6.0, device=device).reshape(2, 3) + 10 * rank
    results = [
        *comm.all_gather([values, torch.ones(0, device=device)], axis, "gathered"),
        *comm.all_reduce([values], axis, "sums"),
        *comm.start_all_reduce([values], axis, "sums in a tree", in_tree=True)(),
        *comm.reduce_scatter([values], axis, "scattered"),
        *comm.start_reduce_scatter([values], axis, "scattered in a tree", in_tree=True)(),
        *comm.all_to_all([values], *([1, 1], [1, 1]), axis, "rows"),
        # Rank 0 sends rank 1 both of its rows, and gets none.
        *comm.all_to_all([values], *(([0, 2], [0, 0]) if rank == 0 else ([0, 2], [2, 2])), axis, "all rows"),
    ]
    return [result.tolist() for result in results]


def main(library: str, path: str) -> None:
    emu.load(Path(library))
    mesh = fs.init_mesh({"shard": -1}, device="emu", timeout=30.0)
    axis = fs.axis_of(mesh)
    group = comm.rank_state().groups[axis.group_name]
    results = {device: send_all_ways(axis, device) for device in ("cpu", "emu")}
    results["objects"] = comm.all_gather_object(fs.axis_index(axis), [axis], "values")
    results["has pair"] = group.pair is not None
    fs.init_mesh({"shard": -1}, device="cpu", timeout=30.0)
    results["again"] = send_all_ways(axis, "cpu")
    Path(f"{path}.{os.environ['RANK']}").write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
