"""The train steps of examples/, taken out of programs that run as a user runs them, on one rank."""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import fshard as fs
from tests.ext.check.closed_axes import open_axes
from tests.test_examples import SHORT
from tests.test_processes import ROOT

sys.path.append(str(ROOT / "examples"))
import check_step
import custom_transform
import gpt
import powersgd
import tensor_parallel
import topk

EXAMPLES = ROOT / "examples"
# Functions that are a whole step, where an example calls them as they are.
STEP = re.compile(r"^( *)(def (?:train_step|inner_step|step)\((?:self|state)\b)", re.MULTILINE)


class Example(NamedTuple):
    """How to run an example, and the mesh to check its step on."""

    options: Sequence[Any]  # the options of its command
    mesh: Mapping[str, int]  # ranks on each axis
    # Arguments of the step by their number, in the place of those of the first call.
    replaced: Mapping[int, Any] = MappingProxyType({})


SHARD = {"shard": 8}
# Examples that call a step that nobody jits.
DECORATED = ("find_the_nan", "four_dimensions", "diloco", "rl")
TABLE = {
    **{name: Example(SHORT[name], SHARD) for name in ("train_gpt", "ddp_parity", "mnist", "find_the_nan", "resnet")},
    **{name: Example(SHORT[name], SHARD) for name in ("finetune_lora", "finetune_peft", "diffusion", "diloco", "rl")},
    "ensemble": Example(SHORT["ensemble"], SHARD),
    # Its first steps are those of a comparison, which makes no inner steps.
    "maml": Example(SHORT["maml"], SHARD, {3: 1}),
    "fit": Example(("--steps", 2, "--width", 32, "--layers", 2, "--context", 16), SHARD),
    "four_dimensions": Example(SHORT["four_dimensions"], {"pipe": 2, "shard": 2, "cp": 1, "tp": 2}),
}


