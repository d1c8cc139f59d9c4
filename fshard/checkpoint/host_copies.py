"""Copies of a state in memory of the processor, which later steps do not write to."""

from collections.abc import Iterable, Iterator, Sequence

import torch

from fshard import comm
from fshard.tree import grouped

# The pinned memory that a copy of any size takes. While the host empties one half, the accelerator fills the other.
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
    for tensor in tensors:
        if tensor.device.type == "cpu":
            copies.append(tensor.to("cpu", copy=True))
        else:
            copies.append(torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))
    for device, positions in grouped(tensors, lambda tensor: tensor.device).items():
        if device.type != "cpu":
            _copy_through_buffer(device, [(tensors[i], copies[i]) for i in positions])
    return copies


def _copy_through_buffer(device: torch.device, moves: Sequence[Move]) -> None:
    """Copy tensors of an accelerator through one pinned buffer, into which copies are several times as fast."""
    stream = comm.copy_stream(device)
    assert stream is not None
    stream.wait_stream(torch.accelerator.current_stream(device))
    half_bytes = min(BUFFER_BYTES // 2, sum(source.nbytes for source, _ in moves))
    halves = torch.empty((2, half_bytes), dtype=torch.uint8, device="cpu", pin_memory=True)
    arrived: list[Move] = []
    event = None
    with stream:
        for n, batch in enumerate(_batch(moves, half_bytes)):
            landed = []
            start = 0
            for source, target in batch:
                part = halves[n % 2, start : start + len(source)]
                part.copy_(source, non_blocking=True)
                landed.append((part, target))
                start += len(source)
            next_event = stream.record_event()
            _empty(event, arrived)
            event = next_event
            arrived = landed
        _empty(event, arrived)


def _batch(moves: Iterable[Move], limit: int) -> Iterator[list[Move]]:
    """Cut tensors into batches of pieces, as bytes: each of so many bytes, but for the last one."""
    batch: list[Move] = []
    room = limit
    for source, target in moves:
        source_bytes = _view_as_bytes(source.resolve_conj().resolve_neg().contiguous())
        target_bytes = _view_as_bytes(target)
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


def _view_as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    # A single element counts as contiguous whatever its stride, which a view as bytes does not allow.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _empty(event: torch.Event | None, arrived: Sequence[Move]) -> None:
    """Wait until a half of the buffer is filled, and copy it out."""
    if event is not None:
        event.synchronize()
    for part, target in arrived:
        target.copy_(part)
