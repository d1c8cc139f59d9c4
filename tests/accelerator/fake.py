"""A world of many ranks in one process, on the device "emu" without its memory: no tensor of it has values.

Tensors of the processor are real, and so are messages between them, in which every rank says what this one does. A
tensor of the device knows its shape and dtype alone; what the host reads of it is zero. Collectives choose their
algorithms as for NCCL, and send nothing.
"""

from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.optim.optimizer import _foreach_supported_types
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fshard.comm import ops, recorder

aten = torch.ops.aten
# Their results' shapes depend on values.
SHAPED_BY_VALUES = (
    *(aten.nonzero.default, aten.masked_select.default, aten._unique2.default, aten.unique_consecutive.default),
    aten.repeat_interleave.Tensor,
)
MOVES = (aten.copy_.default, aten._to_copy.default)
INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)


class Store(dist.Store):
    """Where every rank leaves what this one does."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.values = ranks, {}

    def set(self, key: str, value: Any) -> None:
        self.values[key] = value if isinstance(value, bytes) else value.encode()

    def get(self, key: str) -> bytes:
        # The last part of a key is a rank's number.
        return self.values[key] if key in self.values else self.values[key.rpartition("/")[0] + "/0"]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def add(self, key: str, amount: int) -> int:
        self.values[key] = self.values.get(key, 0) + amount * self.ranks
        return self.values[key]

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        pass

    def check(self, keys: Sequence[str]) -> bool:
        return True

    def deleteKey(self, key: str) -> bool:  # noqa: N802
        return self.values.pop(key, None) is not None

    def has_extended_api(self) -> bool:
        return True


def start(emu: ModuleType, ranks: int) -> Store:
    """Begin a process group of many ranks, the first of which is this process, and return its store to be kept."""
    store = Store(ranks)

    for name, device in (("fakehost", "cpu"), ("fakeccl", "emu")):
        dist.Backend.register_backend(name, lambda _, rank, size, __: emu.fake_backend(rank, size), devices=[device])
    dist.init_process_group("cpu:fakehost,emu:fakeccl", store=store, rank=0, world_size=ranks)
    return store


class Shapes(FakeTensorMode):
    """Keeps what tensors without values have in common; a deep copy of a tensor shares it."""

    def __deepcopy__(self, memo: Any) -> "Shapes":
        # A copy would free what this one holds by weak references.
        return self


class WithoutMemory(TorchDispatchMode):
    """Runs operators of the device on shapes and dtypes; logs what the host does with them, as the device does."""

    def __init__(self, emu: ModuleType) -> None:
        super().__init__()
        # A number becomes a tensor of the processor first, so that this mode sees its copy to the device.
        torch._C._set_only_lift_cpu_tensors(True)
        # As for tensors with values.
        _foreach_supported_types.append(FakeTensor)
        self.fake = Shapes(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)
        self.events: list[str] = []
        self.streams = emu.take_events

    def take(self) -> list[str]:
        """Return the log and begin a new one."""
        taken, self.events = self.events, []
        return [*taken, *(event for event in self.streams() if event.startswith(("order", "sync")))]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        given = [each for each in tensors if each.device.type == "emu"]
        target = kwargs.get("device")
        if func.namespace == "prim" or (not given and (target is None or torch.device(target).type != "emu")):
            return func(*args, **kwargs)
        if func in ops.STARTS:
            name, (tensors, *sizes, _, axis, size, group, label) = func.name().removeprefix("fshard::"), args
            start = partial(ops._by_backend, name, tensors, size, sizes)
            with self:
                return recorder.started(name, start, tensors, (axis, size, group, label), *sizes)
        if func.namespace == "c10d":
            # Its work is done, on tensors that nobody sees.
            out = func(*tree_map_only(torch.Tensor, _of_host, args), **kwargs)
            return tree_map_only(torch.Tensor, lambda _: tensors[0], out)
        if func is aten._local_scalar_dense.default:
            self.events.append("sync aten::_local_scalar_dense")
            return torch.zeros((), dtype=args[0].dtype).item()
        if func is aten.equal.default:
            self.events.append("sync aten::equal")
            return True
        if func is aten.record_stream.default:
            self.events.append("record stream")
            return None
        if func is aten.copy_.default and args[0].device.type == "cpu":
            return self.to_host(args[0], args[1], args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if func is aten._to_copy.default and target is not None and torch.device(target).type == "cpu":
            out = torch.empty_strided(args[0].size(), args[0].stride(), dtype=kwargs.get("dtype") or args[0].dtype)
            return self.to_host(out, args[0], kwargs.get("non_blocking", False))
        if func in SHAPED_BY_VALUES:
            self.events.append(f"sync {func.name()}")
        if func in INDEXED:
            for index in filter(lambda each: each is not None, args[1]):
                if index.device.type == "cpu":
                    self.events.append("sync index")
                elif index.dtype in (torch.bool, torch.uint8):
                    self.events.append("sync index by a mask")
        if func in MOVES and len(given) < len(tensors):
            self.events.append(f"to emu {tensors[-1].numel()}")
        elif func not in (*MOVES, *INDEXED):
            assert not any(each.dim() for each in tensors if each.device.type == "cpu"), f"{func} mixes devices"
        self.events.append(f"run {func.name()}")
        with self.fake:
            return func(*args, **kwargs)

    def to_host(self, out: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        self.events.append(f"to host {source.numel()}")
        if not non_blocking:
            self.events.append("sync copy_")
        return out.zero_()


def _of_host(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype)
