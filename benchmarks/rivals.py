"""Every system under one interface: a model, its optimizer and a train step, ready to run."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from trained_gpt import SEED, Configuration

import fshard as fs

ADAMW = {"lr": 1e-3, "fused": True}
MAX_NORM = 1.0

# A layer with a parameter of this many elements is a unit of its own among FSDP2's fine units.
FINE_UNIT = 2**19


class Stored(NamedTuple):
    """Bytes that this rank keeps from one step to the next."""

    parameters: int
    optimizer: int


class System(NamedTuple):
    """A way to train.

    Attributes:
        step: Forward, backward and update; returns the loss, this rank's own or the mean over ranks.
        gradients: Forward and backward alone, the gradients dropped; returns the same.
        stored: What is kept now.
        parts: Forward and backward, clipping by the global norm and the update, to be called in turn; each returns a
            number, the first one what `step` does.
        graph: The graph of the step, where it runs as one.
        plan: What `fs.plan` says of the step on a mesh of some sizes, where it is fshard's.
    """

    step: Callable[[], torch.Tensor]
    gradients: Callable[[], torch.Tensor]
    stored: Callable[[], Stored]
    parts: tuple[Callable[[], torch.Tensor], ...]
    graph: Callable[[], Any] | None = None
    plan: Callable[[Mapping[str, int]], Any] | None = None


Batch = tuple[torch.Tensor, torch.Tensor]
Maker = Callable[[Configuration, DeviceMesh, Batch], System]


def make(name: str, configuration: Configuration, mesh: DeviceMesh) -> System:
    """Make a system; all start from the same parameters and train on the same batches."""
    return SYSTEMS[name](configuration, mesh, configuration.tokens(mesh.get_rank()))


def plain(configuration: Configuration, mesh: DeviceMesh, batch: Batch) -> System:
    """PyTorch in one process: on several ranks, each trains alone."""
    module = configuration.module()
    return torch_system(module, adamw(module), batch)


def ddp(configuration: Configuration, mesh: DeviceMesh, batch: Batch) -> System:
    module = DistributedDataParallel(configuration.module(), gradient_as_bucket_view=True)
    return torch_system(module, adamw(module), batch)


def zero_redundancy(configuration: Configuration, mesh: DeviceMesh, batch: Batch) -> System:
    module = DistributedDataParallel(configuration.module(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, **ADAMW)
    return torch_system(module, optimizer, batch)


def fsdp1(configuration: Configuration, mesh: DeviceMesh, batch: Batch) -> System:
    module = FullyShardedDataParallel(
        configuration.module(),
        process_group=mesh.get_group(),
        auto_wrap_policy=ModuleWrapPolicy({configuration.block}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    return torch_system(module, adamw(module), batch)


def fsdp2(fine: bool = False, compiled: bool = False, **options: Any) -> Maker:
    """FSDP2 with a unit for each block, and for each large layer where they are fine; the rest is the root's."""

    def maker(configuration: Configuration, mesh: DeviceMesh, batch: Batch) -> System:
        module = configuration.module()
        blocks = [part for part in module.modules() if isinstance(part, configuration.block)]
        for block in blocks if compiled else []:
            block.compile()
        for unit in fine_units(module) if fine else []:
            fully_shard(unit, mesh=mesh, **options)
        for unit in (*blocks, module):
            fully_shard(unit, mesh=mesh, **options)
        return torch_system(module, adamw(module), batch)

    return maker


def fine_units(module: nn.Module) -> list[nn.Module]:
    """List the layers with large parameters of their own; tied ones stay together in the unit around them."""
    owned = {layer: set(layer.parameters(recurse=False)) for layer in module.modules()}
    users = Counter(parameter for parameters in owned.values() for parameter in parameters)
    large = {parameter for parameter, number in users.items() if number == 1 and parameter.numel() >= FINE_UNIT}
    return [layer for layer, parameters in owned.items() if parameters & large]


def fshard(
    strategy: Callable[[DeviceMesh], fs.ShardTransform], backend: str | None = None, capturable: bool = False
) -> Maker:
    """fshard's step, eager or jitted by a backend; with all counts on the accelerator if a graph is to capture it."""

    def maker(configuration: Configuration, mesh: DeviceMesh, batch: Batch) -> System:
        # A Model holds its module: on the meta device that costs no memory, and the seed draws the same values.
        with torch.device("meta"):
            module = fs.with_init_weights(configuration.module())
        model = fs.functionalize(module, units=configuration.block)
        tx = fs.from_torch(torch.optim.AdamW, **ADAMW, capturable=capturable)
        value_and_grad = fs.value_and_grad(model.apply)
        state = fs.TrainState.create(model.init(strategy(mesh), seed=SEED), tx)
        if capturable:
            state = fs.tree_map(lambda leaf: leaf.to(mesh.device_type), state)

        def train_step(state: fs.TrainState, *batch: torch.Tensor) -> tuple[fs.TrainState, torch.Tensor]:
            if state.transform_state is None:
                loss, grads = value_and_grad(state.params, *batch)
                return fs.update(tx, state, grads, donate=True), loss
            remembering = fs.value_and_grad(model.apply, transform_state=state.transform_state)
            loss, grads, memory = remembering(state.params, *batch)
            return fs.update(tx, state, grads, donate=True, transform_state=memory), loss

        def update(state: fs.TrainState, grads: Any) -> fs.TrainState:
            return fs.update(tx, state, grads, donate=True)

        jitted = partial(fs.jit, backend=backend) if backend else lambda f, **_: f
        steps = [jitted(f, donate_argnums=0) for f in (train_step, update)]
        # All of its results, or a graph would leave the backward out.
        made = _System(state, batch, *steps, jitted(value_and_grad), jitted(clip))
        graph = (lambda: fs.make_graph(made.train_step)(made.state, *batch)) if backend == "graph" else None
        # As eager steps do, which donate in `fs.update`, it writes to the memory of the state.
        donated = fs.jit(train_step, donate_argnums=0)
        return made.system()._replace(graph=graph, plan=lambda sizes: fs.plan(donated, made.state, *batch, mesh=sizes))

    return maker


