"""From FSDP2 to fshard: the calls of an FSDP2 program and what stands for each, run side by side on two processes.

Each row trains, evaluates, saves or initialises the same network twice, and what the two sides return must be equal:
bit for bit, but where a row says how far they may be apart and why. The table of `MIGRATION.md` has these rows, and
those of `tests/ext/interop/test_migration.py`.
"""

import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Shard
from torch.nn.functional import gelu, mse_loss
from torch.optim.lr_scheduler import StepLR
from torch.utils._python_dispatch import TorchDispatchMode

import fshard as fs
from fshard.testing import assert_trees_close
from tests.ranks import on_ranks

INWARD, WIDTH, OUTWARD, ROWS_OF_A_BATCH, STEPS = 24, 48, 8, 6, 3
ADAMW = MappingProxyType({"lr": 1e-2, "weight_decay": 0.1})
FULL = StateDictOptions(full_state_dict=True)
EPS = torch.finfo(torch.float32).eps

Batch = tuple[torch.Tensor, torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(gelu(self.up(self.norm(x))))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(INWARD, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, OUTWARD)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inward(x)
        for block in self.blocks:
            h = block(h)
        return h

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))


def network(kind: type[Network] = Network) -> Any:
    """The same values on every rank and on both sides."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind()


def batches(count: int = STEPS) -> list[Batch]:
    """This rank's batches."""
    draw = torch.Generator().manual_seed(1 + dist.get_rank())
    shapes = (ROWS_OF_A_BATCH, INWARD), (ROWS_OF_A_BATCH, OUTWARD)
    return [tuple(torch.randn(shape, generator=draw) for shape in shapes) for _ in range(count)]


# What every FSDP2 program has, and what every fshard program has in its place.


def sharded(module: nn.Module | None = None, of_root: Any = None, **options: Any) -> Any:
    module = module or network()
    for block in module.blocks:
        fully_shard(block, **options)
    return fully_shard(module, **options | (of_root or {}))


def adamw_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), **ADAMW)


def fsdp2_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, between: Callable[[], Any] = lambda: None
) -> torch.Tensor:
    loss = fsdp2_backward(model, batch)
    between()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def fsdp2_backward(model: nn.Module, batch: Batch) -> torch.Tensor:
    x, y = batch
    loss = mse_loss(model(x).float(), y)
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def train_fsdp2(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **between: Any) -> Any:
    optimizer = optimizer or adamw_of(model)
    losses = [fsdp2_step(model, optimizer, batch, **between) for batch in batches()]
    return {"losses": losses, "params": full(model)}


