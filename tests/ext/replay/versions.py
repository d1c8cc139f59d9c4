"""Versions of a step that diff compares."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fshard as fs
from tests.ext.replay.steps import WIDTH, Block, Net
from tests.ranks import my_rank
from tests.trees import normal, one_axis


class Other(Net):
    """A net with another line."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(1.01 * x).squeeze(-1)


def make_version(
    strategy: Callable[..., Any] = fs.zero3,
    approximates: tuple[str, str] = ("none", "none"),
    lr: float = 10.0,
    reduce: str = "mean",
    net: Callable[..., nn.Module] = Net,
    **options: Any,
) -> tuple[Callable[..., Any], Any, Tensor]:
    """A step, a state and this rank's batch."""
    model = fs.functionalize(net(approximates), Block)
    # Of few operators; gradients are clipped whatever they are, hence the rate.
    tx = fs.chain(fs.clip_by_global_norm(1e-3), fs.sgd(lr))
    state = fs.TrainState.create(model.init(strategy(one_axis(), **options), seed=0), tx)

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return model.apply(params, x).float().square().mean()

    def step(state: Any, batch: Tensor) -> Any:
        loss, grads = fs.value_and_grad(loss_fn, reduce=reduce)(state.params, batch)
        return fs.update(tx, state, grads), loss  # update

    return step, state, normal(my_rank())(4, WIDTH, dtype=torch.float32)


def shift(x: Tensor, by: Tensor) -> Tensor:
    """A function of two operators."""
    return 2 * (x + by)  # shift
