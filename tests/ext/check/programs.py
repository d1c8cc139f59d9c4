"""What the steps of the table share: an optimizer, states, and a step of a loss alone."""

from collections.abc import Callable
from typing import Any

import torch

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
X, Y = torch.ones(BATCH, WIDTH), torch.arange(BATCH)


def train(
    loss_fn: Callable[..., Any], tx: Any = TX, grad: Callable[..., Any] = fs.value_and_grad, **options: Any
) -> Callable[..., Any]:
    """Make the step of a loss of parameters and a batch."""

    def step(state: fs.TrainState, *batch: Any) -> tuple[fs.TrainState, torch.Tensor]:
        loss, grads = grad(loss_fn, **options)(state.params, *batch)
        return fs.update(tx, state, grads), loss

    return step


def state_of(full: Any, strategy: fs.ShardTransform, tx: Any = TX, **more: Any) -> fs.TrainState:
    """Shard parameters, and make the state of them before the first step."""
    return fs.TrainState.create(fs.shard(full, strategy), tx, **more)


def split(mesh: Any) -> fs.ShardTransform:
    """ZeRO-3 that splits every leaf over `shard`."""
    return fs.zero3(mesh, min_shard_elements=0)


def parallel(mesh: Any) -> fs.ShardTransform:
    """ZeRO-3 of the large leaves over `shard`, and tensor parallelism of `up` and `down` over `tp`."""
    rows, columns = (fs.masked(fs.split_dim(mesh["tp"], dim=dim), name) for dim, name in enumerate(("up", "down")))
    return fs.compose(fs.zero3(mesh, min_shard_elements=7), rows, columns)
