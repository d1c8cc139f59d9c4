"""Programs that run on each of two ranks, on processors and on the device "emu", and give the same numbers.

As a script, on each rank of torchrun: `programs.py LIBRARY RESULT [--alone] [NAME...]`.
"""

import argparse
import json
import os
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fshard as fs
from tests.accelerator import emu

WIDTH, CLASSES, BATCH, STEPS = 24, 7, 6, 4
EXACT, SINGLE = 1e-12, 1e-5

# `take` returns the log of the device, once there is one.
log = SimpleNamespace(take=list)


class Program(NamedTuple):
    """A program.

    Attributes:
        run: Maps a device to a tree of tensors; it drops the log before its last step.
        waits: How often the host waits for the device in the last step, by operator.
        tolerance: The largest difference between devices, relative to the largest number from 1 on of each tensor.
        alone: The same where ranks cannot send each other tensors of the processor; None where that is not run.
    """

    run: Callable[[str], Any]
    waits: dict[str, int] = {}  # noqa: RUF012
    tolerance: float = EXACT
    alone: dict[str, int] | None = None


# The status of a call, which travels with the objective.
STATUS = {"copy_": 1}


class Block(nn.Module):
    """A layer with dropout, a buffer and a norm."""

    def __init__(self, dropout: float = 0.0, remat: bool = False):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout, self.remat = nn.Dropout(dropout), remat

    def forward(self, x):
        run = lambda x: self.down(self.dropout(F.gelu(self.up(self.norm(x)))))  # noqa: E731
        return x + (checkpoint(run, x, use_reentrant=False) if self.remat else run(x))


def network(device: str, dtype: torch.dtype = torch.float64, **options: Any) -> nn.Module:
    """Make a network, the same on every rank and device."""
    torch.manual_seed(0)
    blocks = [Block(**options) for _ in range(3)]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, nn.Linear(WIDTH, CLASSES)).to(dtype).to(device)


def batches(device: str, dtype: torch.dtype = torch.float64, steps: int = STEPS) -> list[tuple[torch.Tensor, ...]]:
    """Draw this rank's batches."""
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    return [
        (
            torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64).to(dtype).to(device),
            torch.randint(CLASSES, (BATCH,), generator=generator).to(device),
        )
        for _ in range(steps)
    ]


def mesh_of(device: str) -> Any:
    return fs.init_mesh({"shard": -1}, device=device)


def train(
    device: str,
    strategy: Callable[[Any], Any] = fs.zero3,
    tx: Any = None,
    *,
    jit: bool | dict[str, Any] = False,
    donate: bool = False,
    key: bool = False,
    differentiate: Callable[..., Any] = fs.value_and_grad,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Any:
    """Train some steps; returns the losses and the state."""
    model = fs.functionalize(network(device, dtype, **options), units=Block)
    params = model.init(strategy(mesh_of(device)))
    tx = tx or fs.chain(fs.clip_by_global_norm(0.5), fs.from_torch(torch.optim.AdamW, lr=1e-2))
    state = fs.TrainState.create(params, tx, key=torch.tensor(3) if key else None)

    def loss_fn(params: Any, batch: Any, key: Any = None) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(model.apply(params, x, key=key), y)

    def step(state: Any, batch: Any) -> Any:
        keyed = {"key": fs.fold_in(state.key, state.step)} if key else {}
        loss, grads = differentiate(loss_fn)(state.params, batch, **keyed)
        return fs.update(tx, state, grads, donate=donate), loss

    run = fs.jit(step, **({} if jit is True else jit)) if jit else step
    losses = []
    for batch in batches(device, dtype):
        log.take()
        state, loss = run(state, [batch] if differentiate is not fs.value_and_grad else batch)
        losses.append(loss)
    kinds = {leaf.device.type for leaf in fs.tree_leaves(state) if leaf.dim()}
    assert kinds == {device}, f"tensors of the state are on {kinds}"
    return losses, state


def accumulated(device: str, **options: Any) -> Any:
    """Accumulate gradients of microbatches, twice."""
    model = fs.functionalize(network(device), units=Block)
    params = model.init(fs.zero3(mesh_of(device)))

    def loss_fn(params: Any, batch: Any) -> Any:
        x, y = batch
        losses = F.cross_entropy(model.apply(params, x), y, reduction="none")
        return (losses.sum(), (y >= 0).sum()) if options.get("reduce") == "weighted" else losses.mean()

    parts = batches(device)
    fs.accumulate(loss_fn, **options)(params, parts)
    log.take()
    loss, grads = fs.accumulate(loss_fn, **options)(params, parts)
    return {"loss": loss, "grads": grads}


def transformed(device: str, layout: Callable[[Any], Any], state: bool = False, jit: bool = False) -> Any:
    """Differentiate with a transform in the layout."""
    model = fs.functionalize(network(device, torch.float32), units=Block)
    params = model.init(layout(mesh_of(device)))
    memory = {"transform_state": fs.transform_state(params)} if state else {}

    def loss_fn(params: Any, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model.apply(params, batch[0]), batch[1])

    found = []
    for batch in batches(device, torch.float32):
        log.take()
        differentiate = fs.value_and_grad(loss_fn, **memory)
        run = fs.jit(differentiate) if jit else differentiate
        loss, grads, *rest = run(params, batch)
        memory = {"transform_state": rest[0]} if state else {}
        found.append([loss, grads])
    return found


def saved(device: str) -> Any:
    """A save in the background, a restore, a state dict."""
    mesh = mesh_of(device)
    model = fs.functionalize(network(device), units=Block)
    tx = fs.from_torch(torch.optim.AdamW, lr=1e-2)
    state = fs.TrainState.create(model.init(fs.zero3(mesh)), tx)
    grads = fs.tree_map(lambda leaf: leaf, state.params)
    state = fs.update(tx, state, grads)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, device=torch.device("cpu"))
    with fs.checkpoint.Manager(folder[0], keep=2, every=1) as manager:
        manager.save(state)
    with fs.checkpoint.Manager(folder[0], keep=2, every=1) as manager:
        restored = manager.restore(like=state)
    kinds = {leaf.device.type for leaf in fs.tree_leaves(restored.params)}
    assert kinds == {device}, kinds
    out = fs.unshard(restored), fs.checkpoint.to_state_dict(restored.params)
    # A state dict is on the processor.
    log.take()
    return out


