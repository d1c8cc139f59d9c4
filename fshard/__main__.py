"""python -m fshard: versions, devices and a self-test on two ranks, to send with a report of a bug."""

import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist

from fshard.gather import gather
from fshard.mesh import init_mesh
from fshard.optim.from_torch import from_torch
from fshard.rounding import tolerance
from fshard.shard import shard, unshard
from fshard.testing import Workers, spmd
from fshard.transforms.strategies import zero3
from fshard.tree import Tree, tree_leaves
from fshard.update import TrainState, update
from fshard.value_and_grad import value_and_grad

STEPS, WIDTH = 5, 64


def main() -> int:
    """Print versions and devices, and run the self-test.

    Returns:
        The exit code: 0, or 1 if the self-test fails.
    """
    for name in ("fshard", "torch", "optree", "numpy"):
        _print(name, _version(name))
    _print("python", f"{platform.python_version()} on {platform.platform()} ({sys.executable})")
    _print("backends", ", ".join(name for name in ("gloo", "nccl", "xccl") if dist.is_backend_available(name)))
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    _print("accelerators", f"{torch.accelerator.device_count()} of {accelerator.type}" if accelerator else "none")
    try:
        self_test()
    except Exception as error:
        _print("self-test", f"failed: {type(error).__name__}: {error}")
        return 1
    _print("self-test", f"passed: {STEPS} steps of zero3 on 2 processes equal those of one")
    return 0


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        # As fshard itself, where it runs from a checkout.
        return "not installed as a package"


def _print(name: str, value: str) -> None:
    print(f"{name:<14}{value}")


def self_test() -> None:
    """Train on two processes and on one rank.

    Raises:
        AssertionError: if parameters differ by more than rounding.
        RankError: if a rank fails.
    """
    (alone,) = spmd(_train, 1)
    with Workers(2) as workers:
        for params in spmd(_train, workers):
            # A gradient adds up a term for each row of a batch, and each step hands on what the one before had.
            scale = max(float(leaf.abs().max()) for leaf in tree_leaves(alone))
            atol = tolerance(torch.float64, terms=WIDTH, scale=scale, steps=STEPS)
            torch.testing.assert_close(params, alone, rtol=0.0, atol=atol)


def _train() -> Tree:
    """Train on the same batches, of which each rank has a part, and return the full parameters."""
    mesh, draw = init_mesh({"shard": -1}, device="cpu"), torch.Generator().manual_seed(0)
    weight, *batches = torch.randn(STEPS + 1, WIDTH, WIDTH, generator=draw, dtype=torch.float64)
    tx = from_torch(torch.optim.AdamW, lr=1e-2)
    state = TrainState.create(shard({"w": weight / 8}, zero3(mesh)), tx)

    def loss_fn(params: Tree, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ gather(params)["w"]) - x.sin()).square().mean()

    for batch in batches:
        _, grads = value_and_grad(loss_fn)(state.params, batch.chunk(mesh.size())[mesh.get_rank()])
        state = update(tx, state, grads)
    return unshard(state.params)


if __name__ == "__main__":
    sys.exit(main())
