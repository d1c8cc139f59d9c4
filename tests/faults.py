"""Programs that one rank breaks, for the tests and the benchmark of the contract."""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard.errors import describe_error
from fshard.testing import RankError, Workers
from fshard.testing import workers as workers_module
from tests.ranks import my_rank

# What breaks a rank, called at each place that a program names.
At = Callable[[str], None]


class _Hook(threading.local):
    """Where a transform, a stage and a gradient transformation of this rank find what breaks them."""

    at: At = staticmethod(lambda place: None)


Hook = _Hook()


@dataclass(frozen=True)
class Breaks(fs.ShardTransform):
    """The identity, whose gather, scatter and their ends may break."""

    def gather(self, leaves, specs):
        Hook.at("gather")
        return list(leaves)

    def scatter(self, grads, specs):
        Hook.at("scatter")
        return list(grads)


class BreaksInBackward(torch.autograd.Function):
    """The identity, whose backward may break."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Hook.at("backward")
        return grad.clone()


OPERATORS = torch.library.Library("fshard_tests", "DEF")
OPERATORS.define("breaks(Tensor x, str place) -> Tensor")


@torch.library.impl(OPERATORS, "breaks", "CompositeExplicitAutograd")
def _break(x: torch.Tensor, place: str) -> torch.Tensor:
    Hook.at(place)
    return x.clone()


torch.library.register_fake("fshard_tests::breaks", lambda x, place: x.clone(), lib=OPERATORS)
torch.library.register_autograd(
    "fshard_tests::breaks", lambda ctx, grad: (torch.ops.fshard_tests.breaks(grad, "backward"), None), lib=OPERATORS
)


def breaks(x: torch.Tensor, place: str) -> torch.Tensor:
    """The identity, as an operator that stays in graphs; its forward and its backward may break."""
    return torch.ops.fshard_tests.breaks(x, place)


def full_params() -> Any:
    return {"v": torch.ones(8, 4), "w": torch.ones(8, 4)}


def params_of(axis: fs.Axis, *inner: fs.ShardTransform) -> Any:
    layout = fs.compose(fs.fully_shard(axis, min_shard_elements=0), *inner)
    return fs.shard(full_params(), fs.zero3(axis, layout=layout))


def collectives(axis: fs.Axis) -> Any:
    """Bare collectives inside a loss."""

    def loss(params):
        Hook.at("before")
        x = fs.psum(fs.gather({"w": params["w"]})["w"], axis)
        Hook.at("between")
        x = fs.ppermute(x, axis, [(rank, (rank + 1) % axis.size) for rank in range(axis.size)])
        y = BreaksInBackward.apply(x)
        out = (fs.all_gather(y, axis)).sum() + fs.gather({"v": params["v"]})["v"].sum()
        Hook.at("after")
        return out

    return fs.value_and_grad(loss)(params_of(axis))


def jitted_step(params: Any) -> Any:
    """A step to be jitted, which may break between two gathers, and between their transposes."""

    def loss(params: Any) -> torch.Tensor:
        x = breaks(torch.tanh(fs.gather({"w": params["w"]})["w"]), "forward")
        return (x * fs.gather({"v": params["v"]})["v"]).sum()

    return fs.value_and_grad(loss)(params)


class Jitted:
    """The jitted step, traced before it breaks."""

    def prepare(self, axis: fs.Axis) -> None:
        self.step = fs.jit(jitted_step)
        self.step(params_of(axis))

    def __call__(self, axis: fs.Axis) -> Any:
        return self.step(params_of(axis))


def prepare(program: Any, axis: fs.Axis) -> None:
    """Do what a program does before it is timed and broken, if it has any of that."""
    if isinstance(program, Jitted):
        program.prepare(axis)


def gather(axis: fs.Axis) -> Any:
    return fs.gather(params_of(axis, Breaks()))


def scatter_grads(axis: fs.Axis) -> Any:
    return fs.scatter_grads(full_params(), params_of(axis, Breaks()))


def update(axis: fs.Axis) -> Any:
    def breaks(grads, state, params):
        Hook.at("update")
        return grads, state

    breaking = fs.GradientTransformation(lambda params: (), breaks)
    tx = fs.chain(fs.clip_by_global_norm(1.0), breaking, fs.clip_by_global_norm(0.5), fs.sgd(0.1))
    params = params_of(axis)
    return fs.update(tx, fs.TrainState.create(params, tx), params)


class Layer(nn.Module):
    """A unit that may break in its forward and in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        Hook.at("forward")
        return BreaksInBackward.apply(self.linear(x))


class Checkpointed(Layer):
    """One that is computed again in the backward, where it may break."""

    again = False

    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=False)

    def run(self, x):
        if self.again:
            Hook.at("again")
        self.again = True
        return super().forward(x)


