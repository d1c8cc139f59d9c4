"""python -m fshard: versions, devices and a self-test on two ranks, to send with a report of a bug.

python -m fshard            # versions and devices, then the test
python -m fshard --no-test  # versions and devices alone
"""

import argparse
import os
import platform
import sys
import time
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist

from fshard.gather import gather
from fshard.mesh import Mesh, init_mesh
from fshard.optim.native import adamw, clip_by_global_norm
from fshard.shard import shard, unshard
from fshard.testing import Workers, assert_trees_close, spmd
from fshard.transforms.strategies import zero3
from fshard.tree import Tree
from fshard.update import TrainState, chain, update
from fshard.value_and_grad import value_and_grad

PACKAGES = ("fshard", "torch", "optree", "numpy")
# What the tests run on; others may work.
TESTED_TORCH, TESTED_PYTHON = "2.13", "3.11"
STEPS, WIDTH = 5, 64


def main(arguments: list[str] | None = None) -> int:
    """Print versions and devices, and run the self-test.

    Args:
        arguments: Those of the command line; None reads them there.

    Returns:
        The exit code: 0, or 1 if the self-test fails.
    """
    parser = argparse.ArgumentParser("python -m fshard", description="Versions, devices and a self-test on two ranks.")
    parser.add_argument("--no-test", action="store_true", help="leave out the self-test")
    args = parser.parse_args(arguments)
    for name, value in circumstances().items():
        print(f"{name:<14}{value}")
    if args.no_test:
        return 0
    start = time.perf_counter()
    try:
        distance = self_test()
    except Exception as error:
        print(f"{'self-test':<14}failed: {type(error).__name__}: {error}")
        return 1
    seconds = time.perf_counter() - start
    print(f"{'self-test':<14}passed in {seconds:.0f} s: {STEPS} steps of zero3 on 2 processes equal those of one,")
    print(f"{'':<14}with a largest difference of {distance:.1e} in a parameter (float64)")
    return 0


def circumstances() -> dict[str, str]:
    """List versions and devices.

    Returns:
        What there is, by a name.
    """
    found = {name: _version(name) for name in PACKAGES}
    found["torch"] += _untested(torch.__version__, TESTED_TORCH)
    python = platform.python_version()
    found["python"] = f"{python} ({sys.executable}){_untested(python, TESTED_PYTHON)}"
    found["platform"] = platform.platform()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found["processors"] = f"{cores} cores, {torch.get_num_threads()} threads of torch"
    backends = ("gloo", "nccl", "xccl", "mpi", "ucc")
    found["backends"] = ", ".join(name for name in backends if dist.is_backend_available(name)) or "none"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if accelerator else 0
    found["accelerators"] = f"{count} of {accelerator.type}" if accelerator else "none"
    return found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _untested(found: str, tested: str) -> str:
    return "" if found.startswith(f"{tested}.") else f", where the tests run on {tested}: run `make test`"


def self_test() -> float:
    """Train on two processes and in this one.

    Returns:
        The largest difference between parameters.

    Raises:
        AssertionError: if they differ by more than rounding.
        RankError: if a rank fails.
    """
    alone = trained()
    with Workers(2) as workers:
        found, other = spmd(trained_on_ranks, workers)
    for params in (found, other):
        assert_trees_close(params, alone, rtol=0.0, atol=1e-12)
    return max(float((found[name] - alone[name]).abs().max()) for name in alone)


def trained_on_ranks() -> Tree:
    """Train sharded, as a rank's program."""
    return trained(init_mesh({"shard": -1}, device="cpu"))


def trained(mesh: Mesh | None = None) -> Tree:
    """Train from the same parameters on the same batches, of which each rank has a part.

    Args:
        mesh: The ranks; None trains full parameters in this process.

    Returns:
        The full parameters in the end.
    """
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    params: Tree = {"up": draw(WIDTH, WIDTH) / 8, "down": draw(WIDTH, WIDTH) / 8}
    rank, ranks = (0, 1) if mesh is None else (mesh.get_rank(), mesh.size())
    tx = chain(clip_by_global_norm(0.1), adamw(1e-2))
    state = TrainState.create(params if mesh is None else shard(params, zero3(mesh)), tx)

    def loss_fn(params: Tree, x: torch.Tensor) -> torch.Tensor:
        full = gather(params)
        return (torch.tanh(x @ full["up"]) @ full["down"] - x.sin()).square().mean()

    for _ in range(STEPS):
        x = draw(8, WIDTH).chunk(ranks)[rank]
        _, grads = value_and_grad(loss_fn)(state.params, x)
        state = update(tx, state, grads)
    return unshard(state.params)


if __name__ == "__main__":
    sys.exit(main())
