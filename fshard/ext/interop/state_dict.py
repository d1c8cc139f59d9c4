"""Plain state dicts of modules, from and to sharded trees."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fshard.ext.interop.module_exchange import ModuleExchange, is_full
from fshard.extend import Entry, Problem, describe, expect, refuse


def to_state_dict(
    params: Any,
    *,
    module: nn.Module | None = None,
    rank0_only: bool = False,
) -> dict[str, torch.Tensor]:
    """Gather a plain state dict, for `module.load_state_dict` or `torch.save`. Every rank must call this.

    Args:
        params: Any pytree of parameters, Sharded or full; `{**params, **buffers}` has the buffers in it too.
        module: The module whose parameters they are, on any device: a tied parameter then has all its names, and
            buffers that are not persistent are left out, as in `module.state_dict()`.
        rank0_only: Whether the first rank alone gets it; other ranks get an empty dict.

    Returns:
        Full tensors, of storage of their own, by their leaves' names, joined by dots.

    Raises:
        ValueError: on every rank, if a leaf is no tensor, the module or its state dict has none of that name, or ranks
            hold different leaves.

    >>> import fshard as fs
    >>> params = fs.shard({"w": torch.ones(3)}, fs.zero2(fs.init_mesh({"shard": -1}, device="cpu")))
    >>> to_state_dict(params)
    {'w': tensor([1., 1., 1.])}
    """
    exchange = ModuleExchange("checkpoint.to_state_dict", module)
    leaves = exchange.leaves(params, rank0_only=rank0_only)
    exchange.find_holders(leaves, {})
    state_dict: dict[str, torch.Tensor] = {}
    for name, tensor in exchange.gather(leaves, rank0_only).items():
        # Names of one parameter share its tensor, as in the state dict of a module.
        state_dict |= dict.fromkeys(exchange.saved_as(name), tensor)
    return state_dict


def from_state_dict(
    state_dict: Mapping[str, Any],
    like: Any,
    *,
    module: nn.Module | None = None,
    cast: bool = False,
) -> Any:
    """Cut this rank's shard out of each tensor of a plain state dict. Every rank must call this, with the same dict.

    Args:
        state_dict: Full tensors by name, such as `module.state_dict()`.
        like: Parameters as they shall be, perhaps with buffers: leaves say which dtype, shape and layout; their values
            are not used and may be on the meta device.
        module: The module whose parameters they are, on any device: the state dict may then have a tied parameter
            under any of its names, or under several with the same values, and need not have buffers that are not
            persistent, which stay as they are in `like` if they have values there.
        cast: Whether to convert from one floating dtype to another.

    Returns:
        A tree of the structure, specs, dtypes and devices of `like`, in storage of its own.

    Raises:
        ValueError: on every rank, with every leaf that the state dict lacks, has otherwise or has besides, or
            that differs between ranks, or where names that are tied have different values.

    >>> from_state_dict({"w": torch.ones(3)}, {"w": torch.zeros(3)})
    {'w': tensor([1., 1., 1.])}
    """
    exchange = ModuleExchange("checkpoint.from_state_dict", module)
    with exchange.raise_on_all_ranks():
        expect(isinstance(state_dict, Mapping), exchange.label, "state_dict to be a mapping", describe(state_dict))
        problems = []
        for name, value in state_dict.items():
            if type(name) is not str or not is_full(value):
                problems.append(Problem(f"{name}", describe(value), "a full tensor under a text"))
        refuse(f"{exchange.label}: this is no plain state dict", problems, "pass full tensors by name")
    exchange.find_holders(state_dict, {})
    entries = {name: Entry.of(tensor) for name, tensor in state_dict.items()}
    leaves = exchange.leaves(like, needs_values=False, cast=cast)
    return exchange.with_leaves(like, exchange.fill(entries, leaves, cast))
