"""What the steps of the tables share: an optimizer, states, and rows made of a loss or of a step alone."""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F

import fshard as fs

TX = fs.sgd(0.1)
BATCH, WIDTH, HIDDEN, CLASSES = 4, 6, 8, 5
# Of a layer that tensor parallelism splits by the rows of `up` and the columns of `down`.
LAYER = {
    "norm": torch.ones(WIDTH),
    "up": torch.ones(HIDDEN, WIDTH),
    "down": torch.ones(WIDTH, HIDDEN),
    "bias": torch.ones(WIDTH),
    "head": torch.ones(CLASSES, WIDTH),
}
NETWORK = {"w": torch.ones(WIDTH, HIDDEN), "b": torch.ones(HIDDEN), "head": torch.ones(HIDDEN, CLASSES)}
X, Y, ONES = torch.ones(BATCH, WIDTH), torch.arange(BATCH), torch.ones(BATCH)
# What arguments of these names are.
ARGUMENTS = {
    **{"x": X, "y": Y, "mask": ONES, "weights": ONES, "tokens": torch.zeros(BATCH, 3, dtype=torch.int64)},
    **{"one": X, "other": X + 1, "real": X, "fake": X + 1},
}
HYBRID: Mapping[str, int] = {"replicate": 2, "shard": 4}

Make = Callable[[Any], tuple[Any, ...]]


def forward(full: Any, x: torch.Tensor) -> torch.Tensor:
    """Compute the logits of NETWORK."""
    return torch.tanh(x @ full["w"] + full["b"]) @ full["head"]


def loss_fn(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(forward(fs.gather(params), x), y)


def train(
    loss_fn: Callable[..., Any], tx: Any = TX, grad: Callable[..., Any] = fs.value_and_grad, **options: Any
) -> Callable[..., Any]:
    """Make the step of a loss of parameters and a batch."""

    def step(state: fs.TrainState, *batch: Any) -> tuple[fs.TrainState, torch.Tensor]:
        loss, grads = grad(loss_fn, **options)(state.params, *batch)
        return fs.update(tx, state, grads), loss

    return step


def state_of(full: Any, strategy: fs.ShardTransform, tx: Any = TX, **more: Any) -> fs.TrainState:
    """Shard parameters, or take those of a model, and make the state of them before the first step."""
    params = full.init(strategy) if hasattr(full, "init") else fs.shard(full, strategy)
    return fs.TrainState.create(params, tx, **more)


def split(mesh: Any) -> fs.ShardTransform:
    """ZeRO-3 that splits every leaf over `shard`."""
    return fs.zero3(mesh, min_shard_elements=0)


def parallel(mesh: Any) -> fs.ShardTransform:
    """ZeRO-3 of the large leaves over `shard`, and tensor parallelism of `up` and `down` over `tp`."""
    rows, columns = (fs.masked(fs.split_dim(mesh["tp"], dim=dim), name) for dim, name in enumerate(("up", "down")))
    return fs.compose(fs.zero3(mesh, min_shard_elements=7), rows, columns)


def from_step(
    full: Any,
    strategy: Callable[[Any], fs.ShardTransform] = split,
    *,
    batch: Mapping[str, Any] | None = None,
    **state: Any,
) -> Callable[[Callable[..., Any]], Make]:
    """Make of a step what makes it and its arguments of a mesh.

    Args:
        full: The parameters, or a model that has them.
        strategy: How they are split over a mesh.
        batch: Arguments of the step by name, or functions of a mesh that return them, where they are no axes of the
            mesh and not as in ARGUMENTS.
        **state: Passed to `state_of`; functions are called with the mesh, too.
    """
    return lambda step: _make_row(step, step, full, strategy, batch or {}, state)


def from_loss(
    full: Any,
    strategy: Callable[[Any], fs.ShardTransform] = split,
    *,
    batch: Mapping[str, Any] | None = None,
    tx: Any = TX,
    **options: Any,
) -> Callable[[Callable[..., Any]], Make]:
    """Make the same of a loss, with the step that `train` makes of it; options are those of `train`."""
    return lambda loss_fn: _make_row(loss_fn, train(loss_fn, tx, **options), full, strategy, batch or {}, {"tx": tx})


def _make_row(
    function: Callable[..., Any],
    step: Callable[..., Any],
    full: Any,
    strategy: Callable[[Any], fs.ShardTransform],
    batch: Mapping[str, Any],
    state: Mapping[str, Any],
) -> Make:
    _, *names = inspect.signature(function).parameters

    @wraps(function)
    def make(mesh: Any) -> tuple[Any, ...]:
        def find(value: Any) -> Any:
            return value(mesh) if callable(value) else value

        axes = {name: fs.axis_of(mesh[name]) for name in mesh.mesh_dim_names}
        first, *_ = axes.values()
        values = {"axis": first, **axes, **ARGUMENTS, **batch}
        options = {name: find(value) for name, value in state.items()}
        return step, state_of(full, strategy(mesh), **options), *(find(values[name]) for name in names)

    return make
