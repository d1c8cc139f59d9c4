"""Faults that were found before: waits of the host, memory of clipping, leaves that lose their pin, and silent NaN."""

import itertools
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import fshard as fs
from stages import Findings, Place, no_waits, peak_of, reported

# Bytes that clipping may add to the peak of a step, beside the clipped gradients.
CLIPPING_BYTES = 64 * 2**20


def faults(place: Place) -> Findings:
    """The faults that a check of numbers on the device finds."""
    yield from nonfinite(place)
    yield from clipping(place)
    yield from pinned(place)


def nonfinite(place: Place) -> Findings:
    """A gradient of infinity under skip_nonfinite and dynamic_loss_scale: parameters must not move."""
    mesh = fs.init_mesh({"shard": -1}, device=place.device)

    def train_step(tx: fs.Optimizer, donate: bool, state: fs.TrainState, factor: torch.Tensor) -> fs.TrainState:
        _, grads = fs.value_and_grad(lambda params: (fs.gather(params)["w"] * factor).sum())(state.params)
        return fs.update(tx, state, grads, donate=donate)

    flags = (False, True)
    for wrapper, fused, donate, jitted in itertools.product((fs.skip_nonfinite, fs.dynamic_loss_scale), *[flags] * 3):
        mode = "jitted" if jitted else "eager"
        with reported(f"{wrapper.__name__}, fused={fused}, donate={donate}, {mode}") as row:
            tx = wrapper(fs.from_torch(torch.optim.AdamW, lr=1e-1, fused=fused))
            state = fs.TrainState.create(fs.shard({"w": torch.ones(8)}, fs.zero3(mesh)), tx)
            step = partial(train_step, tx, donate and not jitted)
            run = fs.jit(step, donate_argnums=0 if donate else ()) if jitted else step
            state = run(state, torch.tensor(1.0, device=place.device))
            before = fs.unshard(state.params)["w"].clone()
            state = run(state, torch.tensor(torch.inf, device=place.device))
            row["passed"] = torch.equal(before, fs.unshard(state.params)["w"])
        yield row


def clipping(place: Place) -> Findings:
    """The peak of a step that clips by the global norm beside that of one that does not."""
    mesh = fs.init_mesh({"shard": -1}, device=place.device)
    # Leaves of 32 MB. Copies of all of them in float64 would take 2 GB.
    width, layers = place.sized((4096, 32), (64, 4))
    for mode in ("eager", "donated", "jitted"):
        with reported(f"peak of clipping, {mode}") as row:
            # Eager clipping makes new gradients beside those that the caller holds.
            copies = 0 if mode == "jitted" else layers * width * width // 2 * 4
            row["without"] = peak_of_step(mesh, width, layers, mode, place)
            row["with"] = peak_of_step(mesh, width, layers, mode, place, fs.clip_by_global_norm(1.0))
            row["allowed"] = row["without"] + copies + CLIPPING_BYTES
            row["passed"] = row["with"] <= row["allowed"]
        yield row


