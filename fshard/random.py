"""Random keys: explicit ones for models that draw random numbers."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fshard import _compat, comm
from fshard.comm import ops
from fshard.tree import Axis
from fshard.tree.checks import describe, refuse_donated
from fshard.tree.flat import flatten

__all__ = ["EFFECTS", "keeping_generators", "random_state", "seed", "set_random_state"]


def fold_in(key: torch.Tensor | int, data: torch.Tensor | int | Axis) -> torch.Tensor:
    """Make another key of a key, such as one for each step and each rank.

    Follows jax.random.fold_in, with the finalizer of SplitMix64 (Steele et al., "Fast Splittable Pseudorandom Number
    Generators", 2014).

    Args:
        key: An int64 tensor of shape (), or a number.
        data: What the new key is for: a number, a tensor of integers, or a mesh axis from `axis_of`, which stands for
            this rank's coordinate on it: keys then differ between its ranks.

    Returns:
        An int64 tensor of shape (); of a tensor of several integers a key for each, in its shape.

    Raises:
        ValueError: if `key` or `data` is none of these, or was donated.

    >>> fold_in(0, 1).equal(fold_in(0, 1)), fold_in(0, 1).equal(fold_in(0, 2))
    (True, False)
    """
    refuse_donated("fold_in", flatten({"key": key, "data": data}))
    number: Any = torch.tensor(comm.coordinate(data)) if isinstance(data, Axis) else _integers(data)
    if number is None:
        raise ValueError(
            f"fold_in: data must be a whole number, a tensor of integers, or an Axis, got {describe(data)}. fs.axis_of "
            "takes an Axis from a mesh."
        )
    return _mix(_mix(key_of("fold_in", key)) + number.to(torch.int64) - 0x61C8864680B583EB)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finalizer on int64, whose products wrap around."""
    x = (x ^ _shift_right(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shift_right(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, by: int) -> torch.Tensor:
    """Shift right without keeping the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _integers(value: Any) -> torch.Tensor | None:
    """Make a tensor of a whole number of 64 bits, or of a tensor of integers; None of all else."""
    if type(value) is int and -(2**63) <= value < 2**63:
        return torch.tensor(value)
    if not torch.is_tensor(value):
        return None
    is_integer = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    return value if is_integer else None


def key_of(api_name: str, key: torch.Tensor | int) -> torch.Tensor:
    """Make a tensor of a key, which a step may take and return; refuse what is no whole number of 64 bits."""
    tensor = _integers(key)
    if tensor is None or tensor.dtype != torch.int64 or tensor.dim():
        raise ValueError(
            f"{api_name}: key must be an int64 tensor of shape () or a whole number, got {describe(key)}. Make one by "
            "fs.fold_in."
        )
    return tensor


def _seed(key: torch.Tensor | int) -> None:
    torch.manual_seed(int(key) & (1 << 63) - 1)


def _modules_of_generators() -> list[Any]:
    """The modules whose functions read and set the generators of the CPU and of this process's accelerator."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    modules: list[Any] = [torch.random]
    if accelerator is not None:
        modules.append(torch.get_device_module(accelerator.type))
    return modules


def _read_states() -> torch.Tensor:
    return torch.cat([module.get_rng_state() for module in _modules_of_generators()])


def _set_states(states: torch.Tensor) -> None:
    parts = states.split(_state_sizes())
    for module, state in zip(_modules_of_generators(), parts, strict=True):
        module.set_rng_state(state.clone())


@functools.cache
def _state_sizes() -> list[int]:
    with _compat.outside_modes():
        return [module.get_rng_state().numel() for module in _modules_of_generators()]


# Of torch's generators, as operators for a graph.
random_state = ops.operator(
    "random_state() -> Tensor", _read_states, lambda: torch.empty(sum(_state_sizes()), dtype=torch.uint8, device="cpu")
)
set_random_state = ops.operator("set_random_state(Tensor state) -> ()", _set_states, lambda state: None)
seed = ops.operator("seed(Tensor key) -> ()", _seed, lambda key: None, ops.TAGS)
# A graph keeps them in their order, though nothing uses their results.
EFFECTS = (set_random_state, seed)


@contextmanager
def keeping_generators() -> Iterator[None]:
    """Put the states of this process's generators back at the end of a context, in a graph too."""
    before = _compat.plain(random_state())
    try:
        yield
    finally:
        set_random_state(before)


@contextmanager
def seeded(key: torch.Tensor | int) -> Iterator[None]:
    """Draw torch's random numbers from a key, and put the generators' states back.

    torch.utils.checkpoint keeps the generators' states itself, so that what it computes again draws the same.
    """
    key = key_of("apply", key)
    with keeping_generators():
        if _compat.is_tracing():
            # A sum, because an operator of constants alone would run now.
            seed(torch.zeros((), dtype=torch.int64) + key)
        else:
            _seed(key)
        yield


def words_at(key: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Random numbers of 64 bits that depend on nothing but a key and an int64 index, element by element."""
    return _mix(index * -0x61C8864680B583EB + key.to(index.device))