def fsdp2_gradients(model: nn.Module, batch: Batch) -> Any:
    return fsdp2_backward(model, batch), {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {
        name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for name, tensor in tensors.items()
    }


def mesh_of_ranks() -> Any:
    return fs.init_mesh({"shard": -1}, device="cpu")


def zero3(mesh: Any = None, **options: Any) -> fs.ShardTransform:
    """ZeRO-3 of a network so small that biases would be kept whole and units merged."""
    return fs.zero3(mesh or mesh_of_ranks(), min_shard_elements=0, merge_bytes=0, **options)


def adamw() -> fs.Optimizer:
    return fs.from_torch(torch.optim.AdamW, **ADAMW)


def functional(module: nn.Module | None = None) -> fs.Model:
    return fs.functionalize(module or network(), units=Block)


def loss_of(model: fs.Model) -> Callable[[Any, Batch], torch.Tensor]:
    return lambda params, batch: mse_loss(model.apply(params, batch[0]).float(), batch[1])


class Program(NamedTuple):
    """An fshard program: a model, its first state, and its train step."""

    model: fs.Model
    state: fs.TrainState
    step: Callable[[fs.TrainState, Batch], tuple[fs.TrainState, torch.Tensor]]


def program(
    strategy: fs.ShardTransform | None = None, tx: fs.Optimizer | None = None, module: nn.Module | None = None
) -> Program:
    model, tx = functional(module), tx or adamw()

    def train_step(state: fs.TrainState, batch: Batch) -> tuple[fs.TrainState, torch.Tensor]:
        loss, grads = fs.value_and_grad(loss_of(model))(state.params, batch)
        return fs.update(tx, state, grads), loss

    return Program(model, fs.TrainState.create(model.init(strategy or zero3()), tx), train_step)


def stepped(made: Program) -> tuple[fs.TrainState, list[torch.Tensor]]:
    state, losses = made.state, []
    for batch in batches():
        state, loss = made.step(state, batch)
        losses.append(loss)
    return state, losses


def train(made: Program) -> Any:
    state, losses = stepped(made)
    return {"losses": losses, "params": fs.unshard(state.params)}


def evaluated(made: Program) -> torch.Tensor:
    return made.model.apply(made.state.params, batches()[0][0])


def gradients(made: Program, batch: Batch, **options: Any) -> Any:
    loss, grads = fs.value_and_grad(loss_of(made.model), **options)(made.state.params, batch)
    return loss, fs.unshard(grads)


# What several rows use.


def accumulated_by_fsdp2(model: Any, before: Callable[[Any, bool], None] = lambda model, last: None) -> Any:
    """Parameters after an update with the gradients of four microbatches; `before` is told which one is the last."""
    optimizer, microbatches = adamw_of(model), batches(4)
    for number, (x, y) in enumerate(microbatches, start=1):
        before(model, number == len(microbatches))
        (mse_loss(model(x), y) / len(microbatches)).backward()
    optimizer.step()
    return full(model)


def accumulated(communicate: str, strategy: fs.ShardTransform | None = None) -> Any:
    """The same by fshard."""
    model, state, _ = program(strategy)
    _, grads = fs.accumulate(loss_of(model), communicate=communicate)(state.params, batches(4))
    return fs.unshard(fs.update(adamw(), state, grads).params)


def others() -> Network:
    """A network of other values, to load into."""
    module = network()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.5)
    return module


def with_dropout() -> Network:
    module = network()
    module.head = nn.Sequential(nn.Dropout(0.5), module.head)
    return module


def half_frozen() -> Network:
    module = network()
    module.inward.requires_grad_(False)
    module.blocks[1].up.requires_grad_(False)
    return module


def checkpointed() -> Network:
    module = network()
    module.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in module.blocks)
    return module


class Routed(Network):
    """Each rank uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        # Registered in the order of their use, in which ranks gather them.
        del self.head
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, OUTWARD)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.experts[dist.get_rank()](self.features(x)))


class Tied(Network):
    """With a buffer, and a weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((), 2.0))
        self.blocks[1].up.weight = self.blocks[0].up.weight


class Gathers(TorchDispatchMode):
    """Counts the all-gathers that torch.distributed starts."""

    number = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += "allgather" in function.name()
        return function(*args, **(kwargs or {}))


def drawn(params: Any) -> Any:
    """The values of norms, and of layers whether they are as wide as torch draws them."""
    found = {name: value for name, value in params.items() if "norm" in name}
    for name in params.keys() - found.keys():
        inputs = params[name.replace("bias", "weight")].shape[1]
        found[name] = bool(params[name].abs().max() <= inputs**-0.5 < 2 * params[name].abs().max())
    return found


def one_overflows() -> list[Batch]:
    """Batches of which the second is infinite on the first rank."""
    found = batches(4)
    if dist.get_rank() == 0:
        x, y = found[1]
        found[1] = (x, torch.full_like(y, torch.inf))
    return found


def shared_directory() -> str:
    """A directory of all ranks."""
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    return str(Path(box[0]) / "saved")


def saved_by_fsdp2(directory: str) -> None:
    """Train by FSDP2 and save as its programs do."""
    model = sharded()
    train_fsdp2(model, optimizer := adamw_of(model))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=directory)


