"""Signatures: what a graph was traced for, so that it serves equal calls and others are traced anew."""

from collections.abc import Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch

from fshard import _compat, comm
from fshard.tree import Exact, Flat, Sharded, Treedef, has_plain_keys, tensors_of

_CUDA = torch.backends.cuda
_MODES = (
    torch.is_grad_enabled,
    torch.is_inference_mode_enabled,
    torch.get_default_dtype,
    torch.get_default_device,
    torch.get_deterministic_debug_mode,
    torch.get_float32_matmul_precision,
    torch.backends.mha.get_fastpath_enabled,
    _CUDA.flash_sdp_enabled,
    _CUDA.mem_efficient_sdp_enabled,
    _CUDA.math_sdp_enabled,
    _CUDA.cudnn_sdp_enabled,
)


class Signature(NamedTuple):
    """Everything that a graph depends on; what is compared in each call, and what guards compare in most.

    Attributes:
        treedef: Structure of the arguments.
        values: For each leaf its spec where it is Sharded, True where it is another tensor, else its value.
        ranks: This rank's coordinates on the axes of the leaves.
        modes: Names and values of the process's modes that programs run under.
        keys: The structure's text, where equal structures may differ in the types of keys.
        avals: For each leaf its aval; None where it is no tensor.
        same: For each tensor and each Sharded leaf the place of the first one that is the same object, where one is.
    """

    treedef: Treedef
    values: tuple[Any, ...]
    ranks: tuple[int, ...]
    modes: tuple[tuple[str, Any], ...]
    keys: str = ""
    avals: tuple[Any, ...] = ()
    same: tuple[int, ...] = ()

    def facts(self, paths: Sequence[str]) -> dict[str, Any]:
        """List all but the structure by name, of leaves of a call by their paths."""
        found: dict[str, Any] = {}
        for path, known, value in zip(paths, self.avals, self.values, strict=True):
            found |= {f"{path}: {name}": fact for name, fact in known or ()}
            found[f"{path}: spec" if known else path] = value
        return found | {"repeated arguments": self.same, "ranks": self.ranks} | dict(self.modes)


def outline(flat: Flat) -> Signature:
    """The signature of one call without what guards compare; TypeError if a value cannot be hashed."""
    values = tuple([leaf.spec.exact if isinstance(leaf, Sharded) else _value(leaf) for leaf in flat.leaves])
    return Signature(flat.treedef, values, tuple(map(comm.rank, flat.axes)), tuple(_modes().items()))


def signature(asked: Signature, flat: Flat) -> Signature:
    """The signature of one call, of its outline and its arguments."""
    keys = "" if has_plain_keys(flat.treedef) else str(flat.treedef)
    tensors = tensors_of(flat.leaves)
    avals = tuple([aval(tensor) if isinstance(tensor, torch.Tensor) else None for tensor in tensors])
    # For a function may ask whether `a is b`.
    places: dict[int, int] = {}
    objects = [*compress(tensors, avals), *(leaf for leaf in flat.leaves if isinstance(leaf, Sharded))]
    firsts = tuple([places.setdefault(id(given), i) for i, given in enumerate(objects)])
    return asked._replace(keys=keys, avals=avals, same=firsts if len(places) < len(firsts) else ())


def _value(leaf: Any) -> Any:
    return True if isinstance(leaf, torch.Tensor) else None if leaf is None else exact(leaf)


def exact(value: Any) -> Exact:
    """Make a value comparable by its type and bits; TypeError if it cannot be hashed."""
    return value if isinstance(value, Exact) else Exact(value)


def _modes() -> dict[str, Any]:
    """List the modes of the process that a trace reads, or by which torch chooses operators."""
    accelerator = torch.accelerator.current_accelerator()
    devices = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    autocast = [torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None for device in devices]
    found = {mode.__name__: mode() for mode in _MODES}
    found["autocast"] = tuple(autocast)
    found["einsum"] = torch.backends.opt_einsum.enabled, torch.backends.opt_einsum.strategy
    found["oneDNN"] = torch.backends.mkldnn.enabled
    found["parametrize.cached"] = _compat.parametrization_cache() is not None
    return found


def aval(tensor: torch.Tensor) -> tuple[tuple[str, Any], ...]:
    """Return the properties of a tensor without its values, each with its name; JAX's abstract value."""
    about = {
        "shape": tensor.shape,
        # An empty tensor is viewed in the same way whatever its strides.
        "stride": tensor.stride() if tensor.numel() else (),
        "dtype": tensor.dtype,
        "device": tensor.device,
        "class": type(tensor),
        "is_conj": tensor.is_conj(),
        "is_neg": tensor.is_neg(),
        "is_inference": tensor.is_inference(),
    }
    return tuple(about.items())


def changes(before: Signature, after: Signature, paths: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Find what differs between two signatures.

    Args:
        before: The one that there is a graph for.
        after: The one of a call.
        paths: Paths of the call's leaves.

    Returns:
        By the name of each fact what it was and what it is; leaves that are no tensors by their paths.
    """
    treedefs = before.treedef, after.treedef
    if treedefs[0] != treedefs[1] or before.keys != after.keys:
        return {"the structure of the arguments": (str(treedefs[0]), str(treedefs[1]))}
    old, new = before.facts(paths), after.facts(paths)
    return {name: (f"{old.get(name)}", f"{new[name]}") for name in new if old.get(name) != new[name]}
