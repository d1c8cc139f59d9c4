"""quantize: leaves, and on request gradients, are sent as blocks of int8."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
from torch.nn.functional import pad

import fshard as fs
from fshard.extend import NUMBER, FullyShard, check_arguments, check_flags

Tensors = Sequence[torch.Tensor]
Specs = Sequence[fs.Spec]
States = Sequence[Any]
Finish = Callable[[], Tensors]
FinishWithStates = Callable[[], tuple[Tensors, States]]

# The largest code of an element.
LARGEST = 127


@dataclass(frozen=True)
class _Quantize(FullyShard):
    block: int
    gathers: bool
    scatters: bool

    def is_lossy(self, tensor: torch.Tensor) -> bool:
        """Whether a leaf of this dtype is sent as codes."""
        return self.axis.size > 1 and tensor.is_floating_point() and tensor.element_size() > 1

    def start_rows(self, shards: Tensors, specs: Specs) -> Finish:
        codes = {}
        for i, shard in enumerate(shards):
            if self.gathers and self.is_lossy(shard):
                # [*shape] -> [1, *shape] -> [1, bytes] -> [bytes]
                codes[i] = encode(shard.unsqueeze(0), specs[i], self.block)[0]
        start_exact = super().start_rows
        start_codes = partial(fs.comm.start_all_gather, axis=self.axis, label="gather")
        read = partial(decode, block=self.block)
        return _start_both(start_exact, start_codes, shards, specs, codes, read)

    def start_sums(self, stacks: Tensors, specs: Specs) -> Finish:
        codes = {}
        for i, stack in enumerate(stacks):
            if self.scatters and self.is_lossy(stack):
                codes[i] = encode(stack, specs[i], self.block)
        return self.start_sums_of(stacks, specs, codes)

    def start_sums_of(
        self,
        stacks: Tensors,
        specs: Specs,
        codes: Mapping[int, torch.Tensor],
    ) -> Finish:
        """Start the sums of stacks, of which those with codes are sent as these."""
        one_row_each = [1] * self.axis.size

        def start_codes(codes: Tensors) -> Finish:
            return fs.comm.start_all_to_all(codes, one_row_each, one_row_each, self.axis, "scatter")

        return _start_both(super().start_sums, start_codes, stacks, specs, codes, self._sum)

    def _sum(
        self,
        codes: torch.Tensor,
        stack: torch.Tensor,
        spec: fs.Spec,
    ) -> torch.Tensor:
        """Add up the codes of all ranks, in rank order."""
        rows = decode(codes, stack[0], spec, self.block)
        return reduce(torch.add, rows.unbind())


def _start_both(
    start_exact: Callable[[Tensors, Specs], Finish],
    start_codes: Callable[[Tensors], Finish],
    tensors: Tensors,
    specs: Specs,
    codes: Mapping[int, torch.Tensor],
    read: Callable[[torch.Tensor, torch.Tensor, fs.Spec], torch.Tensor],
) -> Finish:
    """Start to send the codes of tensors that have some, and the other tensors as they are.

    Args:
        start_exact: Starts to send tensors as they are.
        start_codes: Starts to send codes.
        tensors: The tensors.
        specs: Their specs.
        codes: Codes by the number of their tensor.
        read: Called with received codes, their tensor and its spec; returns the result.
    """
    exact = [i for i in range(len(tensors)) if i not in codes]
    exact_specs = [specs[i] for i in exact]
    finish_exact = start_exact([tensors[i] for i in exact], exact_specs)
    finish_codes = start_codes(list(codes.values()))

    def finish() -> Tensors:
        results = dict(zip(exact, finish_exact(), strict=True))
        for i, received in zip(codes, finish_codes(), strict=True):
            results[i] = read(received, tensors[i], specs[i])
        return [results[i] for i in range(len(tensors))]

    return finish


@dataclass(frozen=True)
class _QuantizeWithFeedback(_Quantize):
    """Keeps the error of rounding as state, in the shape of the stacks, and adds it to the next gradient."""

    def init(self, grad: torch.Tensor) -> Any:
        if not self.is_lossy(grad):
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
                codes[place] = encode(stack, specs[place], self.block)
                sent = decode(codes[place], stack[0], specs[place], self.block)
                # A number that is not finite would stay in the state forever.
                remainder = torch.nan_to_num(stack - sent, nan=0.0, posinf=0.0, neginf=0.0)
                new_states[i] = remainder.to(state.dtype)
            return self.start_sums_of(corrected, specs, codes)

        finish = self.start_scatter_with(start_sums, grads, specs)
        return lambda: (finish(), new_states)


def encode(rows: torch.Tensor, spec: fs.Spec, block: int) -> torch.Tensor:
    """Round each row in blocks, to bytes: the scales of the blocks in the wide dtype, then a byte for each element.

    Rows may have more dims at the end than the leaf, which vmap adds. Elements that differ there are in different
    blocks.
    """
    count = len(rows)
    batch_dims = rows.dim() - 1 - len(spec.storage_shape)
    if batch_dims:
        # [rows, *shape, *batch] -> [rows, batch, *shape] -> [rows * batch, *shape]
        rows = rows.flatten(-batch_dims).movedim(-1, 1).flatten(0, 1)
    # [rows, *shape] -> [rows, elements]. Lower precisions cannot hold the scales of small numbers.
    values = rows.detach().reshape(len(rows), -1).to(_wide_dtype(rows.dtype))
    size = values.shape[1]
    blocks_count = -(-size // block)
    padded = _pad(values, -size % block)
    # [rows, blocks * block] -> [rows, blocks, block]
    blocks = padded.reshape(len(rows), blocks_count, block)
    scales = blocks.abs().amax(-1) / LARGEST
    # A block of zeros has scale 0: dividing by infinity gives zeros. Values that are not finite become zeros too.
    divisors = torch.where(scales > 0, scales, torch.inf).unsqueeze(-1)
    steps = (blocks / divisors).nan_to_num_(0.0).round_().clamp_(-LARGEST, LARGEST)
    # [rows, blocks, block] -> [rows, elements], without padding
    codes = steps.to(torch.int8).reshape(len(rows), -1)
    codes = codes[:, :size].view(torch.uint8)
    # [rows, blocks] -> [rows, bytes of scales]
    scale_bytes = scales.view(torch.uint8).reshape(len(rows), -1)
    # [rows * batch, bytes] -> [rows, batch * bytes]
    return torch.cat([scale_bytes, codes], dim=1).reshape(count, -1)


def decode(
    rows: torch.Tensor,
    like: torch.Tensor,
    spec: fs.Spec,
    block: int,
) -> torch.Tensor:
    """Turn bytes back into a tensor for each row, like another one. A block with a value that was not finite is NaN."""
    inner_shape = like.shape[: len(spec.storage_shape)]
    size = inner_shape.numel()
    if not size:
        return like.new_empty((len(rows), *like.shape))
    wide_dtype = _wide_dtype(like.dtype)
    blocks_count = -(-size // block)
    scales_end = wide_dtype.itemsize * blocks_count
    # [rows, batch * bytes] -> [rows * batch, bytes]
    parts = rows.reshape(-1, scales_end + size)
    scales = parts[:, :scales_end].contiguous().view(wide_dtype)
    codes = _pad(parts[:, scales_end:].view(torch.int8), -size % block)
    # A scale may have been rounded up. Without a limit the largest number of a dtype would become infinite.
    limits = torch.finfo(wide_dtype)
    largest_scale = limits.max / LARGEST * (1 - limits.eps)
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    scales = scales.clamp(max=largest_scale)
    # -> [rows * batch, blocks, block]
    blocks = codes.reshape(len(parts), blocks_count, block)
    values = (blocks * scales.unsqueeze(-1)).to(like.dtype)
    # -> [rows * batch, elements]
    values = values.reshape(len(parts), -1)[:, :size]
    # -> [rows, batch, *inner_shape] -> [rows, *inner_shape, batch] -> [rows, *shape]
    values = values.reshape(len(rows), -1, *inner_shape)
    values = values.movedim(1, -1)
    return values.reshape(len(rows), *like.shape)


def _pad(rows: torch.Tensor, zeros: int) -> torch.Tensor:
    """Append zeros to each row. With none, torch's pad would copy the rows."""
    return pad(rows, (0, zeros)) if zeros else rows


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that blocks of a dtype are rounded in, and their scales sent: it has the same range at least."""
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
    at most that magnitude divided by 254, beside the rounding of its own dtype. All ranks see the same values.
    Gradients pass straight through the rounding; tangents are rounded when they are sent, as leaves are. With
    `scatter`, each rank's part of a gradient is rounded once, and the sums of these parts are exact. Follows ZeRO++
    (Wang et al., 2023: qwZ and qgZ) and error feedback (Seide et al., 2014; Karimireddy et al., 2019).

    Args:
        mesh: A mesh of one axis, such as mesh["shard"], or an Axis.
        gather: Whether leaves are rounded.
        scatter: Whether gradients are rounded.
        error_feedback: Whether the rounding errors of gradients are kept as state and added to the next gradients, so
            that no part of a gradient is lost for good. The state is as large as the full gradients, on every rank; see
            `transform_state`.
        block: How many elements share a scale of 4 bytes, or in float64 of 8.
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
    check_arguments("quantize", NUMBER, block=block)
    check_flags("quantize", gather=gather, scatter=scatter, error_feedback=error_feedback)
    plain = fs.fully_shard(fs.axis_of(mesh), dim=dim, min_shard_elements=min_shard_elements)
    assert isinstance(plain, FullyShard)
    cls = _QuantizeWithFeedback if scatter and error_feedback else _Quantize
    return cls(plain.axis, dim, min_shard_elements, block, gather, scatter)