def go_on_by_fsdp2(directory: str) -> Any:
    """Load what was saved into another network, and train on."""
    model = sharded(others())
    optimizer = adamw_of(model)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    states = {"model": model_state, "optim": optimizer_state}
    dcp.load(states, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optim"])
    return train_fsdp2(model, optimizer)


# The table.


class Row(NamedTuple):
    """An FSDP2 call, what stands for it, and a program of each for one rank of two.

    Attributes:
        equivalent: What stands for the call in fshard.
        fsdp2: The program with the call.
        fshard: The program with what stands for it.
        atol: How far results may be apart; 0 asks for equal bits.
    """

    equivalent: str
    fsdp2: Callable[[], Any]
    fshard: Callable[[], Any]
    atol: float = 0.0


ROWS: dict[str, Row] = {}


def row(call: str, equivalent: str, atol: float = 0.0, table: dict[str, Row] = ROWS) -> Callable[[Any], Any]:
    """Enter a pair of programs of several lines into a table."""

    def enter(pair: Any) -> Any:
        table[call] = Row(equivalent, pair.fsdp2, pair.fshard, atol)
        return pair

    return enter


ROWS["fully_shard(block), fully_shard(model)"] = Row(
    "fs.functionalize(module, units=Block), model.init(fs.zero3(mesh))",
    lambda: train_fsdp2(sharded()),
    lambda: train(program(fs.zero3(mesh_of_ranks()))),
)
ROWS["loss = loss_fn(model(x), y); loss.backward()"] = Row(
    "loss, grads = fs.value_and_grad(loss_fn)(params, x, y)",
    lambda: fsdp2_gradients(sharded(), batches()[0]),
    lambda: gradients(program(), batches()[0]),
)
ROWS["torch.optim.AdamW(model.parameters(), lr=...)"] = Row(
    "tx = fs.from_torch(torch.optim.AdamW, lr=...), state = fs.TrainState.create(params, tx)",
    lambda: train_fsdp2(model := sharded(), torch.optim.AdamW(model.parameters(), lr=1e-3)),
    lambda: train(program(tx=fs.from_torch(torch.optim.AdamW, lr=1e-3))),
)


@row("StepLR(optimizer, ...), scheduler.step()", "fs.from_torch(..., lr=fs.from_torch_scheduler(StepLR, ...))")
class Scheduler:
    def fsdp2():
        model, losses = sharded(), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
        for batch in batches():
            losses.append(fsdp2_step(model, optimizer, batch))
            scheduler.step()
        return {"losses": losses, "params": full(model)}

    def fshard():
        schedule = fs.from_torch_scheduler(StepLR, lr=1e-2, steps=STEPS, step_size=1, gamma=0.5)
        return train(program(tx=fs.from_torch(torch.optim.AdamW, lr=schedule)))


ROWS["optimizer.step(), optimizer.zero_grad()"] = Row(
    "state = fs.update(tx, state, grads)", lambda: train_fsdp2(sharded()), lambda: train(program())
)
ROWS["fully_shard(model, mesh=mesh_2d)"] = Row(
    "fs.hsdp(mesh)",
    lambda: [
        train_fsdp2(sharded(mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))))
        for shape in ((2, 1), (1, 2))
    ],
    lambda: [train(program(fs.hsdp(fs.init_mesh({"replicate": size, "shard": -1}, device="cpu")))) for size in (2, 1)],
)
REDUCE_DTYPES = (None, torch.float32)
ROWS["MixedPrecisionPolicy(param_dtype, reduce_dtype)"] = Row(
    "fs.zero3(mesh, param_dtype=..., reduce_dtype=...)",
    lambda: [train_fsdp2(sharded(mp_policy=MixedPrecisionPolicy(torch.bfloat16, kept))) for kept in REDUCE_DTYPES],
    lambda: [train(program(zero3(param_dtype=torch.bfloat16, reduce_dtype=kept))) for kept in REDUCE_DTYPES],
)
BFLOAT16 = MixedPrecisionPolicy(torch.bfloat16)
FLOAT32_OUT = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)}
ROWS["MixedPrecisionPolicy(output_dtype)"] = Row(
    "fs.zero3(mesh, output_dtype=...)",
    lambda: sharded(mp_policy=BFLOAT16, of_root=FLOAT32_OUT)(batches()[0][0]).detach(),
    lambda: evaluated(program(zero3(param_dtype=torch.bfloat16, output_dtype=torch.float32))),
)


