"""Count a model's parameters, and measure the tokens a second and the MFU of its training.

MFU (model FLOPs utilization) is the share of a device's peak that goes into the arithmetic of the model. Its FLOPs are
those of matrix products, convolutions and attention that `fs.plan` finds in a step. Give it a step without recomputed
activations, because these count as hardware FLOPs and not as the model's. (The backward of fused attention recomputes
one of its products; `fs.plan` counts it, as torch's own counter does.) fshard does not know the peak of your device, so
you pass it: the data sheet has it, in the precision that the step computes in and without sparsity.
"""

import math
import time
from collections.abc import Callable
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

import fshard as fs


def count_parameters(params: dict[str, Any]) -> int:
    """The parameters of a model, however many ranks hold them, without padding."""
    return sum(math.prod(leaf.spec.shape) for leaf in params.values())


def flops_of_a_step(step: Callable[..., Any], state: Any, *batch: Any, mesh: DeviceMesh) -> int:
    """The floating-point operations of one rank in a step, which is traced and does not run; no rank waits for it."""
    sizes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    return fs.plan(step, state, *batch, mesh=sizes, rank=mesh.get_rank()).flops


def mfu(flops: float, seconds: float, peak: float) -> float:
    """The share of the peak, in FLOPs a second, at which a rank takes a step of some FLOPs in some seconds."""
    return flops / seconds / peak


class Meter:
    """The time of steps, from the end of the first one on: `fs.jit` traces in the first.

    The time is that of the loop, so reading batches and saving checkpoints count. Read a number of each step before you
    call `end_step`, such as its loss: until then an accelerator may still be working on the step.
    """

    def __init__(self, tokens: int) -> None:
        """Take the number of tokens in a step, of all ranks together."""
        self.tokens = tokens
        self.steps = 0
        self.began = 0.0
        self.ended = 0.0

    def end_step(self) -> None:
        self.ended = time.perf_counter()
        self.steps += 1
        if self.steps == 1:
            self.began = self.ended

    def seconds_a_step(self) -> float:
        """The mean over all steps but the first; not a number before the second has ended."""
        if self.steps < 2:
            return math.nan
        return (self.ended - self.began) / (self.steps - 1)

    def tokens_a_second(self) -> float:
        return self.tokens / self.seconds_a_step()