class Experts(nn.Module):
    """A layer, then one of two, which ranks choose in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts = Layer(), nn.ModuleList([Layer(), Layer()])

    def forward(self, x):
        return self.experts[my_rank() % 2](self.first(x))


def of_model(module: nn.Module, run: Callable[[fs.Model, Any], Any], axis: fs.Axis) -> Any:
    """Run a model of units that are gathered one by one."""
    model = fs.functionalize(module, units=Layer)
    return run(model, model.init(fs.zero3(axis, min_shard_elements=0, bucket_bytes=0), seed=0))


def differentiated(model: fs.Model, params: Any) -> Any:
    return fs.value_and_grad(lambda p: model.apply(p, torch.ones(2, 4)).sum())(params)


def accumulated(model: fs.Model, params: Any) -> Any:
    return fs.accumulate(lambda p, x: model.apply(p, x).sum())(params, [torch.ones(2, 4), torch.ones(1, 4)])


# Programs, and the places where each may break.
Programs = dict[str, tuple[Callable[[fs.Axis], Any], tuple[str, ...]]]
PROGRAMS: Programs = {
    "collectives": (collectives, ("before", "between", "after", "backward")),
    "jitted": (Jitted(), ("forward", "backward")),
    "gather": (gather, ("gather",)),
    "scatter_grads": (scatter_grads, ("scatter",)),
    "update": (update, ("update",)),
    # The third is not on its way when a rank breaks in the first.
    "apply": (
        partial(of_model, nn.Sequential(*(Layer() for _ in range(3))), lambda m, p: m.apply(p, torch.ones(2, 4))),
        ("forward",),
    ),
    "checkpoints": (
        partial(of_model, nn.Sequential(Checkpointed(), Checkpointed()), differentiated),
        ("forward", "again", "backward"),
    ),
    "experts": (partial(of_model, Experts(), differentiated), ("forward", "backward")),
    "accumulate": (partial(of_model, nn.Sequential(Layer(), Layer()), accumulated), ("forward", "backward")),
}


def places_of(programs: Programs) -> list[tuple[str, str]]:
    return [(name, place) for name, (_, places) in programs.items() for place in places]


class BadSampleError(Exception):
    """The error of a rank that fails."""


def fail(fault: str) -> None:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "exit":
        os._exit(3)
    raise BadSampleError("bad sample 17") if fault == "raise" else MemoryError("no memory")


class Outcome(NamedTuple):
    """How a program ended on a rank: its error's text and class, "" for none, and the seconds that it took."""

    text: str
    error: str
    seconds: float


def outcome(program: Callable[[], Any]) -> Outcome:
    """Run a program and catch its error."""
    begin = time.monotonic()
    try:
        program()
        ending = "", ""
    except BaseException as error:
        ending = describe_error(error), type(error).__name__
    return Outcome(*ending, time.monotonic() - begin)


def outcome_of(program: Callable[[fs.Axis], Any], axis: fs.Axis, at: At) -> Outcome:
    """Run one of the programs, whose places call a function."""
    Hook.at = at
    try:
        return outcome(lambda: program(axis))
    finally:
        Hook.at = lambda place: None


def axis_of_all(timeout: float = 30.0) -> fs.Axis:
    return fs.axis_of(fs.init_mesh({"shard": -1}, device="cpu", timeout=timeout))


def broken_program(
    program: Callable[[fs.Axis], Any], place: str, fault: str, then: str = "next", timeout: float = 30.0
) -> Outcome:
    """Run a program that a fault breaks on the last rank, which then ends, idles, or goes on to its next call."""
    axis = axis_of_all(timeout)
    victim = axis.size - 1
    prepare(program, axis)
    fs.psum(torch.ones(()), axis)

    def breaks(reached: str) -> None:
        if my_rank() == victim and reached == place:
            fail(fault)

    ended = outcome_of(program, axis, breaks)
    if ended.error and then == "next":
        # On every rank the same error again.
        again = outcome(lambda: fs.psum(torch.ones(()), axis))
        assert again.error == "CollectiveError", (again, ended)
        assert again.text.splitlines()[0] in ended.text or my_rank() == victim, (again, ended)
    elif ended.error and then == "idle" and my_rank() == victim:
        time.sleep(0.8)
    return ended


def outcomes_of_survivors(world: int, program: Callable[[], Outcome], path: Path, monkeypatch: Any) -> list[str]:
    """Run a program that ends the last rank's process, and return the texts of the others."""
    monkeypatch.setattr(workers_module, "GRACE", 60.0)

    def run() -> None:
        ended = program()
        (path / str(my_rank())).write_text(f"{ended.seconds}\n{ended.text}")

    with Workers(world) as pool, suppress(RankError):
        pool.run(run, timeout=90.0)
    return [(path / str(rank)).read_text() for rank in range(world - 1)]
