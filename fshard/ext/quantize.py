"""quantize: leaves, and on request gradients, are sent as blocks of int8."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import pad

import fshard as fs
from fshard.extend import FullyShard, expect

Tensors = Sequence[torch.Tensor]
Specs = Sequence[fs.Spec]
States = Sequence[Any]
Finish = Callable[[], Tensors]
FinishWithStates = Callable[[], tuple[Tensors, States]]

# The largest code of an element.
LARGEST = 127
# The bytes of a block's scale, a float32.
SCALE_BYTES = 4


@dataclass(frozen=True)
class _Quantize(FullyShard):
    block: int = 256
    gathers: bool = True
    scatters: bool = False

    def start_rows(self, shards: Tensors, specs: Specs) -> Finish:
        if self.axis.size == 1 or not self.gathers:
            return super().start_rows(shards, specs)
        rounded, exact = _split_by_kind(shards)
        # vmap adds dims at the end of a shard.
        batch_dims = {i: shards[i].dim() - len(specs[i].storage_shape) for i in rounded}
        codes = []
        for i in rounded:
            # [*shape] -> [1, *shape] -> [1, bytes] -> [bytes]
            codes.append(encode(shards[i].unsqueeze(0), self.block, batch_dims[i])[0])
        exact_specs = [specs[i] for i in exact]
        finish_exact = super().start_rows([shards[i] for i in exact], exact_specs)
        finish_codes = fs.comm.start_all_gather(codes, self.axis, "gather")

        def finish() -> Tensors:
            rows = dict(zip(exact, finish_exact(), strict=True))
            for i, received in zip(rounded, finish_codes(), strict=True):
                shard = shards[i]
                rows[i] = decode(received, shard.shape, shard.dtype, self.block, batch_dims[i])
            return [rows[i] for i in range(len(shards))]

        return finish

    def start_sums(self, stacks: Tensors, specs: Specs) -> Finish:
        if self.axis.size == 1 or not self.scatters:
            return super().start_sums(stacks, specs)
        rounded, _ = _split_by_kind(stacks)
        codes = {}
        for i in rounded:
            batch_dims = _count_batch_dims(stacks[i], specs[i])
            codes[i] = encode(stacks[i], self.block, batch_dims)
        return self.start_sums_of(stacks, specs, codes)

    def start_sums_of(
        self,
        stacks: Tensors,
        specs: Specs,
        codes: Mapping[int, torch.Tensor],
    ) -> Finish:
        """Start the sums of stacks, of which those with codes are sent as these."""
        exact = [i for i in range(len(stacks)) if i not in codes]
        exact_specs = [specs[i] for i in exact]
        finish_exact = super().start_sums([stacks[i] for i in exact], exact_specs)
        one_row_each = [1] * self.axis.size
        finish_codes = fs.comm.start_all_to_all(
            list(codes.values()),
            one_row_each,
            one_row_each,
            self.axis,
            "scatter",
        )

        def finish() -> Tensors:
            sums = dict(zip(exact, finish_exact(), strict=True))
            for i, received in zip(codes, finish_codes(), strict=True):
                sums[i] = self._sum(received, stacks[i], specs[i])
            return [sums[i] for i in range(len(stacks))]

        return finish

    def _sum(
        self,
        codes: torch.Tensor,
        stack: torch.Tensor,
        spec: fs.Spec,
    ) -> torch.Tensor:
        """Add up the codes of all ranks, in rank order."""
        batch_dims = _count_batch_dims(stack, spec)
        total, *others = decode(codes, stack.shape[1:], stack.dtype, self.block, batch_dims)
        for other in others:
            total = total + other
        return total


@dataclass(frozen=True)
class _QuantizeWithFeedback(_Quantize):
    """Keeps the error of rounding as state, in the shape of the stacks, and adds it to the next gradient."""

    def init(self, grad: torch.Tensor) -> Any:
        if self.axis.size == 1 or not _is_lossy(grad):
            return None
        # A leaf may be too small to be split, depending on what other stages have split, which is not known here. The
        # state of such a leaf stays zero.
        spec = replace(self, min_shard_elements=0).layout(fs.Spec(tuple(grad.shape)))
        ((_, dim),) = self.split_dims([spec]).items()
        stack = self.stack(grad, spec, dim)
        return torch.zeros_like(stack, memory_format=torch.contiguous_format)

    # A transform with a state has the form with states.
    def start_scatter(  # type: ignore[override]
        self,
        grads: Tensors,
        specs: Specs,
        states: States,
    ) -> FinishWithStates:
        split_leaves = list(self.split_dims(specs))
        new_states = list(states)

        def start_sums(stacks: Tensors, specs: Specs) -> Finish:
            corrected = list(stacks)
            codes = {}
            for place, i in enumerate(split_leaves):
                state = states[i]
                if state is None:
                    continue
                # The sum has the wider of the two dtypes. In a narrower one the remainder would be rounded itself.
                stack = stacks[place] + state
                corrected[place] = stack
                codes[place] = encode(stack, self.block)
                sent = decode(codes[place], stack.shape[1:], stack.dtype, self.block)
                # A number that is not finite would stay in the state forever.
                remainder = torch.nan_to_num(stack - sent, nan=0.0, posinf=0.0, neginf=0.0)
                new_states[i] = remainder.to(state.dtype)
            return self.start_sums_of(corrected, specs, codes)

        finish = self.start_scatter_with(start_sums, grads, specs)
        return lambda: (finish(), new_states)


def _split_by_kind(tensors: Tensors) -> tuple[list[int], list[int]]:
    """List the numbers of the tensors that are rounded, and those of the others."""
    rounded = [i for i, tensor in enumerate(tensors) if _is_lossy(tensor)]
    return rounded, [i for i in range(len(tensors)) if i not in rounded]


def _is_lossy(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() > 1


def _count_batch_dims(stack: torch.Tensor, spec: fs.Spec) -> int:
    """Count the dims that vmap has added at the end of a stack, which has a dim of rows in front."""
    return stack.dim() - 1 - len(spec.storage_shape)


def encode(rows: torch.Tensor, block: int, batch_dims: int = 0) -> torch.Tensor:
    """Round each row in blocks, to bytes: the scales of the blocks as float32, then one byte for each element.

    Elements that differ in the last `batch_dims` dims, which vmap adds, are in different blocks.
    """
    count = len(rows)
    if batch_dims:
        # [rows, *shape, *batch] -> [rows, batch, *shape] -> [rows * batch, *shape]
        rows = rows.flatten(-batch_dims).movedim(-1, 1).flatten(0, 1)
    # Lower precisions cannot hold the scales of small numbers.
    wide_dtype = _wide_dtype(rows.dtype)
    # [rows, *shape] -> [rows, elements]
    values = rows.detach().reshape(len(rows), -1).to(wide_dtype)
    size = values.shape[1]
    blocks_count = -(-size // block)
    padded = _pad(values, -size % block)
    # [rows, blocks * block] -> [rows, blocks, block]
    blocks = padded.reshape(len(rows), blocks_count, block)
    scales = (blocks.abs().amax(-1) / LARGEST).to(torch.float32)
    # A block of zeros has scale 0: dividing by infinity gives zeros. Values that are not finite become zeros too.
    divisors = torch.where(scales > 0, scales, torch.inf).unsqueeze(-1)
    steps = (blocks / divisors).nan_to_num_(0.0).round_().clamp_(-LARGEST, LARGEST)
    # [rows, blocks, block] -> [rows, elements], without padding
    codes = steps.to(torch.int8).reshape(len(rows), -1)
    codes = codes[:, :size].view(torch.uint8)
    # [rows, blocks] -> [rows, SCALE_BYTES * blocks]
    scale_bytes = scales.view(torch.uint8).reshape(len(rows), -1)
    # [rows * batch, bytes] -> [rows, batch * bytes]
    return torch.cat([scale_bytes, codes], dim=1).reshape(count, -1)


def decode(
    rows: torch.Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    block: int,
    batch_dims: int = 0,
) -> torch.Tensor:
    """Turn bytes back into values of a shape for each row. A block with a value that was not finite is NaN."""
    inner_shape = torch.Size(shape[: len(shape) - batch_dims])
    size = inner_shape.numel()
    if not size:
        return torch.empty((len(rows), *shape), dtype=dtype, device=rows.device)
    wide_dtype = _wide_dtype(dtype)
    blocks_count = -(-size // block)
    scales_end = SCALE_BYTES * blocks_count
    # [rows, batch * bytes] -> [rows * batch, bytes]
    parts = rows.reshape(-1, scales_end + size)
    scales = parts[:, :scales_end].contiguous().view(torch.float32).to(wide_dtype)
    codes = _pad(parts[:, scales_end:].view(torch.int8), -size % block)
    # A scale may have been rounded up. Without a limit the largest number of a dtype would become infinite.
    limits = torch.finfo(wide_dtype)
    largest_scale = limits.max / LARGEST * (1 - limits.eps)
    scales = torch.where(scales.isfinite(), scales, torch.nan).clamp(max=largest_scale)
    # -> [rows * batch, blocks, block]
    blocks = codes.reshape(len(parts), blocks_count, block)
    values = (blocks * scales.unsqueeze(-1)).to(dtype)
    # -> [rows * batch, elements]
    values = values.reshape(len(parts), -1)[:, :size]
    if not batch_dims:
        # -> [rows, *shape]
        return values.reshape(len(rows), *shape)
    # -> [rows, batch, *inner_shape] -> [rows, *inner_shape, batch] -> [rows, *shape]
    values = values.reshape(len(rows), -1, *inner_shape)
    return values.movedim(1, -1).reshape(len(rows), *shape)


def _pad(rows: torch.Tensor, zeros: int) -> torch.Tensor:
    """Append zeros to each row. With none, torch's pad would copy the rows."""
    return pad(rows, (0, zeros)) if zeros else rows


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
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
    """Split each leaf over a mesh axis, as `fully_shard` does, and send it as int8, a quarter of float32's bytes.

    Elements are rounded in blocks to 127 steps of the largest magnitude in the block, so a gathered element is off by
    at most that magnitude divided by 254. All ranks see the same values. Gradients pass straight through the rounding;
    tangents are rounded when they are sent, as leaves are. With `scatter`, each rank's part of a gradient is rounded
    once, and the sums of these parts are exact. Follows ZeRO++ (Wang et al., 2023: qwZ and qgZ) and error feedback
    (Seide et al., 2014; Karimireddy et al., 2019).

    Args:
        mesh: A mesh of one axis, such as mesh["shard"], or an Axis.
        gather: Whether leaves are rounded.
        scatter: Whether gradients are rounded.
        error_feedback: Whether the rounding errors of gradients are kept as state and added to the next gradients, so
            that no part of a gradient is lost for good. The state is as large as the full gradients, on every rank; see
            `transform_state`.
        block: How many elements share a scale of 4 bytes.
        dim: As for `fully_shard`.
        min_shard_elements: As for `fully_shard`. Leaves that are not split are summed exactly.

    Returns:
        The transform. It leaves integer and complex leaves and those of 8 bits exact, and all leaves on an axis of one
        rank.

    Raises:
        ValueError: if the mesh has several axes, or an argument is out of range.

    >>> import torch, fshard as fs
    >>> def program():
    ...     mesh = fs.init_mesh({"shard": -1}, device="cpu")
    ...     params = fs.shard({"w": torch.tensor([127.0, 0.7, -127.0, 3.4])}, fs.quantize(mesh))
    ...     return fs.gather(params)["w"].tolist(), fs.unshard(params)["w"]
    >>> fs.testing.spmd(program, world=2)[0]  # blocks have steps of 1; stored values stay exact
    ([127.0, 1.0, -127.0, 3.0], tensor([ 127.0000,    0.7000, -127.0000,    3.4000]))
    """
    is_size = type(block) is int and block > 0
    expect(is_size, "quantize", "block to be a number of elements, 1 or more", repr(block))
    flags = (gather, scatter, error_feedback)
    are_flags = all(type(flag) is bool for flag in flags)
    expect(are_flags, "quantize", "gather, scatter and error_feedback to be True or False", f"{flags!r:.80}")
    plain = fs.fully_shard(fs.axis_of(mesh), dim=dim, min_shard_elements=min_shard_elements)
    assert isinstance(plain, FullyShard)
    cls = _QuantizeWithFeedback if scatter and error_feedback else _Quantize
    return cls(plain.axis, dim, min_shard_elements, block, gather, scatter)
