"""Counter: draw only this rank's part of each parameter, with random numbers that belong to its elements."""

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

import fshard as fs
from fshard.extend import (
    arguments_of,
    drawing,
    fake_maker,
    fingerprint,
    is_fake,
    local_ranges,
    named_buffers,
    named_parameters,
    padded,
    storage_key,
    words_at,
)

# Operators on so few elements run in one thread, out of the cache.
_CHUNK = 1 << 15
# They round correctly, so that an element's bits do not depend on where in a tensor it lies.
_ELEMENTWISE = frozenset(
    ("zero_", "fill_", "mul_", "add_", "sub_", "div_", "neg_", "abs_", "clamp_", "clamp_min_", "clamp_max_")
)


def uniform_at(key: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Uniform numbers of (0, 1) that depend on nothing but the key and, one by one, an int64 index; in float64."""
    # Shift right without keeping the sign.
    digits = (words_at(key, index) >> 12) & ((1 << 52) - 1)
    # An odd number of halves, so that neither end is drawn and what is left to the other end is exact.
    return (digits * 2 + 1).double() * 2.0**-53


def _uniform(u: torch.Tensor, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
    return u * (high - low) + low


def _normal(u: torch.Tensor, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
    # The number below which a standard normal one lies with a probability: computed for each element by itself.
    return torch.special.ndtri(u) * std + mean


_DRAWS = MappingProxyType({"uniform_": _uniform, "normal_": _normal})


class Part:
    """This rank's elements of one parameter, to which operators on the parameter are applied one after another.

    Attributes:
        name: The parameter's.
        spec: The parameter's.
        values: The elements, without padding; NaN where no operator has written.
        steps: The operators, in words that ranks compare.
    """

    def __init__(self, name: str, parameter: torch.Tensor, spec: fs.Spec, seed: int) -> None:
        self.name, self.spec, self.steps = name, spec, [f"drawn from seed {seed} by"]
        self.values = drawing.blank_like(parameter.new_empty([size for _, size in local_ranges(spec)]))
        digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
        self._key = int.from_bytes(digest, "big", signed=True)

    def apply(self, op: str, view: torch.Tensor, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        """Apply an operator on a view of the parameter to the elements that this rank has.

        Raises:
            ValueError: if it is not one on each element by itself, with numbers for its other arguments.
        """
        draw: Any = _DRAWS.get(op)
        is_known = op in _ELEMENTWISE or (draw and view.is_floating_point())
        args = [arg.item() if isinstance(arg, torch.Tensor) and not arg.dim() else arg for arg in args]
        if not is_known or any(isinstance(arg, torch.Tensor) for arg in args) or any(options.values()):
            raise ValueError(f"model.init: expected operators on each element by itself, got {op} on [{self.name!r}]")
        place = view.shape, view.stride(), view.storage_offset()
        key = fs.fold_in(self._key, len(self.steps))
        self.steps.append(f"{op}{(*args,)} at {place}")
        number, mask = math.prod(self.spec.storage_shape), None
        if view.numel() < number:
            mask = torch.zeros(number, dtype=torch.bool, device=self.values.device)
            mask.as_strided(*place).fill_(True)
        flat = self.values.view(-1)
        for start in range(0, len(flat), _CHUNK):
            values = flat[start : start + _CHUNK]
            index = self._index(torch.arange(start, start + len(values), device=values.device))
            written = values.clone()
            if draw:
                written.copy_(draw(uniform_at(key, index), *args))
            else:
                getattr(written, op)(*args)
            values.copy_(written if mask is None else written.where(mask[index], values))

    def _index(self, positions: torch.Tensor) -> torch.Tensor:
        """Find where in the full tensor elements lie, both counted through."""
        index = torch.zeros_like(positions)
        places = torch.unravel_index(positions, self.values.shape)
        for (start, _), at, size in zip(local_ranges(self.spec), places, self.spec.storage_shape, strict=True):
            index = index * size + start + at
        return index


def draw_by_counter(
    module: nn.Module,
    buffers: dict[str, torch.Tensor],
    specs: Mapping[str, fs.Spec],
    seed: int,
    reset: drawing.Reset | None,
) -> Iterator[drawing.Drawn]:
    """Run resets on parameters without values, and apply their operators to this rank's parts.

    Args:
        module: The module, which is not changed.
        buffers: Its buffers by name, which are drawn with the numbers of torch's generator, or replaced.
        specs: The parameters' specs.
        seed: Where the values come from; the caller puts the state of torch's generator back.
        reset: As for `Model.init`.

    Yields:
        Each parameter, unless a reset has put another in its place.

    Raises:
        ValueError: if values are drawn otherwise than by operators on each element by itself; other errors where a
            reset asks for values.
    """
    make, names = fake_maker(), {buffer: name for name, buffer in named_buffers(module)}
    bare = drawing.copy_module(module, lambda tensor: buffers[names[tensor]] if tensor in names else make(tensor))
    # Held, so that no other tensor takes the memory of one that a reset puts another in the place of.
    held = [parameter.detach() for parameter in bare.parameters()]
    parts = {
        storage_key(made): Part(name, parameter, specs[name], seed)
        for (name, parameter), made in zip(named_parameters(module), held, strict=True)
    }

    def see(func: Any, args: Any, kwargs: Any) -> None:
        for target in _list_written(func, args, kwargs):
            part = parts.get(storage_key(target))
            if part is not None:
                part.apply(func.__name__.partition(".")[0], target, args[1:], kwargs)
            elif not is_fake(target) and drawing.has_fakes(args, kwargs):
                raise ValueError("model.init: expected buffers of numbers, got one that is computed from parameters")

    mode = drawing.Drawing(see, seed)
    for path, submodule in drawing.children_first(bare, "", set()):
        try:
            with mode:
                drawing.set_values(submodule, reset)
        except Exception as error:
            error.add_note(f'in the reset of {path or "(root)"} without values; pass mode="replay", which runs any')
            raise
    after = dict(named_buffers(bare, remove_duplicate=False))
    buffers.update({name: after[name] for name in buffers})
    for part in filter(None, map(parts.get, map(storage_key, bare.parameters()))):
        entry = fingerprint(module.get_parameter(part.name), part.spec, " ".join(part.steps))
        is_left = bool(part.values.isnan().any()) or (len(part.steps) == 1 and part.values.numel() > 0)
        yield part.name, None if is_left else padded(part.values, part.spec), entry


def _list_written(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operator of torch's writes to, lists of tensors taken apart."""
    arguments = arguments_of(target) or []
    given = dict(zip((argument.name for argument in arguments), args, strict=False)) | dict(kwargs)
    values = (given.get(argument.name) for argument in arguments if argument.written)
    lists = (value if isinstance(value, list | tuple) else [value] for value in values)
    return [tensor for tensor in itertools.chain.from_iterable(lists) if tensor is not None]
