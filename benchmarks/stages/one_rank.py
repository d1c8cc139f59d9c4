"""Versions; the program of the README; strategies on one rank against plain torch; the self-test."""

import copy
import importlib.metadata
import itertools
import platform
import re
import subprocess
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F

import fshard as fs
from stages import ROOT, Findings, Place, reported


def versions(place: Place) -> Findings:
    """Versions, the device, and that fshard imports."""
    on_cuda = not place.is_rehearsal
    yield {
        "name": "versions",
        "passed": True,
        "torch": torch.__version__,
        "optree": importlib.metadata.version("optree"),
        "python": platform.python_version(),
        "fshard": fs.__version__,
        "device": torch.cuda.get_device_name() if on_cuda else place.device,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_cuda else None,
    }


def one_rank(place: Place) -> Findings:
    """The program of the README as printed, then each strategy against plain torch."""
    with reported("README") as row:
        row |= readme(place)
    yield row
    yield from plain_torch(place)


def readme(place: Place) -> dict[str, Any]:
    """Run the first program of the README; where its parameters lie."""
    program = re.findall(r"```python\n(import.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    scope: dict[str, Any] = {}
    start = time.perf_counter()
    exec(program.replace("range(200)", "range(20)"), scope)
    kinds = sorted({leaf.device.type for leaf in fs.tree_leaves(scope["params"])})
    return {
        "passed": kinds == [place.device],
        "parameters on": kinds,
        "loss": scope["loss"].item(),
        "seconds": time.perf_counter() - start,
        "mesh": str(scope["mesh"]),
        "default": str(torch.accelerator.current_accelerator()),
    }


class Block(torch.nn.Sequential):
    """A unit of the model that is compared with plain torch."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))


def small_model(place: Place) -> torch.nn.Module:
    """A model of bytes."""
    torch.manual_seed(0)
    layers = [torch.nn.Embedding(256, 64), Block(), Block(), torch.nn.Linear(64, 256)]
    return torch.nn.Sequential(*layers).to(place.device)


def batches_of(place: Place, number: int) -> torch.Tensor:
    """Batches of bytes: (number, rows, time)."""
    return torch.randint(256, (number, 8, 64), generator=torch.Generator().manual_seed(1)).to(place.device)


def next_bytes_loss(out: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.flatten(0, 1), rows[:, 1:].flatten())


def trained_by_torch(module: torch.nn.Module, batches: torch.Tensor, fused: bool) -> list[float]:
    """Train a module in place; return the losses."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3, fused=fused)
    losses = []
    for rows in batches:
        optimizer.zero_grad()
        loss = next_bytes_loss(module(rows[:, :-1]), rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained_by_fshard(
    module: torch.nn.Module,
    batches: torch.Tensor,
    fused: bool,
    strategy: fs.ShardTransform,
    mode: str,
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train a model of a module, eager, jitted or donated; return the full parameters and the losses."""
    model = fs.functionalize(module, units=Block)
    tx = fs.chain(fs.clip_by_global_norm(1.0), fs.from_torch(torch.optim.AdamW, lr=3e-3, fused=fused))
    state = fs.TrainState.create(model.init(strategy), tx)

    def loss_fn(params: Any, rows: torch.Tensor) -> torch.Tensor:
        return next_bytes_loss(model.apply(params, rows[:, :-1]), rows)

    def step(state: fs.TrainState, rows: torch.Tensor) -> tuple[fs.TrainState, torch.Tensor]:
        loss, grads = fs.value_and_grad(loss_fn)(state.params, rows)
        return fs.update(tx, state, grads), loss

    run = step if mode == "eager" else fs.jit(step, donate_argnums=0 if mode == "donated" else ())
    losses = []
    for rows in batches:
        state, loss = run(state, rows)
        losses.append(loss.item())
    return fs.unshard(state.params), losses


def plain_torch(place: Place) -> Findings:
    """Each strategy on one rank against plain torch on the same device: losses and parameters, bit for bit."""
    module = small_model(place)
    batches = batches_of(place, 5)
    mesh = fs.init_mesh({"shard": -1}, device=place.device)
    for fused in (False, True):
        trained = copy.deepcopy(module)
        expected = trained_by_torch(trained, batches, fused)
        for strategy, mode in itertools.product((fs.ddp, fs.zero1, fs.zero2, fs.zero3), ("eager", "jitted", "donated")):
            with reported(f"{strategy.__name__}, fused={fused}, {mode}") as row:
                full, losses = trained_by_fshard(module, batches, fused, strategy(mesh), mode)
                row["differs by"] = max((full[n] - p).abs().max().item() for n, p in trained.named_parameters())
                row["passed"] = row["differs by"] == 0 and losses == expected
            yield row


def simulated_program() -> tuple[str, float, float]:
    mesh = fs.init_mesh({"shard": -1})
    params = fs.shard({"w": torch.arange(4096.0).reshape(64, 64)}, fs.zero3(mesh))
    x = torch.ones(4, 64, device=mesh.device_type)
    loss, grads = fs.value_and_grad(lambda p: (x @ fs.gather(p)["w"]).square().mean())(params)
    return mesh.device_type, loss.item(), fs.unshard(grads)["w"].norm().item()


def self_test(place: Place) -> Findings:
    """Simulated ranks, threads of one process, on the default device; then `python -m fshard`."""
    with reported("simulated ranks") as row:
        results = fs.testing.spmd(simulated_program, world=4)
        row["passed"] = len(set(results)) == 1
        row["results"] = results[0]
    yield row
    done = subprocess.run([sys.executable, "-m", "fshard"], cwd=ROOT, capture_output=True, text=True)
    yield {"name": "python -m fshard", "passed": done.returncode == 0, "output": done.stdout + done.stderr[-500:]}