def to_observe(device: str) -> Any:
    """A step that has run once, and its arguments."""
    model = fs.functionalize(network(device), units=Block)
    params = model.init(fs.zero3(mesh_of(device)))
    batch, *_ = batches(device)
    step = lambda params, batch: fs.value_and_grad(  # noqa: E731
        lambda p, b: F.cross_entropy(model.apply(p, b[0]), b[1])
    )(params, batch)
    step(params, batch)
    log.take()
    return step, params, batch


def leaves_of(tree: Any) -> list[torch.Tensor]:
    leaves = [leaf.local if isinstance(leaf, fs.Sharded) else leaf for leaf in fs.tree_leaves(tree)]
    return [leaf.detach().cpu() for leaf in leaves if isinstance(leaf, torch.Tensor)]


def optimizer_programs(name: str, make: Callable[[], Any], alone: dict[str, int] = STATUS) -> dict[str, Program]:
    """One optimizer, eager and jitted."""
    return {
        name: Program(lambda device: train(device, tx=make()), alone=alone),
        f"{name} jitted": Program(lambda device: train(device, tx=make(), jit=True)),
    }


def _strategy(strategy: Callable[[Any], Any]) -> dict[str, Program]:
    name = strategy.__name__
    return {
        name: Program(lambda device: train(device, strategy), alone=STATUS),
        f"{name} jitted": Program(lambda device: train(device, strategy, jit={"donate_argnums": 0})),
    }


PROGRAMS = {
    **{name: each for strategy in (fs.ddp, fs.zero1, fs.zero2, fs.zero3) for name, each in _strategy(strategy).items()},
    "hsdp": Program(
        lambda device: train(device, lambda _: fs.hsdp(fs.init_mesh({"replicate": 2, "shard": -1}, device=device)))
    ),
    "checkpointed": Program(lambda device: train(device, remat=True)),
    **optimizer_programs("skip_nonfinite", lambda: fs.skip_nonfinite(fs.adam(1e-2))),
    "accumulate weighted": Program(lambda device: accumulated(device, reduce="weighted"), alone=STATUS),
    # Gradients are used on the processor: one wait for each reduction.
    "offloaded": Program(
        lambda device: transformed(device, lambda mesh: fs.compose(fs.offload(device), fs.zero3(mesh))),
        {"stream": 1},
        SINGLE,
    ),
    "checkpoints": Program(saved),
}


def compare(program: Program, alone: bool) -> dict[str, Any]:
    """Run a program on both devices; where there are no collectives of processors, on emu only.

    Returns:
        The largest difference between them, and counts of the host's waits, its copies, and orders between streams.
    """
    expected = [] if alone else leaves_of(program.run("cpu"))
    out = program.run("emu")
    events = [event.split(" ") for event in log.take()]
    found = leaves_of(out)
    assert alone or len(found) == len(expected)
    pairs = [(a.double(), b.double()) for a, b in zip(found, expected) if a.numel()]
    return {
        "difference": max([((a - b).abs().max() / max(1.0, b.abs().max())).item() for a, b in pairs], default=0.0),
        "waits": Counter(" ".join(event[1:]) for event in events if event[0] == "sync"),
        "copies": Counter(" ".join(event[:2]) for event in events if event[0] == "to"),
        "streams": Counter(" ".join(event[:2]) for event in events if event[0] in ("record", "order")),
    }


def main(programs: dict[str, Program]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--alone", action="store_true", help="without collectives of processors")
    options = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    library = emu.load(options.library)
    log.take = library.take_events
    if options.alone:
        dist.init_process_group("emuccl")
    found = {}
    # Before any mesh of processors, so that the process group serves both devices.
    mesh_of("emu")
    for name in options.names or programs:
        try:
            found[name] = compare(programs[name], options.alone)
        except Exception:
            found[name] = {"error": traceback.format_exc()}
    if int(os.environ["RANK"]) == 0:
        options.result.write_text(json.dumps(found))


if __name__ == "__main__":
    main(PROGRAMS)
