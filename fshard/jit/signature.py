"""Signatures: what a graph was traced for, so that it serves equal calls and others are traced anew."""

from collections.abc import Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch

from fshard import _compat, comm
from fshard.mesh import process_rank
from fshard.tree import Exact, Flat, Sharded, Treedef, has_plain_keys
from fshard.tree.checks import describe

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
    _CUDA.fp16_bf16_reduction_math_sdp_allowed,
)


class Signature(NamedTuple):
    """Everything that a graph depends on.

    The first five fields are compared in each call. The others are compared only where guards, which are faster, do not
    tell that the arguments look like those of the last call.

    Attributes:
        treedef: Structure of the arguments.
        values: For each leaf its spec if it is Sharded, True if it is another tensor, else its value.
        ranks: This rank's number, for simulated ranks that ask for it by an axis that no leaf is on, and its
            coordinates on the axes of the leaves.
        modes: Names and values of the process's modes that a function runs under.
        keys: The structure's text, if equal structures may differ in the types of keys.
        avals: For each leaf its abstract value; None if it is no tensor.
        same: For each tensor and each Sharded leaf the place of the first one that is the same object, if any is.
    """

    treedef: Treedef
    values: tuple[Any, ...]
    ranks: tuple[int, ...]
    modes: tuple[tuple[str, Any], ...]
    keys: str
    avals: tuple[Any, ...] = ()
    same: tuple[int, ...] = ()

    def list_entries(self, paths: Sequence[str]) -> dict[str, Any]:
        """List everything but the structure by name; leaves are named by their paths in a call."""
        entries: dict[str, Any] = {}
        for path, abstract, value in zip(paths, self.avals, self.values, strict=True):
            if abstract is None:
                entries[path] = value
                continue
            entries[path] = "a tensor"
            for name, part in abstract:
                entries[f"{path}: {name}"] = part
            entries[f"{path}: spec"] = value
        entries["repeated arguments"] = self.same
        entries["ranks"] = self.ranks
        return entries | dict(self.modes)


def make_outline(flat: Flat) -> Signature:
    """Make the signature of a call without what guards compare; TypeError if a value cannot be hashed."""
    try:
        values = tuple([leaf.spec.exact if isinstance(leaf, Sharded) else _describe_leaf(leaf) for leaf in flat.leaves])
    except TypeError:
        remedy = (
            "Pass tensors in dicts, lists, tuples or classes of fs.register_dataclass (dict(batch) of a batch of "
            "transformers), or a hashable value."
        )
        for path, leaf in flat.named_leaves:
            if not isinstance(leaf, torch.Tensor | Sharded):
                # Refuses the first one that cannot be hashed.
                make_exact(leaf, path, remedy)
        raise
    keys = "" if has_plain_keys(flat.treedef) else str(flat.treedef)
    return Signature(
        flat.treedef, values, (process_rank(), *map(comm.rank, flat.axes)), tuple(read_modes().items()), keys
    )


def complete_outline(outline: Signature, flat: Flat) -> Signature:
    """Make the whole signature of a call from its outline and its arguments."""
    tensors = flat.tensors
    avals = tuple([make_aval(tensor) if torch.is_tensor(tensor) else None for tensor in tensors])
    # A function may ask whether `a is b`.
    objects = [*compress(tensors, avals), *flat.sharded]
    places: dict[int, int] = {}
    firsts = tuple([places.setdefault(id(leaf), place) for place, leaf in enumerate(objects)])
    return outline._replace(avals=avals, same=firsts if len(places) < len(firsts) else ())


def _describe_leaf(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return True
    if leaf is None:
        return None
    return leaf if isinstance(leaf, Exact) else Exact(leaf)


def make_exact(value: Any, name: str, remedy: str) -> Exact:
    """Make a value comparable by its type and bits.

    Args:
        value: The value.
        name: What to call it in an error.
        remedy: What the caller can do if it cannot be hashed.

    Raises:
        TypeError: if it cannot be hashed.
    """
    try:
        return Exact(value)
    except TypeError as error:
        raise TypeError(f"jit: {name} is {describe(value)}, which cannot be hashed ({error}). {remedy}") from error


def read_modes() -> dict[str, Any]:
    """Read the modes of the process that a function may ask for, or by which torch chooses operators."""
    modes = {mode.__name__: mode() for mode in _MODES}
    accelerator = torch.accelerator.current_accelerator()
    devices = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    autocast = [torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None for device in devices]
    modes["autocast"] = tuple(autocast)
    modes["einsum"] = (torch.backends.opt_einsum.enabled, torch.backends.opt_einsum.strategy)
    modes["oneDNN"] = torch.backends.mkldnn.enabled
    modes["parametrize.cached"] = _compat.parametrization_cache() is not None
    return modes


def make_aval(tensor: torch.Tensor) -> tuple[tuple[str, Any], ...]:
    """Return the properties of a tensor without its values, each with its name; JAX's abstract value."""
    properties = {
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
    return tuple(properties.items())


def find_changes(before: Signature, now: Signature, paths: Sequence[str]) -> dict[str, str]:
    """Find what differs between two signatures.

    Args:
        before: The one that there is a graph for.
        now: The one of a call.
        paths: Paths of the call's leaves.

    Returns:
        For each change "was ... and is ..." by the name of the entry; leaves that are no tensors are named by their
        paths.
    """
    if before.treedef != now.treedef or before.keys != now.keys:
        return {"the structure of the arguments": f"was {before.treedef} and is {now.treedef}"}
    old = before.list_entries(paths)
    changes = {}
    for name, value in now.list_entries(paths).items():
        # A leaf that was no tensor had no shape. That it is a tensor now is an entry of its own.
        if name in old and old[name] != value:
            changes[name] = f"was {old[name]} and is {value}"
    return changes
