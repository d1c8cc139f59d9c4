"""Every private torch API that fshard uses, each with the versions it was checked on."""

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

# torch.func imports this module late, and its functions' defaults then hold the process group for good (`group=WORLD`);
# imported before there is a group, they hold none. See `release_groups_at_exit`. Checked on 2.13.
import torch.distributed.nn.functional

# Checked on 2.13. torch.distributed's own functional collectives are built on these.
from torch._C._distributed_c10d import _register_work as register_work
from torch._C._distributed_c10d import _resolve_process_group

# Checked on 2.13.
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "DispatchMode",
    "ThreadedCollective",
    "below_autograd",
    "forget_flat_weights",
    "group_size",
    "init_optimizer_state",
    "is_held_elsewhere",
    "register_torch_pytree",
    "register_work",
    "release_groups_at_exit",
    "resolve_process_group",
    "shared_dual_level",
    "start_all_gather",
    "start_all_reduce",
    "start_reduce_scatter",
    "threaded_process_groups",
    "version",
    "wait_tensor",
]

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


def below_autograd() -> AbstractContextManager[None]:
    """Compute as kernels do, so that a view holds no reference to its base. Checked on 2.13."""
    return torch._C._AutoDispatchBelowAutograd()


def is_held_elsewhere(tensor: torch.Tensor) -> bool:
    """Whether torch's own code holds a tensor beside Python. Checked on 2.13."""
    return tensor._use_count() > 1  # type: ignore[attr-defined]


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


def register_torch_pytree(cls: type, flatten: Callable[..., Any], unflatten: Callable[..., Any], name: str) -> None:
    """Make `cls` a node of torch's own pytrees, which torch.func maps over. Checked on 2.13."""
    from torch.utils._pytree import GetAttrKey, register_pytree_node

    def flatten_with_keys(node: Any) -> Any:
        children, context = flatten(node)
        return [(GetAttrKey("local"), child) for child in children], context

    register_pytree_node(cls, flatten, unflatten, serialized_type_name=name, flatten_with_keys_fn=flatten_with_keys)


def release_groups_at_exit(mesh: "DeviceMesh") -> None:
    """Let a mesh that lives to the end of the process give up its process groups before the interpreter goes.

    A gloo group joins its threads when its last reference goes. A thread that is still letting go of a tensor asks for
    the interpreter, and where that is gone the process aborts: "terminate called without an active exception".
    Checked on 2.13, where meshes keep their groups; older ones do not.
    """
    registry = getattr(mesh, "_pg_registry", None)
    if registry is not None:
        weakref.finalize(mesh, registry.clear)


def forget_flat_weights(module: torch.nn.Module) -> None:
    """Let recurrent modules drop the list of weights that their last forward kept. Checked on 2.13."""
    for submodule in module.modules():
        if isinstance(submodule, torch.nn.RNNBase):
            submodule._init_flat_weights()


def version(tensor: torch.Tensor) -> int:
    """The number of in-place writes to a tensor's memory, counted by autograd. Checked on 2.13.

    Always 0 for a tensor made in inference mode, whose writes autograd does not count.
    """
    return 0 if tensor.is_inference() else tensor._version


def init_optimizer_state(optimizer: torch.optim.Optimizer) -> bool:
    """Make the state that torch.optim classes make in their first step; False where a class has no such method.

    Parameters whose grad is None get none. Checked on 2.13.
    """
    init_group = getattr(optimizer, "_init_group", None)
    if init_group is None:
        return False
    (group,) = optimizer.param_groups
    lists = len(inspect.signature(init_group).parameters) - 1
    init_group(group, *([] for _ in range(lists)))
    return True


class ThreadedCollective(NamedTuple):
    """One rank's call of a collective.

    Attributes:
        group: Name of the process group.
        ranks: Global ranks of its members, in group order.
        kind: What is called; the same text on every member of a legal collective.
        data: This rank's input and output tensors.
        run: Moves the data, given every member's in group order.
    """

    group: str
    ranks: list[int]
    kind: str
    data: Any
    run: Callable[[list[Any]], None]


@contextmanager
def threaded_process_groups(join: Callable[[ThreadedCollective], None]) -> Iterator[None]:
    """Give each thread process groups of its own (backend "threaded"), as a process has. Checked on 2.13.

    Args:
        join: Called on the thread of each rank that calls a collective; returns when the data is in place.

    Raises:
        RuntimeError: Threaded process groups are already in use.
    """
    # Imported here because the import registers a backend.
    from torch._C._distributed_c10d import _set_thread_isolation_mode  # type: ignore[attr-defined]
    from torch.testing._internal.distributed import multi_threaded_pg

    if isinstance(dist.distributed_c10d._world, multi_threaded_pg.ThreadLocalWorld):
        raise RuntimeError("simulated ranks are already running in this process; they cannot simulate ranks themselves")

    def start(operation: Any, group: Any) -> SimpleNamespace:
        def meet(_: int, data: Any) -> Any:
            ranks = list(group._world().pg_group_ranks[group])
            join(ThreadedCollective(group.pg_name, ranks, _kind(operation, data), data, operation.work))
            return multi_threaded_pg.ret_work(data)

        return SimpleNamespace(join=meet)

    # `init_process_group` sets all of these.
    own_world = patch.multiple(
        dist.distributed_c10d,
        _world=multi_threaded_pg.ThreadLocalWorld(),
        _backend=dist.distributed_c10d._backend,
        _default_pg_init_method=dist.distributed_c10d._default_pg_init_method,
    )
    own_hook = patch.object(sys, "excepthook", sys.excepthook)
    own_join = patch.multiple(
        multi_threaded_pg.ProcessLocalGroup,
        _start_coll=staticmethod(start),
        _end_coll=staticmethod(lambda *_: None),
    )
    with own_world, own_hook, own_join:
        _set_thread_isolation_mode(True)
        try:
            yield
        finally:
            _set_thread_isolation_mode(False)


def _kind(operation: Any, data: Any) -> str:
    """Name an operation, its arguments, and the tensors that all ranks must pass alike."""
    arguments = ", ".join(f"{name}={getattr(value, 'op', value)}" for name, value in vars(operation).items())
    kind = f"{type(operation).__name__}({arguments})"
    match type(operation).__name__:
        case "AllReduce" | "Broadcast":
            alike = data
        case "ReduceScatter":
            alike = data[1]
        case _:
            return kind
    tensors = torch.utils._pytree.tree_leaves(alike)
    return f"{kind} of {', '.join(f'{tensor.dtype} {tuple(tensor.shape)}' for tensor in tensors)}"


@contextmanager
def shared_dual_level() -> Iterator[None]:
    """Hold one level of forward-mode AD for all threads, which then neither enter nor leave one. Checked on 2.13.

    The level, and functorch's count of nested `jvp`s that decides when to enter it, belong to the process: a thread
    that leaves the level takes the tangents of all others away. Inside, `forward_ad.dual_level()` does nothing, and
    tangents made under it last until this context is left.
    """
    from torch._functorch import eager_transforms
    from torch.autograd import forward_ad

    with (
        forward_ad.dual_level() as level,
        patch.multiple(forward_ad, enter_dual_level=lambda: level, exit_dual_level=lambda *, level=None: None),
        patch.object(eager_transforms, "JVP_NESTING", eager_transforms.JVP_NESTING),
    ):
        yield
