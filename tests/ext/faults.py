"""Programs of extensions that one rank breaks, for the tests and the benchmark of the contract."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import fshard as fs
from tests.faults import BreaksInBackward, Hook, Programs, params_of


def attention(axis: fs.Axis, attend: Callable[..., Any]) -> Any:
    """Attention of four heads over a sequence that is split over an axis."""

    def loss(params):
        w = fs.gather(params)["w"].view(1, 8, 4, 1).transpose(1, 2)
        Hook.at("before")
        return BreaksInBackward.apply(attend(w, w, w)).sum()

    return fs.value_and_grad(loss)(params_of(axis))


def ring(axis: fs.Axis) -> Any:
    return attention(axis, partial(fs.ring_attention, axis=axis, is_causal=True))


def ulysses(axis: fs.Axis) -> Any:
    return attention(axis, fs.ulysses(F.scaled_dot_product_attention, axis))


def mixture(axis: fs.Axis) -> Any:
    def loss(params):
        w = fs.gather(params)["w"]
        rows, sent = fs.moe.dispatch(w, fs.moe.route(w[:, : axis.size]), axis)
        Hook.at("between")
        return fs.moe.combine([BreaksInBackward.apply(one) for one in rows], sent).sum()

    return fs.value_and_grad(loss)(params_of(axis))


def pipeline(axis: fs.Axis, schedule: str) -> Any:
    def stage(params, h):
        Hook.at("stage")
        return BreaksInBackward.apply(h * params["layers"].flatten(0, -2).prod(0))

    params = fs.shard({"layers": torch.ones(axis.size, 4)}, fs.zero3(axis, layout=fs.split_dim(axis, dim=0)))
    last = lambda p, h: h.square().mean()  # noqa: E731
    loss = fs.pipeline(stage, axis, microbatches=axis.size, last=last, schedule=schedule)
    return fs.value_and_grad(loss)(params, torch.ones(4 * axis.size, 4))


PROGRAMS: Programs = {
    "ring": (ring, ("before", "backward")),
    "ulysses": (ulysses, ("before", "backward")),
    "mixture": (mixture, ("between", "backward")),
    "gpipe": (partial(pipeline, schedule="gpipe"), ("stage", "backward")),
    "1f1b": (partial(pipeline, schedule="1f1b"), ("stage", "backward")),
}
