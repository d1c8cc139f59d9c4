"""Copies of a state in memory of the processor, which later steps do not write to."""

from collections.abc import Iterable, Iterator, Sequence

import torch

from fshard.comm.ops import view_as_bytes

# The pinned memory that a copy of any size takes.
BUFFER_BYTES = 1 << 26

# Some bytes, and where they are copied to.
Move = tuple[torch.Tensor, torch.Tensor]


def copy_to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors to the processor, behind what the current streams were given so far, and wait for the copies.

    Args:
        tensors: Tensors of any devices.

    Returns:
        Copies of them, whose elements lie one after another unless they are copies of a tensor of the processor.
    """
    copies = []
    moves: list[Move] = []
    for tensor in tensors:
        if tensor.device.type == "cpu":
            copies.append(tensor.to("cpu", copy=True))
        else:
            copies.append(torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))
            moves.append((tensor, copies[-1]))
    if moves:
        _copy_through_buffer(moves)
    return copies


def copy_into(targets: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copy tensors of any devices into contiguous ones of the processor, as `copy_to_host` does."""
    moves: list[Move] = []
    for target, tensor in zip(targets, tensors, strict=True):
        if tensor.device.type == "cpu":
            target.copy_(tensor)
        else:
            moves.append((tensor, target))
    if moves:
        _copy_through_buffer(moves)


def _copy_through_buffer(moves: Sequence[Move]) -> None:
    """Copy tensors of an accelerator through one pinned buffer, into which copies are several times as fast."""
    nbytes = min(BUFFER_BYTES, sum(source.nbytes for source, _ in moves))
    buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    for batch in _batch(moves, nbytes):
        start = 0
        for source, _ in batch:
            buffer[start : start + len(source)].copy_(source, non_blocking=True)
            start += len(source)
        _wait_for_copies(batch)
        start = 0
        for _, target in batch:
            target.copy_(buffer[start : start + len(target)])
            start += len(target)


def _wait_for_copies(batch: Sequence[Move]) -> None:
    """Wait for the current stream of each device that pieces are copied from."""
    for device in {source.device for source, _ in batch}:
        torch.accelerator.current_stream(device).record_event().synchronize()


def _batch(moves: Iterable[Move], limit: int) -> Iterator[list[Move]]:
    """Cut tensors into batches of pieces, as bytes: each of so many bytes, but for the last one."""
    batch: list[Move] = []
    room = limit
    for source, target in moves:
        source_bytes = view_as_bytes(source.resolve_conj().resolve_neg().contiguous())
        target_bytes = view_as_bytes(target)
        while len(source_bytes):
            size = min(room, len(source_bytes))
            batch.append((source_bytes[:size], target_bytes[:size]))
            source_bytes = source_bytes[size:]
            target_bytes = target_bytes[size:]
            room -= size
            if not room:
                yield batch
                batch = []
                room = limit
    if batch:
        yield batch
