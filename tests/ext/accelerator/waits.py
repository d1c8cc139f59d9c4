"""Optimizers and wrappers for which no host waits, in programs as those of `programs.py`, and as a script like it."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

import fshard as fs
from tests.accelerator.programs import BIAS_CORRECTION, EXACT, Program, assert_on, leaves_of, log, main, mesh_of

ADAMW = partial(fs.from_torch, torch.optim.AdamW, weight_decay=0.1)
SGD = partial(fs.from_torch, torch.optim.SGD, momentum=0.9)
INNER: dict[str, Callable[..., fs.Optimizer]] = {
    "AdamW": ADAMW,
    "AdamW foreach": partial(ADAMW, foreach=True),
    "AdamW fused": partial(ADAMW, fused=True),
    "SGD": SGD,
    "SGD fused": partial(SGD, fused=True),
    "native adamw": partial(fs.adamw, weight_decay=0.1),
}
RATE = 1e-2


def halved(count: torch.Tensor) -> torch.Tensor:
    """A schedule."""
    return RATE / (1 + count).double()


WRAPPERS: dict[str, Callable[[Callable[..., fs.Optimizer]], fs.Optimizer]] = {
    "plain": lambda make: make(lr=RATE),
    "weighted": lambda make: make(lr=RATE),
    "scheduled": lambda make: make(lr=halved),
    "clip": lambda make: fs.chain(fs.clip_by_global_norm(0.5), make(lr=RATE)),
    "ema": lambda make: fs.ema(make(lr=RATE), 0.9),
    "skip_nonfinite": lambda make: fs.skip_nonfinite(make(lr=RATE)),
    "dynamic_loss_scale": lambda make: fs.dynamic_loss_scale(make(lr=RATE)),
    "all": lambda make: fs.ema(fs.skip_nonfinite(fs.chain(fs.clip_by_global_norm(0.5), make(lr=halved))), 0.9),
}
# Wrappers whose counts lie on the accelerator, because they decide there.
SKIPPING = ("skip_nonfinite", "dynamic_loss_scale", "all")
MODES = {"eager": (False, False), "donated": (False, True), "jitted": (True, False), "jitted and donated": (True, True)}
# torch refuses a rate that has no value yet for its foreach kernels, on the processor too.
REFUSED = {("scheduled", "AdamW foreach", "jitted"), ("scheduled", "AdamW foreach", "jitted and donated")}
CAPTURABLE = [torch.optim.Adadelta, torch.optim.Adamax, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RMSprop]
# After so many steps by kernels that compute bias corrections in float32.
LESS_EXACT = 4 * RATE * BIAS_CORRECTION
# SGD has no kernels that read a rate on an accelerator, except fused ones.
READS_RATE = ("all", "SGD")


def model_of(device: str) -> tuple[fs.Model, torch.Tensor]:
    """Two layers, and rows for them."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8, dtype=torch.float64) for _ in range(2)]
    model = fs.functionalize(torch.nn.Sequential(*layers).to(device), units=torch.nn.Linear)
    return model, torch.linspace(-1.0, 1.0, 32, dtype=torch.float64).reshape(4, 8).to(device)


def train(
    device: str,
    tx: fs.Optimizer,
    factors: Sequence[float] = (1.0, 3.0, 2.0, 0.5),
    *,
    mode: str = "eager",
    is_weighted: bool = False,
) -> fs.TrainState:
    """Train a step for each factor of the loss; returns the last state."""
    model, x = model_of(device)
    rows = torch.tensor(4.0, device=device)
    state = fs.TrainState.create(model.init(fs.zero3(mesh_of(device))), tx)
    is_jitted, is_donated = MODES[mode]
    # The processor's numbers are those of eager code.
    is_jitted = is_jitted and device != "cpu"

    def step(state: fs.TrainState, factor: torch.Tensor) -> fs.TrainState:
        def loss_fn(params: Any) -> Any:
            loss = model.apply(params, x).square().sum() * factor * getattr(state.opt_state, "scale", 1.0)
            return (loss, rows) if is_weighted else loss

        _, grads = fs.value_and_grad(loss_fn, reduce="weighted" if is_weighted else "mean")(state.params)
        return fs.update(tx, state, grads, donate=is_donated and not is_jitted)

    run = fs.jit(step, donate_argnums=0 if is_donated else ()) if is_jitted else step
    for i, factor in enumerate(torch.tensor(factors, dtype=torch.float64).to(device)):
        # The first call traces. All others count.
        if i <= 1:
            log.take()
        state = run(state, factor)
    if is_jitted:
        assert len(run.traces) == 1, run.traces
    assert_on(device, state)
    return state


def wrapped(device: str, wrapper: str, inner: str, mode: str) -> fs.TrainState:
    """Train with a wrapper around an optimizer. Those that skip see a step with infinite gradients."""
    factors = (1.0, torch.inf, 2.0, 0.5) if wrapper in SKIPPING else (1.0, 3.0, 2.0, 0.5)
    tx = WRAPPERS[wrapper](INNER[inner])
    return train(device, tx, factors, mode=mode, is_weighted=wrapper == "weighted")