class StepError(BaseException):
    """Ends an example at the first call of its step, with the step and its arguments."""

    def __init__(self, step: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> None:
        self.step, self.args_of_step, self.options = step, args, options


def stop_at(step: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    """Make a function that ends the program with what it was called with; fs.jit is replaced by it."""
    if step is None:
        return partial(stop_at, **options)
    if getattr(step, "__name__", "") not in ("train_step", "inner_step", "step"):
        return step

    def train_step(*args: Any, **options: Any) -> None:
        raise StepError(step, args, options)

    # examples/fit.py asks for the memory of a step first.
    vars(train_step)["memory"] = train_step
    return train_step


def take_step(name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Run an example until it calls its step.

    Args:
        name: The example's file name without its ending.

    Returns:
        The step, which takes the axes of the mesh last, and its arguments.
    """
    text = (EXAMPLES / f"{name}.py").read_text()
    if name in DECORATED:
        text = STEP.sub(r"\1@stop_at\n\1\2", text)
    namespace = {"__name__": "example", "stop_at": stop_at}
    before = list(sys.argv)
    sys.argv[:] = [f"{name}.py", *map(str, TABLE[name].options)]
    try:
        exec(compile(text.replace("fs.jit", "stop_at"), EXAMPLES / f"{name}.py", "exec"), namespace)
        namespace["main"]()
    except StepError as stopped:
        step, args, options = stopped.step, stopped.args_of_step, stopped.options
    finally:
        sys.argv[:] = before
    args = [TABLE[name].replaced.get(number, value) for number, value in enumerate(args)]
    if hasattr(args[0], "state"):
        step, args = make_step_of_method(step, args[0]), (args[0].state, *args[1:])
    mesh = fs.init_mesh(dict.fromkeys(TABLE[name].mesh, 1), device="cpu")
    axes = [fs.axis_of(mesh, axis) for axis in TABLE[name].mesh]
    return open_axes(take_positions(step, len(args), tuple(options)), axes), (*args, *options.values(), *axes)


def take_positions(step: Callable[..., Any], count: int, names: Sequence[str]) -> Callable[..., Any]:
    """Make of a step one that takes its keywords as its last arguments."""

    def run(*given: Any) -> Any:
        return step(*given[:count], **dict(zip(names, given[count:], strict=True)))

    return run


def make_step_of_method(method: Callable[..., Any], trainer: Any) -> Callable[..., Any]:
    """Make a pure step of a method that keeps its state in an attribute."""

    def step(state: Any, *batch: Any) -> Any:
        trainer.state = state
        method(trainer, *batch)
        return trainer.state

    return step


def compare(transform: Callable[[Any], fs.ShardTransform], mesh: Any) -> tuple[Any, ...]:
    """Make the step of examples/compare.py, which the examples of transforms share."""
    model = fs.functionalize(gpt.GPT(32, 1, heads=4, context=8), units=gpt.Block)
    tx = fs.chain(fs.clip_by_global_norm(1.0), fs.from_torch(torch.optim.AdamW, lr=1e-3, betas=(0.5, 0.95)))

    def loss_fn(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model.apply(params, x).flatten(0, 1), y.flatten())

    def step(state: fs.TrainState, x: torch.Tensor, y: torch.Tensor) -> tuple[fs.TrainState, torch.Tensor]:
        run = fs.value_and_grad(loss_fn, transform_state=state.transform_state)
        loss, grads, transform_state = run(state.params, x, y)
        return fs.update(tx, state, grads, transform_state=transform_state), loss

    params = model.init(fs.zero3(mesh, layout=transform(mesh)), seed=0)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    return step, fs.TrainState.create(params, tx), tokens, tokens


def split_over_two_axes(mesh: Any) -> tuple[Any, ...]:
    """Make the step of examples/tensor_parallel.py."""
    by_rows = fs.masked(fs.split_dim(mesh["tp"], dim=1), tensor_parallel.ROWS)
    columns = fs.masked(fs.split_dim(mesh["tp"], dim=0), tensor_parallel.COLUMNS, otherwise=by_rows)
    params = fs.shard(tensor_parallel.initial(32, 1, 8, seed=0), fs.compose(fs.zero3(mesh), columns))
    tx = fs.chain(fs.clip_by_global_norm(1.0), fs.adamw(1e-3, weight_decay=0.1))

    def step(state: fs.TrainState, xy: Any, tp: fs.Axis) -> tuple[fs.TrainState, torch.Tensor]:
        loss, grads = fs.value_and_grad(tensor_parallel.loss_fn)(state.params, xy, tp)
        return fs.update(tx, state, grads), loss

    tokens = torch.zeros(2, 8, dtype=torch.int64)
    return step, fs.TrainState.create(params, tx), (tokens, tokens), fs.axis_of(mesh["tp"])


def check_a_gpt(mesh: Any) -> tuple[Any, ...]:
    """Make the right step of examples/check_step.py, which runs none."""
    model = fs.functionalize(gpt.GPT(32, 1, heads=4, context=8), units=gpt.Block)
    tx = fs.from_torch(torch.optim.AdamW, lr=1e-3)
    state = fs.TrainState.create(model.init(fs.zero3(mesh), seed=0), tx)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    return check_step.make_step(model, tx, mistake=""), state, tokens, tokens


# Steps of examples that are no function there, or that nothing calls, written out.
WRITTEN_OUT = {
    "check_step": (check_a_gpt, SHARD),
    "custom_transform": (partial(compare, lambda mesh: custom_transform.Int8(fs.fully_shard(mesh))), SHARD),
    "topk": (partial(compare, lambda mesh: topk.TopK(fs.fully_shard(mesh), 0.1)), SHARD),
    "powersgd": (partial(compare, lambda mesh: powersgd.PowerSGD(fs.fully_shard(mesh), 2)), SHARD),
    "tensor_parallel": (split_over_two_axes, {"shard": 4, "tp": 2}),
}
# Examples whose steps are among those of `right_steps`, and programs that train nothing by a step.
ELSEWHERE = ("dp_sgd", "unequal_tokens", "compare", "finetune_embeddings", "hessian")
