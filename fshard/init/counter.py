"""Counter: draw only this rank's part of each parameter, with random numbers that belong to its elements."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fshard import _compat
from fshard.errors import Problem
from fshard.init.calls import blank_copy, calls_of
from fshard.init.program import DRAWS, Program, Step
from fshard.init.replay import device_of
from fshard.init.watch import TRUNC_NORMAL, Touch, Watch

UNDRAWN = ("elements left out by reset_parameters", "a value for each")

# All but erfinv_ round correctly, so that an element's bits do not depend on where in a tensor it lies.
_ELEMENTWISE = frozenset(
    (
        "erfinv_",
        "zero_",
        "fill_",
        "copy_",
        "mul_",
        "add_",
        "sub_",
        "div_",
        "neg_",
        "abs_",
        "clamp_",
        "clamp_min_",
        "clamp_max_",
    )
)


class Counted(NamedTuple):
    """How a module's values are drawn.

    Attributes:
        programs: How each parameter is, by name.
        module: The copy of the module that the calls ran on, for its buffers.
        problems: What cannot be drawn so.
    """

    programs: dict[str, Program]
    module: nn.Module
    problems: list[Problem]


def count(module: nn.Module, new_buffer: Callable[[torch.Tensor], torch.Tensor], seed: int) -> Counted:
    """Run what draws a module's values without values, and write down what it does with each parameter.

    Args:
        module: The module, which is not changed.
        new_buffer: Makes the copy's buffer of a buffer.
        seed: The seed; buffers are drawn with torch's generator, whose state the caller puts back.

    Returns:
        How each parameter is drawn.
    """
    made = blank_copy(module, _compat.fake_maker(), new_buffer)
    watch = _Programs(made.parameters)
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
        tensor = watch.tensors[name]
        if id(tensor) in undrawn:
            continue
        if found.get(place) is not tensor or _compat.storage_key(tensor) != watch.keys[name]:
            problems.append(Problem(f"[{name!r}]", "another tensor put in its place", "in-place operators on it"))
        elif name in watch.refused:
            problems.append(Problem(f"[{name!r}]", watch.refused[name], "operators on each element by itself"))
        elif not watch.steps[name] and tensor.numel():
            problems.append(Problem(f"[{name!r}]", *UNDRAWN))
    programs = {
        name: Program(name, seed, tuple(p.shape), p.dtype, device_of(p), tuple(watch.steps[name]))
        for name, p in module.named_parameters()
    }
    return Counted(programs, made.module, problems)


class _Programs(Watch):
    """Writes down what is done with each parameter."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.keys = {name: _compat.storage_key(tensor) for name, tensor in self.tensors.items()}
        self.steps: dict[str, list[Step]] = {name: [] for name in self.tensors}
        self.refused: dict[str, str] = {}

    def operate(self, op: str, touches: Sequence[Touch], given: Mapping[str, Any], run: Callable[..., Any]) -> Any:
        for touch in touches:
            if touch.written is None:
                continue
            if touch.overwrites:
                self.steps[touch.name].clear()
                self.refused.pop(touch.name, None)
            step = self._step(op, touch, given)
            if isinstance(step, str):
                self.refused.setdefault(touch.name, step)
            else:
                self.steps[touch.name].append(step)
        if op == TRUNC_NORMAL and _compat.is_fake(given["self"]):
            return given["self"]
        _refuse_copies_out(given)
        return run()

    def _step(self, op: str, touch: Touch, given: Mapping[str, Any]) -> Step | str:
        """The step that an operator is, or what is wrong with it."""
        written = touch.written
        assert written is not None
        own = self.tensors[touch.name]
        place = (tuple(written.shape), written.stride(), int(written.storage_offset()))
        whole = place == (tuple(own.shape), own.stride(), 0)
        if op in DRAWS:
            if given.get("generator") is not None:
                return f"{op} with a generator of its own"
            if not own.is_floating_point():
                return f"{op} of {str(own.dtype).removeprefix('torch.')} numbers"
            defaults = DRAWS[op].defaults
            return Step(op, None if whole else place, tuple(given.get(name, defaults[name]) for name in defaults))
        values = {name: value for name, value in given.items() if name not in ("self", "non_blocking")}
        alpha = values.pop("alpha", 1)
        if op not in _ELEMENTWISE or values.get("rounding_mode") is not None:
            return f"the operator {op}"
        if any(isinstance(value, torch.Tensor) and _compat.is_fake(value) for value in values.values()):
            return f"{op} of what other operators computed"
        if alpha != 1:
            # Multiplied here, because an operator may round the product or not.
            values = {name: value * alpha for name, value in values.items()}
        if op == "clamp_":
            values = {name: values.get(name) for name in ("min", "max")}
        kept = (_kept(value) for value in values.values())
        return Step(op, None if whole else place, tuple(kept))


def _kept(value: Any) -> Any:
    """An argument as it is now; a tensor of one element without dims."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().reshape(()) if value.numel() == 1 else value.detach().clone()


def _refuse_copies_out(given: Mapping[str, Any]) -> None:
    """Refuse to write what has no values into a tensor with values."""
    tensors = [value for value in given.values() if isinstance(value, torch.Tensor)]
    target = given.get("self")
    if isinstance(target, torch.Tensor) and not _compat.is_fake(target) and any(map(_compat.is_fake, tensors)):
        raise RuntimeError("a buffer is computed from parameters")
