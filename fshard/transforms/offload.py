"""offload: shards are kept in CPU memory, and computed with on an accelerator."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fshard.transforms.base import ShardTransform, Tensors
from fshard.tree import Spec


@dataclass(frozen=True)
class _Offload(ShardTransform):
    device: torch.device

    def misplaced(self, before: Sequence[ShardTransform], behind: Sequence[ShardTransform]) -> str | None:
        if before:
            return "expected offload first, as it says where shards are stored, got it behind others"
        return None

    def store(self, shard: torch.Tensor) -> torch.Tensor:
        kept = shard.to("cpu")
        # Only from pinned memory does a copy run beside what computes.
        return kept.pin_memory() if self.device.type != "cpu" else kept

    def beside(self) -> torch.Stream | None:
        return None if self.device.type == "cpu" else torch.Stream(self.device)

    def gather(self, leaves: Tensors, specs: Sequence[Spec]) -> Tensors:
        return [leaf.to(self.device, non_blocking=True) for leaf in leaves]

    def scatter(self, grads: Tensors, specs: Sequence[Spec]) -> Tensors:
        return [grad.to("cpu") for grad in grads]


def offload(device: torch.device | str | None = None) -> ShardTransform:
    """Keep parameters, and so gradients and optimizer state, in CPU memory; gather brings shards to the accelerator.

    Stands first in a composition: `compose(offload(), zero3(mesh))`. Gathers start on a stream of their own, so that
    copies run beside what computes; updates run on the CPU. Follows FSDP2's CPUOffloadPolicy.

    Args:
        device: Where leaves are computed with; None takes the accelerator that there is.

    Returns:
        The transform. Without an accelerator it changes nothing, and warns of that.

    Raises:
        ValueError: if torch knows no such device.
    """
    if device is None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if found is None:
            warnings.warn(
                "offload: this machine has no accelerator, so parameters are in CPU memory anyway and nothing is moved",
                stacklevel=2,
            )
        device = found or torch.device("cpu")
    try:
        return _Offload(torch.device(device))
    except (RuntimeError, TypeError, ValueError):
        raise ValueError(f'offload: expected device to be a device such as "cuda", or None, got {device!r}') from None