def peak_of_step(mesh: Any, width: int, layers: int, mode: str, place: Place, *before: Any) -> int:
    """The bytes that the third step takes at most, above those of its state."""
    full = {f"w{i}": torch.full((width, width // 2), 0.01, device=place.device) for i in range(layers)}
    adamw = fs.from_torch(torch.optim.AdamW, lr=1e-3, fused=True)
    tx = fs.chain(*before, adamw) if before else adamw
    state = fs.TrainState.create(fs.shard(full, fs.zero3(mesh)), tx)
    full.clear()

    def train_step(state: fs.TrainState) -> fs.TrainState:
        _, grads = fs.value_and_grad(sum_of_squares)(state.params)
        return fs.update(tx, state, grads, donate=mode == "donated")

    run = fs.jit(train_step, donate_argnums=0) if mode == "jitted" else train_step
    for _ in range(2):
        state = run(state)
    return peak_of(place, partial(run, state))


def sum_of_squares(params: Any) -> torch.Tensor:
    return torch.stack([leaf.square().sum() for leaf in fs.gather(params).values()]).sum()


def pinned(place: Place) -> Findings:
    """Offloaded leaves stay in pinned memory after updates and a restore."""
    mesh = fs.init_mesh({"shard": -1}, device=place.device)
    layout = fs.compose(fs.offload(place.device), fs.fully_shard(mesh["shard"]))
    tx = fs.from_torch(torch.optim.AdamW, lr=1e-3)

    def train_step(donate: bool, state: fs.TrainState) -> fs.TrainState:
        _, grads = fs.value_and_grad(sum_of_squares)(state.params)
        return fs.update(tx, state, grads, donate=donate)

    for mode in ("eager", "donated", "jitted"):
        with reported(f"pinned, {mode}") as row:
            full = {f"w{i}": torch.randn(256, 256, device=place.device) for i in range(4)}
            state = fs.TrainState.create(fs.shard(full, fs.zero3(mesh, layout=layout)), tx)
            row["at first"] = count_pinned(state.params)
            step = partial(train_step, mode == "donated")
            run = fs.jit(step, donate_argnums=0) if mode == "jitted" else step
            for _ in range(2):
                state = run(state)
            row["after updates"] = count_pinned(state.params)
            with tempfile.TemporaryDirectory() as folder:
                fs.checkpoint.save(folder, state)
                row["after a restore"] = count_pinned(fs.checkpoint.restore(folder, state).params)
            # Where nothing is pinned, as in a rehearsal, the lines alone are tried.
            expected = 4 if not place.is_rehearsal else row["at first"]
            row["passed"] = row["at first"] == row["after updates"] == row["after a restore"] == expected
        yield row


def count_pinned(params: Any) -> int:
    return sum(leaf.is_pinned() for leaf in fs.tree_leaves(params))


def optimizers() -> dict[str, Callable[[], Any]]:
    """Each wrapper around optimizers of torch and of fshard."""
    adamw = torch.optim.AdamW
    inner = {
        "AdamW": lambda: fs.from_torch(adamw, lr=1e-3),
        "AdamW fused": lambda: fs.from_torch(adamw, lr=1e-3, fused=True),
        "AdamW foreach": lambda: fs.from_torch(adamw, lr=1e-3, foreach=True),
        "AdamW capturable": lambda: fs.from_torch(adamw, lr=1e-3, capturable=True),
        "SGD momentum": lambda: fs.from_torch(torch.optim.SGD, lr=1e-3, momentum=0.9),
        "fs.adamw": lambda: fs.adamw(1e-3),
    }
    wrap = {
        "": lambda tx: tx,
        "skip_nonfinite": fs.skip_nonfinite,
        "dynamic_loss_scale": fs.dynamic_loss_scale,
        "ema": lambda tx: fs.ema(tx, 0.9),
        "clip": lambda tx: fs.chain(fs.clip_by_global_norm(1.0), tx),
    }
    made = {f"{w}({i})" if w else i: (lambda a=wrap[w], b=inner[i]: a(b())) for w in wrap for i in inner}
    made["AdamW schedule"] = lambda: fs.from_torch(adamw, lr=lambda count: 1e-3 / (1 + count))
    made["fs.adamw schedule"] = lambda: fs.adamw(lambda count: 1e-3 / (1 + count))
    return made


def host_waits(place: Place) -> Findings:
    """The steps of each optimizer and wrapper, in which the host must not wait for the device."""
    mesh = fs.init_mesh({"shard": -1}, device=place.device)
    module = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)]).to(place.device)
    model = fs.functionalize(module, units=torch.nn.Linear)
    x = torch.randn(4, 16).to(place.device)

    def train_step(tx: fs.Optimizer, donate: bool, state: fs.TrainState) -> fs.TrainState:
        scale = getattr(state.opt_state, "scale", 1.0)
        _, grads = fs.value_and_grad(lambda params: model.apply(params, x).square().sum() * scale)(state.params)
        return fs.update(tx, state, grads, donate=donate)

    for name, make in optimizers().items():
        for mode in ("eager", "donated", "jitted"):
            with reported(f"{name}, {mode}") as row:
                tx = make()
                state = fs.TrainState.create(model.init(fs.zero3(mesh)), tx)
                step = partial(train_step, tx, mode == "donated")
                run = fs.jit(step, donate_argnums=0) if mode == "jitted" else step
                for _ in range(2):
                    state = run(state)
                torch.accelerator.synchronize()
                with no_waits(place):
                    for _ in range(2):
                        state = run(state)
                row["passed"] = True
            yield row
