"""Counter: draw only this rank's part of each parameter, with random numbers that belong to its elements."""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
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

# Operators on so few elements run in one thread, and their tensors stay in the cache.
_CHUNK = 1 << 15
# These round correctly, so that the bits of an element do not depend on where in a tensor it lies.
_ELEMENTWISE = frozenset(
    ("zero_", "fill_", "mul_", "add_", "sub_", "div_", "neg_", "abs_", "clamp_", "clamp_min_", "clamp_max_")
)


def uniform_at(key: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Draw a number of (0, 1) for each element of an int64 index, from the key and that element alone; in float64."""
    # Shift right without keeping the sign.
    digits = (words_at(key, index) >> 12) & ((1 << 52) - 1)
    # An odd number of halves: neither end is drawn, and 1 - u is exact.
    return (digits * 2 + 1).double() * 2.0**-53


def _to_uniform(u: torch.Tensor, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
    return u * (high - low) + low


def _to_normal(u: torch.Tensor, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
    # The inverse of the normal distribution, because it computes each element by itself.
    return torch.special.ndtri(u) * std + mean


_DRAWS = MappingProxyType({"uniform_": _to_uniform, "normal_": _to_normal})


class LocalPart:
    """This rank's elements of one parameter, to which operators on the parameter are applied one after another.

    Attributes:
        name: The name of the parameter.
        spec: The spec of the parameter.
        values: The elements, without padding; NaN where no operator has written.
        steps: A text for each operator, which ranks compare.
    """

    def __init__(self, name: str, parameter: torch.Tensor, spec: fs.Spec, seed: int) -> None:
        self.name = name
        self.spec = spec
        self.steps = [f"drawn from seed {seed} by"]
        sizes = [size for _, size in local_ranges(spec)]
        self.values = drawing.blank_like(parameter.new_empty(sizes))
        digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
        self._key = int.from_bytes(digest, "big", signed=True)

    def apply(self, op: str, view: torch.Tensor, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        """Apply an operator on a view of the parameter to the elements that this rank has.

        Raises:
            ValueError: if the operator does not compute each element by itself, from that element and numbers.
        """
        args = [_unwrap_scalar(arg) for arg in args]
        draw = _DRAWS.get(op) if view.is_floating_point() else None
        is_known = draw is not None or op in _ELEMENTWISE
        if not is_known or any(options.values()) or any(map(torch.is_tensor, args)):
            raise ValueError(
                f"model.init: [{self.name!r}] is set by {op}, but counter supports only operators that compute each "
                "element by itself, such as normal_ and mul_ by a number"
            )
        key = fs.fold_in(self._key, len(self.steps))
        layout = view.shape, view.stride(), view.storage_offset()
        self.steps.append(f"{op}{(*args,)} at {layout}")
        size = math.prod(self.spec.storage_shape)
        mask = None
        if view.numel() < size:
            mask = torch.zeros(size, dtype=torch.bool, device=self.values.device)
            mask.as_strided(*layout).fill_(True)
        flat = self.values.view(-1)
        for start in range(0, len(flat), _CHUNK):
            values = flat[start : start + _CHUNK]
            positions = torch.arange(start, start + len(values), device=values.device)
            index = self._index_in_full(positions)
            written = values.clone()
            if draw is None:
                getattr(written, op)(*args)
            else:
                written.copy_(draw(uniform_at(key, index), *args))
            if mask is not None:
                written = written.where(mask[index], values)
            values.copy_(written)

    def finish(self, parameter: torch.Tensor) -> drawing.Drawn:
        """Return the shard of the module's parameter, or None where elements were left out, with the text to compare.

        Args:
            parameter: The parameter, for its dtype and shape.
        """
        entry = fingerprint(parameter, self.spec, " ".join(self.steps))
        is_untouched = len(self.steps) == 1 and self.values.numel() > 0
        if is_untouched or self.values.isnan().any():
            return self.name, None, entry
        return self.name, padded(self.values, self.spec), entry

    def _index_in_full(self, positions: torch.Tensor) -> torch.Tensor:
        """Turn positions in this rank's flattened elements into positions in the flattened full tensor."""
        index = torch.zeros_like(positions)
        coordinates = torch.unravel_index(positions, self.values.shape)
        for coordinate, (start, _), size in zip(
            coordinates, local_ranges(self.spec), self.spec.storage_shape, strict=True
        ):
            index = index * size + start + coordinate
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
    buffer_names = {buffer: name for name, buffer in named_buffers(module)}
    make_fake = fake_maker()

    def replace(tensor: torch.Tensor) -> torch.Tensor:
        return buffers[buffer_names[tensor]] if tensor in buffer_names else make_fake(tensor)

    bare = drawing.copy_module(module, replace)
    # Parts are looked up by memory. If a reset replaces a parameter, another tensor could take the memory of the old
    # one, so all are kept.
    fakes = [parameter.detach() for parameter in bare.parameters()]
    parts = {}
    for fake, (name, parameter) in zip(fakes, named_parameters(module), strict=True):
        parts[storage_key(fake)] = LocalPart(name, parameter, specs[name], seed)
    # A mode that sees the operators.
    mode = drawing.Drawing(partial(_apply_to_parts, parts), seed)
    for path, submodule in drawing.children_first(bare, "", set()):
        try:
            with mode:
                drawing.set_values(submodule, reset)
        except Exception as error:
            place = path or "(root)"
            error.add_note(f'The reset of {place} ran on tensors without values. mode="replay" can run any reset.')
            raise
    buffers_after = dict(named_buffers(bare, remove_duplicate=False))
    buffers.update({name: buffers_after[name] for name in buffers})
    for parameter in bare.parameters():
        part = parts.get(storage_key(parameter))
        if part is not None:
            yield part.finish(module.get_parameter(part.name))


def _apply_to_parts(parts: Mapping[Any, LocalPart], operator: Any, args: Any, kwargs: Any) -> None:
    """Apply an operator to the parts of the parameters that it writes to; others run by themselves."""
    for target in _list_written(operator, args, kwargs):
        part = parts.get(storage_key(target))
        if part is not None:
            part.apply(operator.__name__.partition(".")[0], target, args[1:], kwargs)
        elif not is_fake(target) and drawing.has_fakes(args, kwargs):
            raise ValueError("model.init: a buffer is computed from parameters, which counter draws without values")


def _list_written(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """List the tensors that an operator of torch's writes to, those of lists one by one."""
    tensors: list[Any] = []
    for i, argument in enumerate(arguments_of(operator) or []):
        if argument.written:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            tensors += value if isinstance(value, list | tuple) else [value]
    return [tensor for tensor in tensors if tensor is not None]


def _unwrap_scalar(arg: Any) -> Any:
    """Return the number of a tensor of no dims, and anything else as it is."""
    if isinstance(arg, torch.Tensor) and arg.dim() == 0:
        return arg.item()
    return arg
