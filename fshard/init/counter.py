"""Counter: draw only this rank's part of each parameter, with random numbers that belong to its elements."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from fshard import _compat
from fshard.errors import Problem
from fshard.init.calls import blank_copy, device_of
from fshard.init.replay import TRUNC_NORMAL, Calls, Place, Touch, Watch, place_of
from fshard.random import fold_in, uniform_at
from fshard.shard import hash_of, local_ranges, padded
from fshard.tree import Spec

UNDRAWN = ("elements left out by reset_parameters", "a value for each")

# Operators on so few elements run in one thread, out of the cache.
_CHUNK = 1 << 15
# All but erfinv_ round correctly, so that an element's bits do not depend on where in a tensor it lies.
_ELEMENTWISE = frozenset(
    (
        *("erfinv_", "zero_", "fill_", "copy_", "mul_", "add_", "sub_", "div_", "neg_", "abs_"),
        *("clamp_", "clamp_min_", "clamp_max_"),
    )
)
# The number below which a standard normal one lies with a probability: computed for each element by itself.
_quantile = torch.special.ndtri


def _uniform(u: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return u * (high - low) + low


def _normal(u: torch.Tensor, mean: float, std: float) -> torch.Tensor:
    return _quantile(u) * std + mean


def _trunc_normal(u: torch.Tensor, mean: float, std: float, a: float, b: float) -> torch.Tensor:
    low, high = (a - mean) / std, (b - mean) / std
    # In the lower half probabilities are small numbers, and so exact.
    sign = -1 if low > 0 else 1
    low, high = (-high, -low) if low > 0 else (low, high)
    below, upto = (math.erfc(-x / math.sqrt(2)) / 2 for x in (low, high))
    return (_quantile(u * (upto - below) + below) * (sign * std) + mean).clamp(a, b)


class Draw(NamedTuple):
    """A random operator: a function of uniform numbers, and its arguments with their defaults."""

    of: Callable[..., torch.Tensor]
    defaults: Mapping[str, float]


_DRAWS = MappingProxyType(
    {
        "uniform_": Draw(_uniform, {"from": 0.0, "to": 1.0}),
        "normal_": Draw(_normal, {"mean": 0.0, "std": 1.0}),
        TRUNC_NORMAL: Draw(_trunc_normal, {"mean": 0.0, "std": 1.0, "a": -2.0, "b": 2.0}),
    }
)


class Part:
    """This rank's elements of one parameter, to which operators on the parameter are applied one after another."""

    def __init__(self, name: str, parameter: torch.Tensor, spec: Spec, seed: int) -> None:
        """Start with NaN, which is left where no operator writes."""
        self.spec, self.dtype, self.seed = spec, parameter.dtype, seed
        self.steps: list[str] = []
        self.refused: str | None = None
        self._draws = 0
        strides = tuple(math.prod(parameter.shape[dim + 1 :]) for dim in range(parameter.dim()))
        self._whole: Place = tuple(parameter.shape), strides, 0
        self._ranges = local_ranges(spec)
        # Rounded once, at the end.
        dtype = torch.float32 if self.dtype in (torch.float16, torch.bfloat16) else self.dtype
        blank = torch.nan if dtype.is_floating_point or dtype.is_complex else 0
        number = math.prod(size for _, size in self._ranges)
        self._values = torch.full((number,), blank, dtype=dtype, device=device_of(parameter))
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        # As an int64, which wraps around.
        self._key = fold_in(int.from_bytes(digest, "big", signed=True), (seed + (1 << 63)) % (1 << 64) - (1 << 63))

    def __str__(self) -> str:
        """Say how the parameter is drawn, for ranks to compare."""
        return f"drawn from seed {self.seed} by {', '.join(self.steps)}"

    def restart(self) -> None:
        """Forget earlier operators, because the next one overwrites all elements."""
        self.steps.clear()
        self.refused, self._draws = None, 0

    def apply(self, op: str, place: Place | None, args: Sequence[Any]) -> None:
        """Apply an operator on a view of the parameter, None for all of it, to the elements that this rank has."""
        whole, view = place is None, place or self._whole
        shown = (hash_of(arg) if isinstance(arg, torch.Tensor) else repr(arg) for arg in args)
        self.steps.append(f"{op}({', '.join(shown)})" + ("" if whole else f" at {view}"))
        key = fold_in(self._key, self._draws) if op in _DRAWS else self._key
        self._draws += op in _DRAWS
        tables = any(map(_is_table, args))
        for start in range(0, self._values.numel(), _CHUNK):
            values = self._values[start : start + _CHUNK]
            positions = torch.arange(start, start + len(values), device=values.device)
            index = _global_index(positions, self._ranges, self.spec.full_shape)
            inside, at = _coordinates(index, *view) if tables or not whole else (None, [])
            if not whole:
                index, at = index[inside], [found[inside] for found in at]
            part = values if whole else values[inside]
            if op in _DRAWS:
                part.copy_(_DRAWS[op].of(uniform_at(key, index), *args))
            elif op == "erfinv_":
                # torch's own may depend on where an element lies.
                part.copy_(_quantile((1 + part.double()) / 2) / math.sqrt(2))
            else:
                getattr(part, op)(*(_elements(arg, view[0], at) if _is_table(arg) else arg for arg in args))
            if not whole:
                values[inside] = part

    def local(self) -> torch.Tensor:
        """Return this rank's shard; its padding is zero."""
        sizes = [size for _, size in self._ranges]
        return padded(self._values.to(self.dtype).reshape(sizes), self.spec)


