"""Copies of a state in memory of the processor, which later steps do not write to."""

from collections.abc import Sequence

import torch

from fshard.comm.ops import view_as_bytes

# The pinned memory that a copy of any size takes.
BUFFER_BYTES = 1 << 26


def copy_to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors of any devices to the processor, as `copy_into` does."""
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for tensor in tensors]
    copy_into(copies, tensors)
    return copies


@torch.inference_mode()
def copy_into(targets: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copy tensors, behind what the current streams were given so far, and wait for the copies.

    Those of an accelerator go through one pinned buffer, into which copies are several times as fast.

    Args:
        targets: Contiguous tensors of the processor.
        tensors: Tensors of any devices, of the same shapes and dtypes.
    """
    buffer = None
    for target, tensor in zip(targets, tensors, strict=True):
        if tensor.is_cpu:
            target.copy_(tensor)
            continue
        if buffer is None:
            buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
        source = view_as_bytes(tensor.resolve_conj().resolve_neg().contiguous())
        pieces = zip(source.split(BUFFER_BYTES), view_as_bytes(target).split(BUFFER_BYTES), strict=True)
        for piece, place in pieces:
            pinned = buffer[: len(piece)]
            pinned.copy_(piece, non_blocking=True)
            _wait_for_copy(piece)
            place.copy_(pinned)


def _wait_for_copy(source: torch.Tensor) -> None:
    """Wait for the current stream of the device that a tensor is copied from."""
    torch.accelerator.current_stream(source.device).record_event().synchronize()
