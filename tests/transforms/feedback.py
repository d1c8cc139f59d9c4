"""A transform with a state, for tests of what carries one: the sums of rounded gradients, with error feedback."""

from dataclasses import dataclass

import torch

import fshard as fs


def in_steps(tensor: torch.Tensor) -> torch.Tensor:
    """Round to steps of 1 / 128."""
    if tensor.is_complex():
        return torch.view_as_complex(in_steps(torch.view_as_real(tensor)))
    return (tensor * 128).round() / 128


@dataclass(frozen=True)
class Feedback(fs.Wrapped):
    """Rounds gradients before they are summed, and keeps on each rank what that leaves out for the next ones."""

    def init(self, grad):
        return torch.zeros_like(grad)

    def scatter(self, grads, specs, states):
        due = [grad + state for grad, state in zip(grads, states)]
        sent = [in_steps(grad) for grad in due]
        return self.inner.scatter(sent, specs), [grad - part for grad, part in zip(due, sent)]


def feedback(mesh, **options):
    """Split leaves over an axis, with feedback."""
    return Feedback(fs.fully_shard(mesh, **{"min_shard_elements": 0, **options}))
