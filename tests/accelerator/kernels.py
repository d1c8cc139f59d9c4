"""How many kernels each layer adds to a step on the device "emu", beside those of plain PyTorch.

As a script, on each of two ranks of torchrun: `kernels.py LIBRARY RESULT`.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

import torch

import fshard as fs
from tests.accelerator import emu
from tests.launches import count_per_layer, make_plain_step, make_step

STRATEGIES = (fs.ddp, fs.zero1, fs.zero2, fs.zero3)


def main():
    library = emu.load(Path(sys.argv[1]))
    torch.set_num_threads(1)
    mesh = fs.init_mesh({"shard": -1}, device="emu")

    def count(step):
        library.take_events()
        step()
        return sum(event.startswith("run ") for event in library.take_events())

    plain = count_per_layer(partial(make_plain_step, "emu"), count)
    added = {}
    for strategy in STRATEGIES:
        for jit in (False, True):
            kernels = count_per_layer(partial(make_step, mesh, strategy, jit=jit), count)
            added[f"{strategy.__name__}{', jitted' * jit}"] = kernels - plain
    if int(os.environ["RANK"]) == 0:
        Path(sys.argv[2]).write_text(json.dumps(added))


if __name__ == "__main__":
    main()