class Counted(NamedTuple):
    """Parameters that a module's calls have drawn.

    Attributes:
        parts: This rank's part of each parameter, by name.
        module: The copy of the module that the calls ran on, for its buffers.
        problems: Parameters and submodules that cannot be drawn in this way.
    """

    parts: dict[str, Part]
    module: nn.Module
    problems: list[Problem]


def count(
    module: nn.Module,
    new_buffer: Callable[[torch.Tensor], torch.Tensor],
    specs: Mapping[str, Spec],
    seed: int,
    calls_of: Calls,
) -> Counted:
    """Run the calls that draw a module's values without values, and apply their operators to this rank's parts.

    Args:
        module: The module, which is not changed.
        new_buffer: Makes the copy's buffer of a buffer.
        specs: The parameters' specs.
        seed: The seed; buffers are drawn with torch's generator, whose state the caller puts back.
        calls_of: Lists the calls that draw the values of a copy of the module.

    Returns:
        The parts.
    """
    made = blank_copy(module, _compat.fake_maker(), new_buffer)
    parts = {name: Part(name, p, specs[name], seed) for name, p in module.named_parameters()}
    watch = _Counter(made.parameters, parts)
    keys = {name: _compat.storage_key(tensor) for name, tensor in watch.tensors.items()}
    problems: list[Problem] = []
    undrawn: set[int] = set()
    watch.seed(seed)
    for call in calls_of(made.module):
        try:
            watch.see(call.run)
        except Exception as error:
            undrawn.update(map(id, call.module.parameters()))
            reason = str(error).strip().partition("\n")[0]
            refused = f"{type(error).__name__} where parameters have no values: {reason}"
            problems.append(Problem(call.path or "(root)", refused, "a reset that asks for none"))
    found = dict(made.module.named_parameters(remove_duplicate=False))
    for name, place in made.places.items():
        tensor, part = watch.tensors[name], parts[name]
        if id(tensor) in undrawn:
            continue
        if found.get(place) is not tensor or _compat.storage_key(tensor) != keys[name]:
            problems.append(Problem(f"[{name!r}]", "another tensor put in its place", "in-place operators on it"))
        elif part.refused:
            problems.append(Problem(f"[{name!r}]", part.refused, "operators on each element by itself"))
        elif not part.steps and tensor.numel():
            problems.append(Problem(f"[{name!r}]", *UNDRAWN))
    return Counted(parts, made.module, problems)


class _Counter(Watch):
    """Applies each operator on a parameter to this rank's part of it."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], parts: Mapping[str, Part]) -> None:
        super().__init__(tensors)
        self._parts = parts

    def operate(self, op: str, touches: Sequence[Touch], given: Mapping[str, Any], run: Callable[..., Any]) -> Any:
        for touch in touches:
            if touch.written is None or touch.name not in self._parts:
                continue
            part, view = self._parts[touch.name], touch.written
            if touch.overwrites:
                part.restart()
            args = _arguments(op, view, given)
            if isinstance(args, str):
                part.refused = part.refused or args
            elif not part.refused:
                place = place_of(view)
                with _compat.outside_modes():
                    part.apply(op, None if place == place_of(self.tensors[touch.name]) else place, args)
        _refuse_copies_out(given)
        return run()


def _arguments(op: str, written: torch.Tensor, given: Mapping[str, Any]) -> Sequence[Any] | str:
    """Return the operator's other arguments, or say why it is refused."""
    if op in _DRAWS:
        if given.get("generator") is not None:
            return f"{op} with a generator of its own"
        if not written.is_floating_point():
            return f"{op} of {str(written.dtype).removeprefix('torch.')} numbers"
        return [given.get(name, default) for name, default in _DRAWS[op].defaults.items()]
    values = {name: value for name, value in given.items() if name not in ("self", "non_blocking")}
    alpha = values.pop("alpha", 1)
    if op not in _ELEMENTWISE or values.get("rounding_mode") is not None:
        return f"the operator {op}"
    if any(isinstance(value, torch.Tensor) and _compat.is_fake(value) for value in values.values()):
        return f"{op} of what other operators computed"
    if op == "clamp_":
        values = {name: values.get(name) for name in ("min", "max")}
    # Multiplied here, because an operator may round the product or not.
    scaled = values.values() if alpha == 1 else [value * alpha for value in values.values()]
    # A tensor of one element has no dims.
    return [v.reshape(()) if isinstance(v, torch.Tensor) and v.numel() == 1 else v for v in scaled]


def _refuse_copies_out(given: Mapping[str, Any]) -> None:
    """Refuse to copy a tensor without values into one with values."""
    tensors = [value for value in given.values() if isinstance(value, torch.Tensor)]
    target = given.get("self")
    if isinstance(target, torch.Tensor) and not _compat.is_fake(target) and any(map(_compat.is_fake, tensors)):
        raise RuntimeError("a buffer is computed from parameters")


def _global_index(
    positions: torch.Tensor, ranges: Sequence[tuple[int, int]], full_shape: Sequence[int]
) -> torch.Tensor:
    """Find where in the full tensor the elements of a piece lie, both counted through."""
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
    """Find which elements, counted through the full tensor, lie in a view of it, and at which of its indices."""
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
    """Pick elements of a tensor that is broadcast to a shape."""
    return table.to(at[0].device).expand(shape)[tuple(at)]
