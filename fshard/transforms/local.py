"""Transforms that communicate nothing: cast to other dtypes, offload to CPU memory."""

from dataclasses import dataclass

import torch

from fshard import _compat
from fshard.comm.streams import current_stream
from fshard.errors import expect
from fshard.transforms.base import BuiltIn, ShardTransform, Specs, Storage, Tensors
from fshard.tree.checks import FLOATING, check_arguments, describe


@dataclass(frozen=True)
class _Cast(BuiltIn):
    gather_dtype: torch.dtype | None
    scatter_dtype: torch.dtype | None

    def gather(self, leaves: Tensors, specs: Specs) -> Tensors:
        return _to(leaves, self.gather_dtype)

    def scatter(self, grads: Tensors, specs: Specs) -> Tensors:
        return _to(grads, self.scatter_dtype)


def _to(tensors: Tensors, dtype: torch.dtype | None) -> Tensors:
    """Cast the floating ones of some tensors; None casts none."""
    if dtype is None:
        return list(tensors)
    dtypes = [dtype if tensor.is_floating_point() else tensor.dtype for tensor in tensors]
    return _compat.cast_all(tensors, dtypes)


def cast(*, gather: torch.dtype | None = None, scatter: torch.dtype | None = None) -> ShardTransform:
    """Change the dtype of floating leaves on their way in, and of gradients on their way out.

    Left of `fully_shard` it changes what travels, right of it what is computed with. Finished gradients have the dtype
    their leaf is stored in, whatever the casts.

    Args:
        gather: Dtype for leaves, or None to leave them.
        scatter: Dtype for gradients, or None to leave them.

    Returns:
        The transform.

    Raises:
        ValueError: if a dtype is not floating.

    >>> mixed = cast(gather=torch.bfloat16)
    >>> mixed == cast(gather=torch.bfloat16)
    True
    """
    check_arguments("cast", FLOATING, gather=gather, scatter=scatter)
    return _Cast(gather, scatter) if gather or scatter else ShardTransform()


@dataclass(frozen=True)
class _Offload(BuiltIn):
    device: torch.device

    @property
    def storage(self) -> Storage:
        return Storage(device=torch.device("cpu"), compute_device=self.device)

    def gather(self, leaves: Tensors, specs: Specs) -> Tensors:
        # A graph has no operator that waits for a stream, and may write to a leaf right behind its copy.
        may_run_late = current_stream(self.device) is not None
        return [leaf.to(self.device, non_blocking=may_run_late) for leaf in leaves]

    def scatter(self, grads: Tensors, specs: Specs) -> Tensors:
        stream = current_stream(self.device)
        copies = [grad.to("cpu", non_blocking=stream is not None) for grad in grads]
        if stream:
            # One wait for all copies, before the CPU reads any.
            stream.synchronize()
        return copies


def offload(device: torch.device | str | None = None) -> ShardTransform:
    """Keep parameters, and so gradients and optimizer state, in CPU memory; gather brings shards to the accelerator.

    Stands first in a composition: `compose(offload(), zero3(mesh))`. All gathers to a device copy on one stream, beside
    what computes, but those of a graph, which waits for each copy; updates run on the CPU. `shard`, `update`, `jit` (in
    a `TrainState` that the function returns) and `checkpoint.restore` leave parameters in pinned memory, from which
    alone copies run beside what computes: an update that writes in place, as of a donated state, needs no copy for
    that. Follows FSDP2's CPUOffloadPolicy.

    Args:
        device: Where leaves are computed with; None takes the accelerator that there is.

    Returns:
        The transform. Without an accelerator it changes nothing.

    Raises:
        ValueError: if `device` is no device.
        RuntimeError: of torch's, if it knows no such device.

    >>> import fshard as fs
    >>> strategy = fs.compose(fs.offload("cuda"), fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")))
    >>> strategy.storage
    Storage(device=device(type='cpu'), compute_device=device(type='cuda'))
    """
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    is_device = isinstance(device, torch.device | str | int)
    expect(is_device, "offload", "device to be a device", describe(device), "as in compose(offload(), zero3(mesh))")
    return _Offload(torch.device(device))