def skipped_by_adagrad(device: str, mode: str) -> fs.TrainState:
    """Skip a step of a class whose kernels read counts on the host."""
    tx = fs.skip_nonfinite(fs.from_torch(torch.optim.Adagrad, lr=RATE))
    return train(device, tx, (1.0, torch.inf, 2.0, 0.5), mode=mode)


def skipped_as_if_never_been(device: str, mode: str) -> None:
    """A skipped step leaves no trace: the bits are those of torch's capturable kernels without that step."""
    if device == "cpu":
        return
    for cls in CAPTURABLE:
        make = partial(fs.from_torch, cls, lr=RATE)
        state = train(device, fs.skip_nonfinite(make()), (1.0, torch.inf, 2.0), mode=mode)
        expected = train(device, make(capturable=True), (1.0, 2.0), mode=mode)
        pairs = zip(leaves_of([state.params, state.opt_state.inner]), leaves_of([expected.params, expected.opt_state]))
        assert all(leaf.equal(other) for leaf, other in pairs), cls
    log.take()


@contextmanager
def capturing(device: str) -> Iterator[None]:
    """Let the accelerator say that it captures a graph."""
    torch.emu.is_capturing = device != "cpu"
    try:
        yield
    finally:
        torch.emu.is_capturing = False


def captured(device: str, make: Callable[..., fs.Optimizer], names: Sequence[str]) -> list[fs.TrainState]:
    """Steps of a captured graph are refused while numbers are on the processor, and run when they have moved.

    Args:
        device: The device, of which the processor captures nothing.
        make: Makes the optimizer.
        names: What an error names.
    """
    model, x = model_of(device)
    tx = make(lr=RATE)
    state = fs.TrainState.create(model.init(fs.zero3(mesh_of(device))), tx)

    def step(state: fs.TrainState) -> fs.TrainState:
        _, grads = fs.value_and_grad(lambda params: model.apply(params, x).square().sum())(state.params)
        return fs.update(tx, state, grads)

    jitted = fs.jit(step)
    if device != "cpu":
        _, grads = fs.value_and_grad(lambda params: model.apply(params, x).square().sum())(state.params)
        calls = {"update": lambda: fs.update(tx, state, grads, donate=True), "jit": lambda: jitted(state)}
        if hasattr(state.opt_state, "slots"):
            calls["from_torch: AdamW"] = lambda: tx.update(grads, state.opt_state, state.params)
        jitted(state)
        for name, call in calls.items():
            with capturing(device), pytest.raises(ValueError, match=f"^{name}: a graph is being captured") as error:
                call()
            for part in (*names, "capturable=True", f'leaf.to("{device}")'):
                assert part in str(error.value), f"{part}: {error.value}"
        state = fs.tree_map(lambda leaf: leaf.to(device), state)
    with capturing(device):
        log.take()
        return [step(step(state)), jitted(jitted(state))]


def make_program(wrapper: str, inner: str, mode: str) -> Program:
    is_exact = wrapper not in SKIPPING or inner.startswith("native")
    tolerance = EXACT if is_exact else LESS_EXACT
    return Program(partial(wrapped, wrapper=wrapper, inner=inner, mode=mode), tolerance=tolerance)


PROGRAMS = {
    f"{wrapper}({inner}), {mode}": make_program(wrapper, inner, mode)
    for wrapper, inner, mode in itertools.product(WRAPPERS, INNER, MODES)
    if (wrapper, inner, mode) not in REFUSED and (wrapper, inner) != READS_RATE
}
PROGRAMS |= {
    f"skipped as if never been, {mode}": Program(partial(skipped_as_if_never_been, mode=mode)) for mode in MODES
}
PROGRAMS |= {
    "captured AdamW": Program(
        partial(captured, make=ADAMW, names=["step", "updates", "slots['step']['0.weight']"]), tolerance=LESS_EXACT
    ),
    "captured native adamw": Program(partial(captured, make=fs.adamw, names=["counts['0.weight']"])),
    # A class without such kernels, in three steps: the host waits for the counts, and for a rate that changes. Their
    # way back is from pinned memory, which a trace does not have.
    "skip_nonfinite(Adagrad), eager": Program(partial(skipped_by_adagrad, mode="eager"), {"copy_": 3}),
    "skip_nonfinite(Adagrad), jitted": Program(
        partial(skipped_by_adagrad, mode="jitted"), {"copy_": 3, "copy_ of pageable memory": 3}
    ),
    "all(SGD), eager": Program(
        partial(wrapped, wrapper="all", inner="SGD", mode="eager"), {"aten::_local_scalar_dense": 3}
    ),
}

if __name__ == "__main__":
    main(PROGRAMS)
