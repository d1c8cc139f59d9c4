"""quantize: leaves, and if asked for gradients, travel as blocks of int8."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from fshard import comm
from fshard.mesh import Mesh, axis_of
from fshard.transforms.base import Finish, FinishWithState, ShardTransform, States, Tensors
from fshard.transforms.fully_shard import _FullyShard, fully_shard
from fshard.tree import Axis, Spec, Tree

LARGEST = 127


@dataclass(frozen=True)
class _Quantize(_FullyShard):
    block: int = 256
    gathers: bool = True
    scatters: bool = False

    def bucketed(self, nbytes: int) -> ShardTransform:
        return self

    def start_rows(self, shards: Tensors) -> Finish:
        if self.axis.size == 1 or not self.gathers:
            return super().start_rows(shards)
        lossy, exact = _by_kind(shards)
        codes = [to_codes(shards[i].unsqueeze(0), self.block)[0] for i in lossy]
        rest = super().start_rows([shards[i] for i in exact])
        travelling = comm.start_all_gather(codes, self.axis, "gather", self.algorithm)

        def finish() -> Tensors:
            out = dict(zip(exact, rest(), strict=True))
            for i, rows in zip(lossy, travelling(), strict=True):
                out[i] = from_codes(rows, shards[i].shape, shards[i].dtype, self.block)
            return [out[i] for i in range(len(shards))]

        return finish

    def start_sums(self, stacks: Tensors) -> Finish:
        if self.axis.size == 1 or not self.scatters:
            return super().start_sums(stacks)
        lossy, _ = _by_kind(stacks)
        return self.start_sums_of(stacks, {i: to_codes(stacks[i], self.block) for i in lossy})

    def start_sums_of(self, stacks: Tensors, codes: Mapping[int, torch.Tensor]) -> Finish:
        """Start the sums of stacks, of which some travel as bytes."""
        ranks = range(self.axis.size)
        kinds = [(rows.shape[1:], rows.dtype) for rows in codes.values()]
        send = [[rows[rank] for rows in codes.values()] for rank in ranks]
        rest = super().start_sums([stack for i, stack in enumerate(stacks) if i not in codes])
        travelling = comm.start_all_to_all(send, [kinds for _ in ranks], self.axis, "scatter") if codes else tuple

        def finish() -> Tensors:
            exact = iter(rest())
            received = dict(zip(codes, zip(*travelling(), strict=True), strict=True))
            return [self._sum(received[i], stack) if i in received else next(exact) for i, stack in enumerate(stacks)]

        return finish

    def _sum(self, rows: Sequence[torch.Tensor], stack: torch.Tensor) -> torch.Tensor:
        """Add what ranks sent, in their order."""
        total, *others = from_codes(torch.stack(list(rows)), stack.shape[1:], stack.dtype, self.block)
        for other in others:
            total = total + other
        return total


@dataclass(frozen=True)
class _QuantizeWithFeedback(_Quantize):
    """What rounding leaves out of a sum is kept, in the shape of the stacks, and added to the next gradient."""

    def init(self, grad: torch.Tensor) -> Tree:
        if self.axis.size == 1 or not grad.is_floating_point():
            return None
        spec = self.layout(Spec(tuple(grad.shape)))
        dims = self.split_dims([spec])
        return (
            torch.zeros_like(self.stack(grad, spec, dims[0]), memory_format=torch.contiguous_format) if dims else None
        )

    def scatter(self, grads: Tensors, specs: Sequence[Spec]) -> Tensors:
        return ShardTransform.scatter(self, grads, specs)

    def scatter_with_state(self, grads: Tensors, specs: Sequence[Spec], states: States) -> tuple[Tensors, States]:
        return self.start_scatter_with_state(grads, specs, states)()

    def start_scatter_with_state(self, grads: Tensors, specs: Sequence[Spec], states: States) -> FinishWithState:
        dims = self.split_dims(specs)
        stacks = {i: self.stack(grads[i], specs[i], dim) for i, dim in dims.items()}
        codes, after = {}, list(states)
        for place, (i, stack) in enumerate(stacks.items()):
            if states[i] is None:
                continue
            stacks[i] = stack = stack + states[i].to(stack.dtype)
            codes[place] = to_codes(stack, self.block)
            sent = from_codes(codes[place], stack.shape[1:], stack.dtype, self.block)
            # What is not finite must not stay for good.
            after[i] = torch.nan_to_num(stack - sent, nan=0.0, posinf=0.0, neginf=0.0).to(states[i].dtype)
        whole = [i for i in range(len(grads)) if i not in dims]
        scattering = self.start_sums_of(list(stacks.values()), codes)
        summing = comm.start_all_reduce([grads[i] for i in whole], self.axis, "scatter", self.algorithm)

        def finish() -> tuple[Tensors, States]:
            out = dict(zip((*stacks, *whole), (*scattering(), *summing()), strict=True))
            return [out[i] for i in range(len(out))], after

        return finish


def _by_kind(tensors: Tensors) -> tuple[list[int], list[int]]:
    """Which tensors are rounded and which are not."""
    lossy = [i for i, tensor in enumerate(tensors) if tensor.is_floating_point()]
    return lossy, [i for i in range(len(tensors)) if i not in lossy]


def to_codes(rows: torch.Tensor, block: int) -> torch.Tensor:
    """Round each row in blocks, to bytes: the scales of the blocks as float32, then one for each element."""
    values = rows.detach().reshape(len(rows), -1)
    size = values.shape[1]
    blocks = pad(values, (0, -size % block)).reshape(len(rows), -1, block)
    scales = (
        (blocks.abs().amax(-1) / LARGEST).to(torch.float32)
        if size
        else values.new_zeros((len(rows), 0), dtype=torch.float32)
    )
    usable = (scales.isfinite() & (scales > 0)).unsqueeze(-1)
    steps = torch.where(usable, blocks / scales.unsqueeze(-1), 0)
    codes = steps.round().clamp(-LARGEST, LARGEST).to(torch.int8).reshape(len(rows), -1)[:, :size]
    return torch.cat([scales.view(torch.uint8).reshape(len(rows), -1), codes.view(torch.uint8)], dim=1)


def from_codes(rows: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, block: int) -> torch.Tensor:
    """Turn bytes back into values; a block that held something not finite is NaN."""
    size = torch.Size(shape).numel()
    count = -(-size // block)
    scales = rows[:, : 4 * count].contiguous().view(torch.float32).to(dtype)
    codes = pad(rows[:, 4 * count :].view(torch.int8).to(dtype), (0, -size % block))
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    values = codes.reshape(len(rows), count, block) * scales.unsqueeze(-1)
    return values.reshape(len(rows), -1)[:, :size].reshape(len(rows), *shape)


def quantize(
    mesh: Mesh | Axis,
    *,
    gather: bool = True,
    scatter: bool = False,
    error_feedback: bool = True,
    block: int = 256,
    dim: int = 0,
    min_shard_elements: int = 0,
    algorithm: comm.Algorithm = "auto",
) -> ShardTransform:
    """Split each leaf over a mesh axis, as `fully_shard`, and let it travel as int8, a quarter of float32's bytes.

    Elements are rounded in blocks to 127 steps of the largest magnitude in the block, so that a gathered element is off
    by at most that divided by 254; all ranks see the same. Gradients pass straight through the rounding. With `scatter`
    each rank's part of a gradient is rounded once and sums are exact. Follows ZeRO++ (Wang et al., 2023: qwZ and qgZ)
    and, for what rounding leaves out, error feedback (Seide et al., 2014; Karimireddy et al., 2019).

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
        algorithm: As for `fully_shard`.

    Returns:
        The transform. Integer and complex leaves, and an axis of one rank, are left exact.

    Raises:
        ValueError: if the mesh has several axes, or an argument is out of range.
    """
    if not isinstance(block, int) or isinstance(block, bool) or block < 1:
        raise ValueError(f"quantize: block is {block!r}, needed a number of elements, 1 or more")
    if not (gather or scatter):
        raise ValueError("quantize: neither gather nor scatter is rounded, needed one of them; or use fully_shard")
    plain = fully_shard(axis_of(mesh), dim=dim, min_shard_elements=min_shard_elements, algorithm=algorithm)
    assert isinstance(plain, _FullyShard)
    made = _QuantizeWithFeedback if scatter and error_feedback else _Quantize
    return made(plain.axis, dim, min_shard_elements, algorithm, None, block, gather, scatter)