@row("MixedPrecisionPolicy(cast_forward_inputs=False)", "fs.zero3(mesh, layout=fs.compose(fs.cast(gather=...), ...))")
class InputsAsTheyAre:
    def fsdp2():
        model = sharded(mp_policy=MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False))
        x, y = batches()[0]
        with pytest.raises(RuntimeError, match="same dtype"):
            model(x)
        model.reset_iter_state()
        return fsdp2_gradients(model, (x.bfloat16(), y))

    def fshard():
        mesh = mesh_of_ranks()
        made = program(fs.zero3(mesh, layout=fs.compose(fs.cast(gather=torch.bfloat16), fs.fully_shard(mesh))))
        x, y = batches()[0]
        with pytest.raises(RuntimeError, match="same dtype"):
            made.model.apply(made.state.params, x)
        return gradients(made, (x.bfloat16(), y))


# Pinning takes an accelerator.
ROWS["CPUOffloadPolicy()"] = Row(
    "fs.compose(fs.offload(), fs.zero3(mesh))",
    lambda: train_fsdp2(sharded(offload_policy=CPUOffloadPolicy(pin_memory=False))),
    lambda: train(program(fs.compose(fs.offload("cpu"), zero3()))),
)


@row("reshard_after_forward=True, False", "fs.zero3(mesh, regather=True), regather=False")
class Regather:
    def fsdp2():
        runs, gathers = [], []
        for again in (True, False):
            model = sharded(reshard_after_forward=again)
            with Gathers() as counted:
                runs.append(train_fsdp2(model))
            gathers.append(counted.number)
        return runs, gathers[0] > gathers[1]

    def fshard():
        runs, gathers = [], []
        for again in (True, False):
            made = program(zero3(regather=again))
            with fs.comm.record() as record:
                runs.append(train(made))
            gathers.append(sum(entry.label == "gather" for entry in record))
        return runs, gathers[0] > gathers[1]


def let_go_after_the_last(model: Any, last: bool) -> None:
    model.set_requires_gradient_sync(last)
    model.set_reshard_after_backward(last)
    model.set_is_last_backward(last)


ROWS["model.set_requires_gradient_sync(False)"] = Row(
    'fs.accumulate(loss_fn, communicate="once")',
    lambda: accumulated_by_fsdp2(sharded(), lambda model, last: model.set_requires_gradient_sync(last)),
    lambda: accumulated("once"),
)
ROWS["loss.backward() for each microbatch"] = Row(
    'fs.accumulate(loss_fn, communicate="each")',
    lambda: accumulated_by_fsdp2(sharded()),
    lambda: accumulated("each"),
)
ROWS["model.set_reshard_after_backward(False)"] = Row(
    "fs.zero1(mesh) with fs.accumulate, which gathers once",
    lambda: accumulated_by_fsdp2(sharded(reshard_after_forward=False), let_go_after_the_last),
    lambda: accumulated("once", fs.zero1(mesh_of_ranks())),
)


@row("model.set_gradient_divide_factor(1.0)", 'fs.value_and_grad(loss_fn, reduce="sum")')
class SumOfGradients:
    def fsdp2():
        model = sharded()
        for unit in (*model.blocks, model):
            unit.set_gradient_divide_factor(1.0)
            # gloo does not divide.
            unit.set_force_sum_reduction_for_comms(True)
        return fsdp2_gradients(model, batches()[0])[1]

    def fshard():
        return gradients(program(), batches()[0], reduce="sum")[1]


