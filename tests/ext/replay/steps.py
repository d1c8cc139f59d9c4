"""Steps of a small model whose lines the tests of replay name."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fshard as fs

# The file of every line below.
FILE = __file__
WIDTH = 8


class Shift(torch.autograd.Function):
    """The identity, with a line of the user's in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 1.5  # shift backward


class Block(nn.Module):
    def __init__(self, approximate: str, checkpointed: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.approximate, self.checkpointed = approximate, checkpointed

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)

    def body(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(x), approximate=self.approximate)  # gelu
        hidden = Shift.apply(hidden)
        return x + self.down(hidden)  # residual


class Net(nn.Module):
    def __init__(self, approximates: Sequence[str] = ("none", "none"), checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(approximate, checkpointed) for approximate in approximates)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).squeeze(-1)  # head


def line_of(comment: str) -> int:
    """The number of the line of this file that ends with a comment."""
    lines = inspect.getsource(inspect.getmodule(Net)).splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {comment}"))


def make_step(
    strategy: Callable[..., Any] = fs.zero3, checkpointed: bool = False, microbatches: int = 1
) -> tuple[Callable[..., Any], Any, Tensor]:
    """A step, a state and this rank's batch."""
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    model = fs.functionalize(Net(checkpointed=checkpointed), units=Block)
    tx = fs.adamw(1e-3)
    state = fs.TrainState.create(model.init(strategy(mesh), seed=0), tx)
    rank = fs.comm.rank(fs.axis_of(mesh))
    batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return model.apply(params, x).square().mean()  # loss

    def step(state: Any, batch: Tensor) -> Any:
        parts = list(batch.chunk(microbatches))
        loss, grads = fs.accumulate(loss_fn)(state.params, parts)
        return fs.update(tx, state, grads), loss  # update

    return step, state, batch