def clip(grads: Any) -> Any:
    return fs.clip_by_global_norm(MAX_NORM).update(grads, (), grads)[0]


@dataclass
class _System:
    """fshard's state and what makes it anew."""

    state: fs.TrainState
    batch: Batch
    train_step: Callable[..., Any]
    updated: Callable[..., Any]
    value_and_grad: Callable[..., Any]
    clipped: Callable[..., Any]
    grads: Any = None

    def step(self) -> torch.Tensor:
        self.state, loss = self.train_step(self.state, *self.batch)
        return loss

    def gradients(self) -> torch.Tensor:
        return self.value_and_grad(self.state.params, *self.batch)[0]

    def keep(self) -> torch.Tensor:
        loss, self.grads = self.value_and_grad(self.state.params, *self.batch)
        return loss

    def clip(self) -> torch.Tensor:
        self.grads = self.clipped(self.grads)
        return torch.zeros(())

    def update(self) -> torch.Tensor:
        self.state, self.grads = self.updated(self.state, self.grads), None
        return torch.zeros(())

    def stored(self) -> Stored:
        return Stored(*(total_bytes(fs.tree_leaves(tree)) for tree in (self.state.params, self.state.opt_state)))

    def system(self) -> System:
        return System(self.step, self.gradients, self.stored, (self.keep, self.clip, self.update))


def int8(scatter: bool = False) -> Callable[[DeviceMesh], fs.ShardTransform]:
    """ZeRO-3 with 8 bits on the wire for gathers, and for gradients where `scatter` says so."""
    return lambda mesh: fs.zero3(mesh, layout=fs.quantize(mesh["shard"], scatter=scatter))


def ahead(mesh: DeviceMesh) -> fs.ShardTransform:
    """ZeRO-3 that gathers two units ahead, for links that are slower than the processor."""
    return fs.zero3(mesh, prefetch=2)


def hybrid(mesh: DeviceMesh) -> fs.ShardTransform:
    """ZeRO-3 in each half of the ranks, as on two hosts."""
    return fs.hsdp(fs.init_mesh({"replicate": 2, "shard": -1}, device=mesh.device_type))


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), **ADAMW)


def torch_system(module: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> System:
    def backward() -> torch.Tensor:
        loss = module(*batch)
        loss.backward()
        return loss.detach()

    def clip() -> torch.Tensor:
        nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)
        return torch.zeros(())

    def update() -> torch.Tensor:
        optimizer.step()
        optimizer.zero_grad()
        return torch.zeros(())

    def step() -> torch.Tensor:
        loss = backward()
        update()
        return loss

    def gradients() -> torch.Tensor:
        loss = backward()
        optimizer.zero_grad()
        return loss

    def stored() -> Stored:
        # ZeroRedundancyOptimizer keeps this rank's share in an optimizer of its own.
        local = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
        slots = [value for state in local.state.values() for value in state.values()]
        return Stored(total_bytes(module.parameters()), total_bytes(slots))

    return System(step, gradients, stored, (backward, clip, update))


def total_bytes(leaves: Iterable[Any]) -> int:
    """Bytes of this rank's own parts of tensors; other leaves count nothing."""
    tensors = (leaf.to_local() if isinstance(leaf, DTensor) else leaf for leaf in leaves)
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))


SYSTEMS: dict[str, Maker] = {
    "plain": plain,
    "ddp": ddp,
    "zero-redundancy": zero_redundancy,
    "fsdp1": fsdp1,
    "fsdp2": fsdp2(),
    "fsdp2-fine": fsdp2(fine=True),
    "fsdp2-compiled": fsdp2(compiled=True),
    "fshard-ddp": fshard(fs.ddp),
    "fshard-zero1": fshard(fs.zero1),
    "fshard-zero2": fshard(fs.zero2),
    "fshard-zero3": fshard(fs.zero3),
    "fshard-ddp-graph": fshard(fs.ddp, "graph"),
    "fshard-zero2-graph": fshard(fs.zero2, "graph"),
    "fshard-zero3-graph": fshard(fs.zero3, "graph"),
    "fshard-zero3-inductor": fshard(fs.zero3, "inductor"),
    # As FSDP2 does: small leaves are split too, and blocks are gathered one by one.
    "fshard-zero2-split": fshard(partial(fs.zero2, min_shard_elements=0)),
    "fshard-zero3-split": fshard(partial(fs.zero3, min_shard_elements=0, bucket_bytes=0)),
    "fshard-zero3-split-graph": fshard(partial(fs.zero3, min_shard_elements=0, bucket_bytes=0), "graph"),
    "fshard-zero3-prefetch2": fshard(ahead),
    "fshard-zero3-prefetch2-graph": fshard(ahead, "graph"),
    "fshard-zero3-int8": fshard(int8()),
    "fshard-zero3-int8-both": fshard(int8(scatter=True)),
    "fshard-hsdp": fshard(hybrid),
    "fshard-hsdp-graph": fshard(hybrid, "graph"),
}