@row("model.set_all_reduce_hook(hook)", "a transform of one's own: fs.Wrapped with scatter")
class HookOnGradients:
    def fsdp2():
        model = sharded()
        for unit in (*model.blocks, model):
            unit.set_all_reduce_hook(lambda reduced: reduced.mul_(0.5))
        return train_fsdp2(model)

    def fshard():
        @dataclass(frozen=True)
        class Halved(fs.Wrapped):
            def scatter(self, grads: Any, specs: Any) -> Any:
                return [0.5 * grad for grad in self.inner.scatter(grads, specs)]

        mesh = mesh_of_ranks()
        return train(program(fs.zero3(mesh, merge_bytes=0, layout=Halved(fs.fully_shard(mesh)))))


@row("block.unshard(), block.reshard()", "fs.gather(params), and del")
class Unshard:
    def fsdp2():
        model = sharded(mp_policy=BFLOAT16)
        block = model.blocks[1]
        block.unshard()
        gathered = {name: parameter.detach().clone() for name, parameter in block.named_parameters()}
        block.reshard()
        return gathered

    def fshard():
        params = fs.functionalize(network()).init(zero3(param_dtype=torch.bfloat16))
        prefix = "blocks.1."
        return fs.gather({name.removeprefix(prefix): leaf for name, leaf in params.items() if name.startswith(prefix)})


@row("block.set_modules_to_forward_prefetch(next), ..._backward_prefetch", "fs.zero3(mesh, prefetch=2)")
class Prefetch:
    def fsdp2():
        model = sharded()
        blocks = list(model.blocks)
        for i, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 3])
            block.set_modules_to_backward_prefetch(blocks[max(0, i - 2) : i][::-1])
        return train_fsdp2(model)

    def fshard():
        return train(program(zero3(prefetch=2)))


LEARNING_RATE, MAX_NORM = 0.1, 0.05


# torch takes the norm in float32: of n squares in any order it is off by at most n / 4 eps, relatively, and an update
# is as long as LEARNING_RATE * MAX_NORM. The next gradient hands on what parameters differ by, of a loss with curvature
# below 1 / LEARNING_RATE.
@row(
    "torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)",
    "fs.chain(fs.clip_by_global_norm(max_norm), tx)",
    atol=LEARNING_RATE * MAX_NORM * WIDTH * 2 * WIDTH / 4 * EPS * (2**STEPS - 1),
)
class Clip:
    def fsdp2():
        model = sharded()
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

        def clip():
            assert torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).full_tensor() > MAX_NORM

        return train_fsdp2(model, optimizer, between=clip)["params"]

    def fshard():
        sgd = fs.from_torch(torch.optim.SGD, lr=LEARNING_RATE)
        return train(program(tx=fs.chain(fs.clip_by_global_norm(MAX_NORM), sgd)))["params"]


