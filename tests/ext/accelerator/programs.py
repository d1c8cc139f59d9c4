"""Programs of extensions that give the same numbers on the device "emu"; a script as tests/accelerator/programs.py."""

from typing import Any

import torch

import fshard as fs
from tests.accelerator.programs import (
    SINGLE,
    Program,
    main,
    optimizer_programs,
    to_observe,
    transformed,
)


def observed(device: str) -> Any:
    """A trace and a plan of a step."""
    step, params, batch = to_observe(device)
    with fs.trace() as trace:
        loss, _ = step(params, batch)
    assert "unit" in str(trace.report())
    fs.plan(step, params, batch, mesh={"shard": 2})
    return loss


PROGRAMS = {
    **optimizer_programs("lamb", lambda: fs.lamb(1e-2)),
    **optimizer_programs("lars", lambda: fs.lars(1e-2)),
    **optimizer_programs("adafactor", lambda: fs.adafactor(1e-2)),
    **optimizer_programs(
        "muon",
        lambda: fs.partition(
            {("*up.weight", "*down.weight"): fs.whole(fs.from_torch(torch.optim.Muon, lr=1e-2)), "*": fs.adam(1e-2)}
        ),
        # The counts of updates, which torch keeps on the processor, travel too.
        alone={"copy_": 2},
    ),
    "int8 gathers": Program(
        lambda device: transformed(device, lambda mesh: fs.zero3(mesh, layout=fs.quantize(mesh["shard"]))),
        tolerance=SINGLE,
    ),
    "int8 both ways": Program(
        lambda device: transformed(
            device, lambda mesh: fs.zero3(mesh, layout=fs.quantize(mesh["shard"], scatter=True)), state=True
        ),
        tolerance=SINGLE,
    ),
    "trace, plan": Program(observed),
}


if __name__ == "__main__":
    main(PROGRAMS)
