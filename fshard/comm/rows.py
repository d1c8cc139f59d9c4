"""Send other tensors to each rank: an all-to-all of rows of different lengths."""

from collections.abc import Callable, Sequence

import torch

from fshard.comm import ops
from fshard.comm.fake_world import has_one_rank
from fshard.comm.labels import labelled
from fshard.tree import Axis

# Every tensor starts at a multiple of this many bytes, so that it can be viewed in its own dtype.
ALIGNMENT = 16

Kind = tuple[torch.Size, torch.dtype]


def all_to_all(
    send: Sequence[Sequence[torch.Tensor]], receive: Sequence[Sequence[Kind]], axis: Axis, label: str
) -> list[list[torch.Tensor]]:
    """Send each rank tensors of its own, in one message to each, and wait for theirs.

    Args:
        send: As for `start_all_to_all`.
        receive: As for `start_all_to_all`.
        axis: The ranks that take part.
        label: Who asks, for the recorder.

    Returns:
        For each rank what it has sent.
    """
    return start_all_to_all(send, receive, axis, label)()


def start_all_to_all(
    send: Sequence[Sequence[torch.Tensor]], receive: Sequence[Sequence[Kind]], axis: Axis, label: str
) -> Callable[[], list[list[torch.Tensor]]]:
    """Start to send each rank tensors of its own, in one message to each.

    Args:
        send: For each rank of the axis the tensors that it gets, all on one device.
        receive: For each rank the shapes and dtypes of what it sends here.
        axis: The ranks that take part.
        label: Who asks, for the recorder.

    Returns:
        A function that waits and returns for each rank what it has sent.
    """
    if has_one_rank(axis):
        return lambda: [list(row) for row in send]
    flat = [_packed(row) for row in send]
    sizes = [sum(_padded(shape.numel() * dtype.itemsize) for shape, dtype in row) for row in receive]
    # Where a rank is sent nothing there is no tensor to tell the device.
    device = next((tensor.device for row in send for tensor in row), None)
    rows = torch.cat([row.to(device) for row in flat])
    lengths, about = [row.numel() for row in flat], (axis.name, axis.size, axis.group_name, labelled(label))
    buffer = ops.all_to_all(rows, lengths, sizes, *about)
    return lambda: [_unpacked(part, kinds) for part, kinds in zip(ops.wait(buffer).split(sizes), receive, strict=True)]


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    parts = []
    for tensor in tensors:
        part = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        parts.append(torch.nn.functional.pad(part, (0, _padded(part.numel()) - part.numel())))
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def _unpacked(row: torch.Tensor, kinds: Sequence[Kind]) -> list[torch.Tensor]:
    tensors, start = [], 0
    for shape, dtype in kinds:
        nbytes = shape.numel() * dtype.itemsize
        # A copy, because the whole buffer must not outlive the tensors that are dropped.
        tensors.append(row[start : start + nbytes].clone().view(dtype).reshape(shape))
        start += _padded(nbytes)
    return tensors
