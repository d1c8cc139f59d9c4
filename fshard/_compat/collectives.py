"""Private APIs of torch.distributed, each with the versions it was checked on."""

import weakref
from typing import TYPE_CHECKING

import torch

# torch.func imports this module late, and its functions' defaults then hold the process group for good (`group=WORLD`);
# imported before there is a group, they hold none. See `release_groups_at_exit`. Checked on 2.13.
import torch.distributed.nn.functional

# Checked on 2.13.
from torch._C._distributed_c10d import _resolve_process_group

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Tensors = list[torch.Tensor]


def resolve_process_group(name: str) -> torch.distributed.ProcessGroup:
    """The process group of a name, on this thread. Checked on 2.13."""
    return _resolve_process_group(name)  # type: ignore[arg-type]


def group_size(name: str) -> int | None:
    """The number of ranks in the process group of a name; None where this process has none. Checked on 2.13."""
    try:
        return resolve_process_group(name).size()
    except RuntimeError:
        return None


def wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for the collectives registered on `tensor`'s storage and return it. Checked on 2.13."""
    return torch.ops._c10d_functional.wait_tensor(tensor)


def start_all_gather(tensors: Tensors, size: int, group: str, fused: bool) -> Tensors:
    """Start the backend's all-gather of each tensor along dim 0, or one for all; results in flight. Checked on 2.13."""
    if fused:
        return torch.ops._c10d_functional.all_gather_into_tensor_coalesced(tensors, size, group)
    return [torch.ops._c10d_functional.all_gather_into_tensor(tensor, size, group) for tensor in tensors]


def start_reduce_scatter(tensors: Tensors, size: int, group: str, fused: bool) -> Tensors:
    """Start the backend's summing reduce-scatter along dim 0; results in flight. Checked on 2.13."""
    if fused:
        return torch.ops._c10d_functional.reduce_scatter_tensor_coalesced(tensors, "sum", size, group)
    return [torch.ops._c10d_functional.reduce_scatter_tensor(tensor, "sum", size, group) for tensor in tensors]


def start_all_reduce(tensors: Tensors, group: str, fused: bool) -> Tensors:
    """Start the backend's summing all-reduce; results in flight. Checked on 2.13."""
    if fused:
        return torch.ops._c10d_functional.all_reduce_coalesced(tensors, "sum", group)
    return [torch.ops._c10d_functional.all_reduce(tensor, "sum", group) for tensor in tensors]


def release_groups_at_exit(mesh: "DeviceMesh") -> None:
    """Let a mesh that lives to the end of the process give up its process groups before the interpreter goes.

    A gloo group joins its threads when its last reference goes. A thread that is still letting go of a tensor asks for
    the interpreter, and where that is gone the process aborts: "terminate called without an active exception".
    Checked on 2.13, where meshes keep their groups; older ones do not.
    """
    registry = getattr(mesh, "_pg_registry", None)
    if registry is not None:
        weakref.finalize(mesh, registry.clear)
