"""Store and send frozen weights in 8 or 4 bits, with a transform whose gather returns floating-point numbers.

A weight (..., m, n) is stored as bytes (..., m, n / 64, 4 + 64 * bits / 8). Each block of 64 numbers of a row has one
scale in float32, and a code for each number. `fs.zero3` splits rows, so no rank has a part of a block. Codes of 8 bits
are steps of the largest magnitude (Dettmers et al., 2022, "8-bit Optimizers via Block-wise Quantization"). Codes of 4
bits are the NormalFloat levels of QLoRA (Dettmers et al., 2023). Integer leaves take no gradient, so only the model's
other leaves are trained, such as those of LoRA.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

import fshard as fs

BLOCK, SCALE_BYTES = 64, 4
# Quantiles of the normal distribution, zero among them; the largest is 1.
LEVELS = (-1.0, -0.6961928, -0.5250731, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0)
LEVELS += (0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0)
NORMAL_FLOAT = torch.tensor(LEVELS)


@dataclass(frozen=True)
class Dequantize(fs.ShardTransform):
    """Gather numbers from bytes; `fs.compose(fs.zero3(mesh), Dequantize(dtype, bits))` sends the bytes."""

    dtype: torch.dtype
    bits: int

    def gather(self, leaves: Sequence[torch.Tensor], specs: Sequence[fs.Spec]) -> list[torch.Tensor]:
        return [dequantized(leaf, self.bits).to(self.dtype) for leaf in leaves]

    def scatter(self, grads: Sequence[torch.Tensor], specs: Sequence[fs.Spec]) -> list[torch.Tensor]:
        raise TypeError("Dequantize: expected leaves of bytes, which take no gradient")


def fits(shape: Sequence[int]) -> bool:
    """Whether the rows of a weight of this shape are whole blocks; vectors, and others, stay numbers."""
    return len(shape) > 1 and shape[-1] % BLOCK == 0


def quantized(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Round a weight (..., m, n), in blocks of its rows, to bytes."""
    blocks = weight.detach().float().unflatten(-1, (-1, BLOCK))  # (..., m, n / 64, 64)
    largest = blocks.abs().amax(-1, keepdim=True)
    scales = largest / 127 if bits == 8 else largest
    steps = blocks / torch.where(scales > 0, scales, 1.0)
    if bits == 8:
        codes = steps.round().to(torch.int8).view(torch.uint8)
    else:
        levels = torch.bucketize(steps, (NORMAL_FLOAT[1:] + NORMAL_FLOAT[:-1]) / 2).to(torch.uint8)
        codes = levels[..., ::2] * 16 + levels[..., 1::2]
    return torch.cat([scales.view(torch.uint8), codes], -1)


def dequantized(stored: torch.Tensor, bits: int) -> torch.Tensor:
    """Turn bytes back into numbers, as float32 (..., m, n)."""
    scales = stored[..., :SCALE_BYTES].contiguous().view(torch.float32)  # (..., m, n / 64, 1)
    codes = stored[..., SCALE_BYTES:]
    if bits == 8:
        steps = codes.contiguous().view(torch.int8).float()
    else:
        steps = NORMAL_FLOAT.to(stored.device)[torch.stack([codes >> 4, codes & 15], -1).flatten(-2).int()]
    return (steps * scales).flatten(-2)
