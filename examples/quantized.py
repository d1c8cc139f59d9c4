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

BLOCK = 64  # numbers that have one scale
SCALE_BYTES = 4
# Quantiles of the normal distribution, zero among them; the largest is 1.
NORMAL_FLOAT = torch.tensor(
    [
        -1.0,
        -0.6961928,
        -0.5250731,
        -0.39491749,
        -0.28444138,
        -0.18477343,
        -0.09105004,
        0.0,
        0.0795803,
        0.1609302,
        0.2461123,
        0.33791524,
        0.44070983,
        0.562617,
        0.72295684,
        1.0,
    ]
)


@dataclass(frozen=True)
class Dequantize(fs.ShardTransform):
    """Gather numbers from bytes; `fs.compose(fs.zero3(mesh), Dequantize(dtype, bits))` sends the bytes."""

    dtype: torch.dtype
    bits: int

    def gather(
        self,
        leaves: Sequence[torch.Tensor],
        specs: Sequence[fs.Spec],
    ) -> list[torch.Tensor]:
        weights = []
        for leaf in leaves:
            weight = dequantized(leaf, self.bits)
            weights.append(weight.to(self.dtype))
        return weights

    def scatter(
        self,
        grads: Sequence[torch.Tensor],
        specs: Sequence[fs.Spec],
    ) -> list[torch.Tensor]:
        raise TypeError("Dequantize: expected leaves of bytes, which take no gradient")


def fits(shape: Sequence[int]) -> bool:
    """Whether the rows of a weight of this shape are whole blocks; vectors, and others, stay numbers."""
    return len(shape) > 1 and shape[-1] % BLOCK == 0


def quantized(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Round a weight (..., m, n), in blocks of its rows, to bytes."""
    numbers = weight.detach().float()
    blocks = numbers.unflatten(-1, (-1, BLOCK))  # (..., m, n / 64, 64)
    largest = blocks.abs().amax(-1, keepdim=True)  # (..., m, n / 64, 1)
    scales = largest / 127 if bits == 8 else largest
    divisors = torch.where(scales > 0, scales, 1.0)
    steps = blocks / divisors
    codes = codes_of_8_bits(steps) if bits == 8 else codes_of_4_bits(steps)
    return torch.cat([scales.view(torch.uint8), codes], -1)


def codes_of_8_bits(steps: torch.Tensor) -> torch.Tensor:
    """Round numbers from -127 to 127, and store each in a byte."""
    return steps.round().to(torch.int8).view(torch.uint8)


def codes_of_4_bits(steps: torch.Tensor) -> torch.Tensor:
    """Find the nearest levels of numbers from -1 to 1, and store two in a byte."""
    borders = (NORMAL_FLOAT[1:] + NORMAL_FLOAT[:-1]) / 2
    levels = torch.bucketize(steps, borders).to(torch.uint8)
    first = levels[..., ::2]
    second = levels[..., 1::2]
    return first * 16 + second


def dequantized(stored: torch.Tensor, bits: int) -> torch.Tensor:
    """Turn bytes back into numbers, as float32 (..., m, n)."""
    scale_bytes = stored[..., :SCALE_BYTES].contiguous()
    scales = scale_bytes.view(torch.float32)  # (..., m, n / 64, 1)
    codes = stored[..., SCALE_BYTES:].contiguous()
    if bits == 8:
        steps = codes.view(torch.int8).float()
    else:
        halves = torch.stack([codes >> 4, codes & 15], -1)
        levels = halves.flatten(-2).int()
        steps = NORMAL_FLOAT.to(stored.device)[levels]
    return (steps * scales).flatten(-2)