@row('torch.amp.GradScaler("cpu")', "fs.dynamic_loss_scale(tx)")
class LossScale:
    """The second batch of the first rank overflows: all ranks skip it."""

    scale = MappingProxyType({"init_scale": 2.0**8, "growth_interval": 2})

    def fsdp2():
        model = sharded()
        optimizer = adamw_of(model)
        scaler = torch.amp.GradScaler("cpu", **LossScale.scale)
        for x, y in one_overflows():
            scaler.scale(mse_loss(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return full(model), scaler.get_scale()

    def fshard():
        model = functional()
        tx = fs.dynamic_loss_scale(adamw(), **LossScale.scale)
        state = fs.TrainState.create(model.init(zero3()), tx)

        def loss_fn(params: Any, scale: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return scale * mse_loss(model.apply(params, x), y)

        for x, y in one_overflows():
            _, grads = fs.value_and_grad(loss_fn)(state.params, state.opt_state.scale, x, y)
            state = fs.update(tx, state, grads)
        return fs.unshard(state.params), state.opt_state.scale


ROWS["parameter.full_tensor()"] = Row(
    "fs.unshard(params)", lambda: full(sharded()), lambda: fs.unshard(program().state.params)
)


@row("parameter.to_local(), parameter.placements", "leaf.local, leaf.spec")
class Local:
    def fsdp2():
        return {name: (p.to_local().detach(), p.placements[0].dim) for name, p in sharded().named_parameters()}

    def fshard():
        axis = fs.axis_of(mesh_of_ranks())
        params = program().state.params
        return {name: (leaf.local, leaf.spec.dim_of(axis)) for name, leaf in params.items()}


@row("shard_placement_fn=lambda parameter: Shard(...)", "fs.zero3(mesh, layout=fs.fully_shard(mesh, dim=...))")
class Placement:
    def fsdp2():
        model = sharded(shard_placement_fn=lambda parameter: Shard(parameter.dim() - 1))
        local = {name: parameter.to_local().detach().clone() for name, parameter in model.named_parameters()}
        return local, train_fsdp2(model)

    def fshard():
        mesh = mesh_of_ranks()
        made = program(fs.zero3(mesh, merge_bytes=0, layout=fs.fully_shard(mesh, dim=-1)))
        return {name: leaf.local for name, leaf in made.state.params.items()}, train(made)


ROWS["parameter.requires_grad_(False)"] = Row(
    "the same, before fs.functionalize",
    lambda: train_fsdp2(sharded(half_frozen())),
    lambda: train(program(module=half_frozen())),
)


@row("parameter.requires_grad_(True), in a later stage", "fs.reshard(state, strategy, frozen=...)")
class Thawed:
    def fsdp2():
        model = sharded(half_frozen())
        train_fsdp2(model, optimizer := adamw_of(model))
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        return train_fsdp2(model, optimizer)

    def fshard():
        made = program(module=half_frozen())
        state, _ = stepped(made)
        return train(made._replace(state=fs.reshard(state, zero3(), frozen=())))


@row("fully_shard(model, ignored_params=...)", "fs.masked(fs.zero3(mesh), names, otherwise=fs.ddp(mesh))")
class Ignored:
    def fsdp2():
        model = network()
        sharded(model, of_root={"ignored_params": set(model.head.parameters())})

        def mean_of_the_ignored():
            for parameter in model.head.parameters():
                # Their gradients are left to the caller.
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()

        return train_fsdp2(model, between=mean_of_the_ignored)

    def fshard():
        strategy = fs.masked(
            zero3(), lambda name, leaf: not name.startswith("head."), otherwise=fs.ddp(mesh_of_ranks())
        )
        return train(program(strategy))


@row("model.set_reduce_scatter_unused_params(True)", "nothing: a leaf that another rank used counts as zeros")
class Unused:
    """Each rank uses a layer of its own."""

    def fsdp2():
        model = sharded(network(Routed))
        model.set_reduce_scatter_unused_params(True)
        return train_fsdp2(model)

    def fshard():
        return train(program(module=network(Routed)))


ROWS["checkpoint_wrapper(block)"] = Row(
    "fs.functionalize of the same, or fs.remat(f)",
    lambda: train_fsdp2(sharded(checkpointed())),
    lambda: train(program(module=checkpointed())),
)


@row("block.compile()", "fs.jit(train_step, donate_argnums=0)")
class Compile:
    def fsdp2():
        module = network()
        for block in module.blocks:
            block.compile(backend="aot_eager")
        # dynamo looks at .grad of the parameters that FSDP2 has gathered.
        warnings.filterwarnings("ignore", "The .grad attribute", UserWarning)
        return train_fsdp2(sharded(module))

    def fshard():
        made = program()
        return train(made._replace(step=fs.jit(made.step, donate_argnums=0)))


@row("model.eval(), torch.no_grad()", "fs.functionalize(module.eval()).apply(params, x)")
class Evaluate:
    def fsdp2():
        model = sharded(with_dropout()).eval()
        with torch.no_grad():
            return model(batches()[0][0])

    def fshard():
        module = with_dropout()
        params = functional(module).init(zero3())
        with torch.no_grad():
            return functional(module.eval()).apply(params, batches()[0][0])


@row("model.set_reshard_after_forward(False), to sample", "full = fs.gather(params), model.apply(full, x)")
class Sample:
    def fsdp2():
        model = sharded()
        model.set_reshard_after_forward(False)
        with torch.no_grad():
            return [model(x) for x, _ in batches()]

    def fshard():
        model = functional()
        full = fs.gather(model.init(zero3()))
        return [model.apply(full, x) for x, _ in batches()]


@row('register_fsdp_forward_method(model, "features")', "fs.functionalize of a module whose forward it is")
class OtherMethod:
    def fsdp2():
        model = sharded()
        register_fsdp_forward_method(model, "features")
        return model.features(batches()[0][0]).detach()

    def fshard():
        class Features(Network):
            forward = Network.features

        params = functional().init(zero3())
        with torch.device("meta"):
            features = functional(Features())
        return features.apply(params, batches()[0][0])


@row("model.to_empty(...), module.reset_parameters()", "model.init(strategy, seed=...) of a module on the meta device")
class MetaDevice:
    """FSDP2 draws other numbers of the same distributions; fshard those that one process draws."""

    def fsdp2():
        with torch.device("meta"):
            model = sharded(Network())
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        # Of the CPU's generator, which is not the one that DTensor keeps in step between ranks.
        warnings.filterwarnings("ignore", "DTensor random operators", UserWarning)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        return drawn(full(model))

    def fshard():
        with torch.device("meta"):
            model = functional(Network())
        params = fs.unshard(model.init(zero3(), seed=0))
        assert_trees_close(params, dict(network().state_dict()), exact=True)
        return drawn(params)


@row(
    "get_model_state_dict(model, full_state_dict=True)",
    "fs.checkpoint.to_state_dict({**params, **model.buffers}, module=module)",
)
class FullStateDict:
    def fsdp2():
        # Not by blocks, of which two have the same weight.
        state_dict = get_model_state_dict(fully_shard(network(Tied)), options=FULL)
        network(Tied).load_state_dict(state_dict)
        return state_dict

    def fshard():
        module, model = network(Tied), fs.functionalize(network(Tied))
        state_dict = fs.checkpoint.to_state_dict({**model.init(zero3()), **model.buffers}, module=module)
        module.load_state_dict(state_dict)
        return state_dict


@row(
    "set_model_state_dict(model, full, broadcast_from_rank0=True)",
    "fs.checkpoint.from_state_dict(full, like=params, module=module)",
)
class LoadFullStateDict:
    def fsdp2():
        model = sharded(others())
        state_dict = network().state_dict() if dist.get_rank() == 0 else {}
        set_model_state_dict(
            model, state_dict, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        )
        return train_fsdp2(model)

    def fshard():
        made = program(module=others())
        full = network().state_dict()
        params = fs.checkpoint.from_state_dict(full, like=made.state.params, module=network())
        return train(made._replace(state=made.state._replace(params=params)))


@row(
    "dcp.save(...), dcp.load(...)", "fs.checkpoint.save(directory, state), fs.checkpoint.restore(directory, like=state)"
)
class Checkpoint:
    def fsdp2():
        saved_by_fsdp2(directory := shared_directory())
        return go_on_by_fsdp2(directory)

    def fshard():
        state, _ = stepped(program())
        fs.checkpoint.save(directory := shared_directory(), state)
        fresh = program(module=others())
        return train(fresh._replace(state=fs.checkpoint.restore(directory, like=fresh.state)))


@row("model.reset_iter_state() after an error", "nothing: the state is as it was")
class AfterAnError:
    def fsdp2():
        model = sharded()
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.ones(1, 1))
        model.reset_iter_state()
        return train_fsdp2(model)

    def fshard():
        made = program()
        with pytest.raises(RuntimeError, match="shapes"):
            made.step(made.state, (torch.ones(1, 1), torch.ones(1, 1)))
        return train(made)


def check_both_sides_are_equal(entry: Row) -> None:
    assert_trees_close(entry.fshard(), entry.fsdp2(), rtol=0, atol=entry.atol, exact=not entry.atol)


@pytest.mark.rows(2)
@pytest.mark.parametrize("call", ROWS)
@on_ranks("2 processes")
def test_both_sides_are_equal(call):
    check_both_sides_are_equal(ROWS[call])
