"""Programs: how one parameter is drawn element by element, and the drawing of a rank's part."""

import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from fshard.init.normal import normal_quantile
from fshard.init.watch import TRUNC_NORMAL
from fshard.random import fold_in, uniform_at
from fshard.shard import hash_of, local_ranges
from fshard.tree import Spec

# Operators on so few elements run in one thread, out of the cache.
_CHUNK = 1 << 15


def _uniform(u: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return u * (high - low) + low


def _normal(u: torch.Tensor, mean: float, std: float) -> torch.Tensor:
    return normal_quantile(u) * std + mean


def _trunc_normal(u: torch.Tensor, mean: float, std: float, a: float, b: float) -> torch.Tensor:
    low, high = (a - mean) / std, (b - mean) / std
    # In the lower half probabilities are small numbers, and so exact.
    sign = -1 if low > 0 else 1
    low, high = (-high, -low) if low > 0 else (low, high)
    below, upto = (math.erfc(-x / math.sqrt(2)) / 2 for x in (low, high))
    return (normal_quantile(u * (upto - below) + below) * (sign * std) + mean).clamp(a, b)


def _inverse_error_function(x: torch.Tensor) -> torch.Tensor:
    found = normal_quantile((1 + x.double()) / 2) / math.sqrt(2)
    return torch.where(x.abs() < 1, found, torch.copysign(torch.full_like(found, torch.inf), x)).to(x.dtype)


class Draw(NamedTuple):
    """What a random operator makes of uniform numbers, and its arguments with their defaults."""

    of: Callable[..., torch.Tensor]
    defaults: Mapping[str, float]


DRAWS = MappingProxyType(
    {
        "uniform_": Draw(_uniform, {"from": 0.0, "to": 1.0}),
        "normal_": Draw(_normal, {"mean": 0.0, "std": 1.0}),
        TRUNC_NORMAL: Draw(_trunc_normal, {"mean": 0.0, "std": 1.0, "a": -2.0, "b": 2.0}),
    }
)


class Step(NamedTuple):
    """One operator on a view of a parameter.

    Attributes:
        op: Its name.
        place: Shape, strides and offset of the view; None for the whole.
        args: Its other arguments.
    """

    op: str
    place: tuple[tuple[int, ...], tuple[int, ...], int] | None
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Program:
    """How a parameter is drawn, element by element.

    Attributes:
        name: The parameter's name.
        seed: The seed.
        shape: Its full shape.
        dtype: Its dtype.
        device: Where it is to be.
        steps: The operators, in their order.
    """

    name: str
    seed: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        """What ranks compare."""
        steps = [
            f"{step.op}({', '.join(hash_of(a) if isinstance(a, torch.Tensor) else repr(a) for a in step.args)})"
            + ("" if step.place is None else f" at {step.place}")
            for step in self.steps
        ]
        return f"drawn from seed {self.seed} by {', '.join(steps)}"

    def local(self, spec: Spec) -> torch.Tensor:
        """Draw this rank's shard; its padding is zero, and NaN is left where no operator wrote."""
        ranges = local_ranges(spec)
        sizes = [size for _, size in ranges]
        flat = torch.empty(math.prod(sizes), dtype=self.dtype, device=self.device)
        for start in range(0, flat.numel(), _CHUNK):
            stop = min(start + _CHUNK, flat.numel())
            positions = torch.arange(start, stop, device=self.device)
            flat[start:stop] = self._values(_global_index(positions, ranges, spec.full_shape))
        piece = flat.reshape(sizes)
        missing = [n - k for n, k in zip(spec.local_shape, sizes, strict=True)]
        return pad(piece, [n for size in reversed(missing) for n in (0, size)]) if any(missing) else piece

    @functools.cached_property
    def _keys(self) -> list[torch.Tensor]:
        """A key for each step that draws."""
        digest = hashlib.blake2b(self.name.encode(), digest_size=8).digest()
        # As an int64, which wraps around.
        seed = (self.seed + (1 << 63)) % (1 << 64) - (1 << 63)
        key = fold_in(int.from_bytes(digest, "big", signed=True), seed)
        return [fold_in(key, number) for number, _ in enumerate(self.steps)]

    def _values(self, index: torch.Tensor) -> torch.Tensor:
        """The elements of given numbers, counted through the full tensor."""
        # Rounded once, at the end.
        dtype = torch.float32 if self.dtype in (torch.float16, torch.bfloat16) else self.dtype
        blank = torch.nan if dtype.is_floating_point or dtype.is_complex else 0
        values = torch.full(index.shape, blank, dtype=dtype, device=index.device)
        draws = 0
        for step in self.steps:
            place = step.place or (self.shape, _strides(self.shape), 0)
            needs_place = step.place is not None or any(_is_table(arg) for arg in step.args)
            inside, at = _coordinates(index, *place) if needs_place else (None, [])
            part = values if step.place is None else values[inside]
            if step.op in DRAWS:
                u = uniform_at(self._keys[draws], index if step.place is None else index[inside])
                part, draws = DRAWS[step.op].of(u, *step.args).to(dtype), draws + 1
            elif step.op == "erfinv_":
                # torch's own may depend on where an element lies.
                part = _inverse_error_function(part)
            else:
                found = [c if step.place is None else c[inside] for c in at]
                args = [_elements(arg, place[0], found) if _is_table(arg) else arg for arg in step.args]
                part = getattr(part, step.op)(*args)
            if step.place is None:
                values = part
            else:
                values[inside] = part
        return values.to(self.dtype)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _global_index(
    positions: torch.Tensor, ranges: Sequence[tuple[int, int]], full_shape: Sequence[int]
) -> torch.Tensor:
    """Where in the full tensor the elements of a piece lie, both counted through."""
    # Dims inside of which the piece has all elements are one with the dim around them.
    merged: list[tuple[int, int, int]] = []
    for (start, size), full in zip(ranges, full_shape, strict=True):
        if merged and size == full:
            around_start, around_size, around_full = merged.pop()
            merged.append((around_start * full, around_size * full, around_full * full))
        else:
            merged.append((start, size, full))
    index, stride = torch.zeros_like(positions), 1
    for number, (start, size, full) in reversed(list(enumerate(merged))):
        index += (start + (positions % size if number else positions)) * stride
        positions, stride = positions // size if number else positions, stride * full
    return index


def _coordinates(
    index: torch.Tensor, shape: Sequence[int], strides: Sequence[int], offset: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Which elements, counted through the full tensor, lie in a view of it, and at which of its indices."""
    rest = index - offset
    inside = rest >= 0
    at = [torch.zeros_like(index)] * len(shape)
    for dim in sorted(range(len(shape)), key=lambda dim: -strides[dim]):
        if shape[dim] > 1:
            at[dim] = rest // strides[dim]
            inside = inside & (at[dim] < shape[dim])
            rest = rest - at[dim] * strides[dim]
    return inside & (rest == 0), at


def _is_table(arg: Any) -> bool:
    return isinstance(arg, torch.Tensor) and arg.dim() > 0


def _elements(table: torch.Tensor, shape: Sequence[int], at: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elements of a tensor that is broadcast to a shape."""
    return table.to(at[0].device).expand(shape)[tuple(at)]
