"""quantize: leaves, and if asked for gradients, travel as blocks of int8."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import pad

import fshard as fs
from fshard.extend import FullyShard, expect

Tensors = Sequence[torch.Tensor]
States = Sequence[Any]
Finish = Callable[[], Tensors]
FinishWithStates = Callable[[], tuple[Tensors, States]]

LARGEST = 127


@dataclass(frozen=True)
class _Quantize(FullyShard):
    block: int = 256
    gathers: bool = True
    scatters: bool = False

    def start_rows(self, shards: Tensors, specs: Sequence[fs.Spec]) -> Finish:
        if self.axis.size == 1 or not self.gathers:
            return super().start_rows(shards, specs)
        lossy, exact = _by_kind(shards)
        batch = {i: shards[i].dim() - len(specs[i].storage_shape) for i in lossy}
        codes = [to_codes(shards[i].unsqueeze(0), self.block, batch[i])[0] for i in lossy]
        rest = super().start_rows([shards[i] for i in exact], [specs[i] for i in exact])
        travelling = fs.comm.start_all_gather(codes, self.axis, "gather")

        def finish() -> Tensors:
            out = dict(zip(exact, rest(), strict=True))
            for i, rows in zip(lossy, travelling(), strict=True):
                out[i] = from_codes(rows, shards[i].shape, shards[i].dtype, self.block, batch[i])
            return [out[i] for i in range(len(shards))]

        return finish

    def start_sums(self, stacks: Tensors, specs: Sequence[fs.Spec]) -> Finish:
        if self.axis.size == 1 or not self.scatters:
            return super().start_sums(stacks, specs)
        lossy, _ = _by_kind(stacks)
        batch = {i: stacks[i].dim() - 1 - len(specs[i].storage_shape) for i in lossy}
        return self.start_sums_of(stacks, specs, {i: to_codes(stacks[i], self.block, batch[i]) for i in lossy})

    def start_sums_of(self, stacks: Tensors, specs: Sequence[fs.Spec], codes: Mapping[int, torch.Tensor]) -> Finish:
        """Start the sums of stacks, of which some travel as bytes."""
        ones = [1] * self.axis.size
        exact = [i for i in range(len(stacks)) if i not in codes]
        rest = super().start_sums([stacks[i] for i in exact], [specs[i] for i in exact])
        travelling = fs.comm.start_all_to_all(list(codes.values()), ones, ones, self.axis, "scatter")

        def finish() -> Tensors:
            out = dict(zip(exact, rest(), strict=True))
            for i, rows in zip(codes, travelling(), strict=True):
                out[i] = self._sum(rows, stacks[i], specs[i])
            return [out[i] for i in range(len(stacks))]

        return finish

    def _sum(self, rows: torch.Tensor, stack: torch.Tensor, spec: fs.Spec) -> torch.Tensor:
        """Add what ranks sent, in their order."""
        batch = stack.dim() - 1 - len(spec.storage_shape)
        total, *others = from_codes(rows, stack.shape[1:], stack.dtype, self.block, batch)
        for other in others:
            total = total + other
        return total


@dataclass(frozen=True)
class _QuantizeWithFeedback(_Quantize):
    """Keep the error of rounding, in the shape of the stacks, and add it to the next gradient."""

    def init(self, grad: torch.Tensor) -> Any:
        if self.axis.size == 1 or not _is_lossy(grad):
            return None
        # Whether a leaf is small enough to stay whole depends on what other stages have split, and is not known here;
        # the state of one that does stays zero.
        spec = replace(self, min_shard_elements=0).layout(fs.Spec(tuple(grad.shape)))
        ((_, dim),) = self.split_dims([spec]).items()
        return torch.zeros_like(self.stack(grad, spec, dim), memory_format=torch.contiguous_format)

    # A transform with a state has the form with states.
    def start_scatter(  # type: ignore[override]
        self, grads: Tensors, specs: Sequence[fs.Spec], states: States
    ) -> FinishWithStates:
        split, after = list(self.split_dims(specs)), list(states)

        def start_sums(stacks: Tensors, specs: Sequence[fs.Spec]) -> Finish:
            due, codes = list(stacks), {}
            for place, i in enumerate(split):
                if states[i] is None:
                    continue
                # In the wider of the two dtypes, or what is left out would be rounded itself.
                due[place] = stack = stacks[place] + states[i]
                codes[place] = to_codes(stack, self.block)
                sent = from_codes(codes[place], stack.shape[1:], stack.dtype, self.block)
                # What is not finite must not stay for good.
                after[i] = torch.nan_to_num(stack - sent, nan=0.0, posinf=0.0, neginf=0.0).to(states[i].dtype)
            return self.start_sums_of(due, specs, codes)

        finish = self.start_scatter_with(start_sums, grads, specs)
        return lambda: (finish(), after)


def _by_kind(tensors: Tensors) -> tuple[list[int], list[int]]:
    """Which tensors are rounded and which are not."""
    lossy = [i for i, tensor in enumerate(tensors) if _is_lossy(tensor)]
    return lossy, [i for i in range(len(tensors)) if i not in lossy]


def _is_lossy(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() > 1


def to_codes(rows: torch.Tensor, block: int, batch: int = 0) -> torch.Tensor:
    """Round each row in blocks, to bytes: the scales of the blocks as float32, then one for each element.

    What differs in the last `batch` dims, which vmap puts there, shares no block.
    """
    count = len(rows)
    if batch:
        rows = rows.flatten(-batch).movedim(-1, 1).flatten(0, 1)
    # Lower precisions cannot hold the scales of small numbers.
    values = rows.detach().reshape(len(rows), -1).to(_wide(rows.dtype))
    size = values.shape[1]
    blocks = _padded(values, -size % block).reshape(len(rows), -(-size // block), block)
    scales = (blocks.abs().amax(-1) / LARGEST).to(torch.float32)
    # Nothing to divide by gives zeros, and so does what is not finite.
    steps = blocks / torch.where(scales > 0, scales, torch.inf).unsqueeze(-1)
    steps = steps.nan_to_num_(0.0).round_().clamp_(-LARGEST, LARGEST)
    codes = steps.to(torch.int8).reshape(len(rows), -1)[:, :size]
    bytes_of = torch.cat([scales.view(torch.uint8).reshape(len(rows), -1), codes.view(torch.uint8)], dim=1)
    return bytes_of.reshape(count, -1)


def from_codes(
    rows: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, block: int, batch: int = 0
) -> torch.Tensor:
    """Turn bytes back into values; a block that held something not finite is NaN."""
    inner, wide = torch.Size(shape[: len(shape) - batch]), _wide(dtype)
    size = inner.numel()
    blocks = -(-size // block)
    if not size:
        return torch.empty((len(rows), *shape), dtype=dtype, device=rows.device)
    parts = rows.reshape(-1, 4 * blocks + size)
    scales = parts[:, : 4 * blocks].contiguous().view(torch.float32).to(wide)
    codes = _padded(parts[:, 4 * blocks :].view(torch.int8), -size % block)
    # A scale may have been rounded up, and the largest of all numbers must not become infinite by that.
    largest = torch.finfo(wide).max / LARGEST * (1 - torch.finfo(wide).eps)
    scales = torch.where(scales.isfinite(), scales, torch.nan).clamp(max=largest)
    values = (codes.reshape(len(parts), blocks, block) * scales.unsqueeze(-1)).to(dtype)
    values = values.reshape(len(parts), -1)[:, :size]
    if not batch:
        return values.reshape(len(rows), *shape)
    return values.reshape(len(rows), -1, *inner).movedim(1, -1).reshape(len(rows), *shape)


def _padded(rows: torch.Tensor, zeros: int) -> torch.Tensor:
    """Append zeros to each row; torch's pad copies where there is nothing to append."""
    return pad(rows, (0, zeros)) if zeros else rows


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that blocks of a dtype are rounded in."""
    return torch.promote_types(dtype, torch.float32)


def quantize(
    mesh: Any,
    *,
    gather: bool = True,
    scatter: bool = False,
    error_feedback: bool = True,
    block: int = 256,
    dim: int = 0,
    min_shard_elements: int = 0,
) -> fs.ShardTransform:
    """Split each leaf over a mesh axis, as `fully_shard`, and let it travel as int8, a quarter of float32's bytes.

    Elements are rounded in blocks to 127 steps of the largest magnitude in the block, so that a gathered element is off
    by at most that divided by 254; all ranks see the same. Gradients pass straight through the rounding; tangents are
    rounded on their way, as leaves are. With `scatter` each rank's part of a gradient is rounded once and sums are
    exact. Follows ZeRO++ (Wang et al., 2023: qwZ and qgZ) and, for what rounding leaves out, error feedback (Seide et
    al., 2014; Karimireddy et al., 2019).

    Args:
        mesh: A mesh of one axis, such as mesh["shard"], or an Axis.
        gather: Whether leaves are rounded.
        scatter: Whether gradients are.
        error_feedback: Whether what rounding leaves out of gradients is kept as state and added to the next ones, so
            that no part of them is lost for good. The state is as large as the full gradients, on every rank; see
            `transform_state`.
        block: Elements that share a scale of 4 bytes.
        dim: As for `fully_shard`.
        min_shard_elements: As for `fully_shard`; leaves that stay whole are summed exactly.

    Returns:
        The transform. Integer and complex leaves, those of 8 bits, and an axis of one rank, are left exact.

    Raises:
        ValueError: if the mesh has several axes, or an argument is out of range.

    >>> import torch, fshard as fs
    >>> def program():
    ...     mesh = fs.init_mesh({"shard": -1}, device="cpu")
    ...     params = fs.shard({"w": torch.tensor([127.0, 0.7, -127.0, 3.4])}, fs.quantize(mesh))
    ...     return fs.gather(params)["w"].tolist(), fs.unshard(params)["w"]
    >>> fs.testing.spmd(program, world=2)[0]  # each block in steps of 1; what is stored stays exact
    ([127.0, 1.0, -127.0, 3.0], tensor([ 127.0000,    0.7000, -127.0000,    3.4000]))
    """
    fits, flags = type(block) is int and block > 0, (gather, scatter, error_feedback)
    expect(fits, "quantize", "block to be a number of elements, 1 or more", repr(block))
    is_clear = all(type(flag) is bool for flag in flags)
    expect(is_clear, "quantize", "gather, scatter and error_feedback to be True or False", f"{flags!r:.80}")
    plain = fs.fully_shard(fs.axis_of(mesh), dim=dim, min_shard_elements=min_shard_elements)
    assert isinstance(plain, FullyShard)
    made = _QuantizeWithFeedback if scatter and error_feedback else _Quantize
    return made(plain.axis, dim, min_shard_elements, block, gather, scatter)
