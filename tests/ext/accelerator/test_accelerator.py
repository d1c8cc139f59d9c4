"""A rehearsal of accelerators with the programs of extensions; a script as tests/accelerator/programs.py."""

from functools import partial

import pytest
import torch

import fshard as fs
from tests.accelerator import programs
from tests.accelerator import test_accelerator as core
from tests.accelerator.programs import SINGLE, Program, eager_and_jitted, transformed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def observed(device):
    """A trace and a plan of a step."""
    params, loss_fn = programs.modelled(device)
    step, batch = fs.value_and_grad(loss_fn), programs.batches(device)[0]
    step(params, batch)
    programs.log.take()
    with fs.trace() as trace:
        loss, _ = step(params, batch)
    assert "unit" in str(trace.report())
    fs.plan(step, params, batch, mesh={"shard": 2})
    return loss


def muon():
    matrices = ("*up.weight", "*down.weight")
    return fs.partition({matrices: fs.whole(fs.from_torch(torch.optim.Muon, lr=1e-2)), "*": fs.adam(1e-2)})


def int8(mesh, **options):
    return fs.zero3(mesh, layout=fs.quantize(mesh["shard"], **options))


# Counts of updates, which torch keeps on the processor, travel through the accelerator, and the host waits for them.
MUON = {
    name: program._replace(waits={"copy_": 2})
    for name, program in eager_and_jitted("muon", alone={"copy_": 3}, make=muon).items()
}

PROGRAMS = {
    **eager_and_jitted("lamb", make=lambda: fs.lamb(1e-2)),
    **eager_and_jitted("lars", make=lambda: fs.lars(1e-2)),
    **eager_and_jitted("adafactor", make=lambda: fs.adafactor(1e-2)),
    **MUON,
    "dynamic_loss_scale of torch": Program(
        lambda device: programs.skipped(device, fs.dynamic_loss_scale), tolerance=programs.BIAS_CORRECTION
    ),
    "int8 gathers": Program(lambda device: transformed(device, int8), tolerance=SINGLE),
    "int8 both ways": Program(
        lambda device: transformed(device, partial(int8, scatter=True), state=True), tolerance=SINGLE
    ),
    "trace, plan": Program(observed),
}

run = partial(core.run, script="tests/ext/accelerator/test_accelerator.py")


def test_all_programs_on_an_accelerator(library):
    results = run(library)
    assert list(core.faults(results, programs=PROGRAMS)) == []
    assert list(results) == list(PROGRAMS)
    alone = [name for name, program in PROGRAMS.items() if program.alone is not None]
    assert list(core.faults(run(library, "--alone", *alone), alone=True, programs=PROGRAMS)) == []


if __name__ == "__main__":
    programs.main(PROGRAMS)
