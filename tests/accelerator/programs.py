"""Programs that run on each of two ranks, on processors and on the device "emu", and give the same numbers.

As a script, on each rank of torchrun: `programs.py LIBRARY RESULT [--alone] [--late SEEDS [--fault FAULT]] [NAME...]`.
"""

import argparse
import json
import math
import os
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import TestCase
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import _compat
from fshard.checkpoint import host_copies
from fshard.rounding import tolerance
from tests.accelerator import emu

WIDTH, CLASSES, BATCH, STEPS, GATHERS = 24, 7, 6, 4, 3
# Elements of leaves, and bytes of the buffer that a save beside steps copies them through.
SAVED, BUFFER = {"a": 4100, "b": 1100, "c": 8192, "d": 3000}, 8192
# Sums over the rows of a batch and the units of a layer, in kernels of either device. Steps of AdamW hand them on,
# which divides by the size of a gradient; the programs in float32 compare gradients.
EXACT = tolerance(torch.float64, BATCH + WIDTH, scale=10, steps=STEPS)
SINGLE = tolerance(torch.float32, BATCH + WIDTH)
# Of the first bias correction of Adam in float32, 1 - 0.999, four digits are left. An update divides by its root.
BIAS_CORRECTION = tolerance(torch.float32, terms=1, scale=1 / (1 - 0.999))

# Stages of benchmarks/quarter_hour.py run where there may be no pytest.
raises = TestCase().assertRaisesRegex

# `take` returns the log of the device, once there is one.
log = SimpleNamespace(take=list)


class Program(NamedTuple):
    """A map of a device to a tree of tensors, which drops the log before its last step, and what is expected of it."""

    run: Callable[[str], Any]
    waits: dict[str, int] = {}  # noqa: RUF012  # of the host for the device in the last step, by operator
    tolerance: float = EXACT  # the largest difference between devices, relative to each tensor's largest number
    alone: dict[str, int] | None = None  # waits where ranks cannot send each other tensors of the processor, if run


# The status of a call, which travels with the objective: to the device and back.
STATUS = {"copy_": 1}


class Block(nn.Module):
    def __init__(self, remat=False):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.remat = remat

    def forward(self, x):
        return x + (checkpoint(self.run, x, use_reentrant=False) if self.remat else self.run(x))

    def run(self, x):
        return self.down(F.gelu(self.up(self.norm(x))))


def modelled(device, layout=fs.zero3, dtype=torch.float64, **options):
    """A model, the same on every rank and device, its parameters, and the loss of a batch."""
    torch.manual_seed(0)
    blocks = [Block(**options) for _ in range(3)]
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, nn.Linear(WIDTH, CLASSES)).to(dtype).to(device)
    model = fs.functionalize(module, units=Block)

    def loss_fn(params, batch, reduction="mean"):
        return F.cross_entropy(model.apply(params, batch[0]), batch[1], reduction=reduction)

    return model.init(layout(mesh_of(device))), loss_fn


def batches(device, dtype=torch.float64):
    """Draw this rank's batches."""
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    x = torch.randn(STEPS, BATCH, WIDTH, generator=generator, dtype=torch.float64).to(dtype).to(device)
    return list(zip(x, torch.randint(CLASSES, (STEPS, BATCH), generator=generator).to(device)))


def mesh_of(device):
    return fs.init_mesh({"shard": -1}, device=device)


def assert_on(device, tree):
    kinds = {leaf.device.type for leaf in fs.tree_leaves(tree) if leaf.dim()}
    assert kinds == {device}, f"tensors are on {kinds}"


def train(device, strategy=fs.zero3, tx=None, *, jit=None, traced=None, **options):
    """Train some steps; returns the losses and the state.

    Args:
        device: The device.
        strategy: The layout, a map of a mesh to a transform.
        tx: The optimizer, if not AdamW of clipped gradients.
        jit: Arguments of `fs.jit`, if steps are jitted.
        traced: Jitted steps of earlier calls by device, which this one takes or adds to.
        **options: What `modelled` takes.
    """
    params, loss_fn = modelled(device, strategy, **options)
    tx = tx or fs.chain(fs.clip_by_global_norm(0.5), fs.from_torch(torch.optim.AdamW, lr=1e-2))
    state, losses = fs.TrainState.create(params, tx), []

    def step(state, batch):
        loss, grads = fs.value_and_grad(loss_fn)(state.params, batch)
        return fs.update(tx, state, grads), loss

    run = step
    if jit is not None:
        run = traced.setdefault(device, fs.jit(step, **jit))
    for batch in batches(device):
        log.take()
        state, loss = run(state, batch)
        losses.append(loss)
    assert_on(device, state)
    return losses, state


def accumulated(device, strategy=fs.zero3):
    """Accumulate weighted gradients of microbatches, twice."""
    params, loss_fn = modelled(device, strategy)
    microbatches = batches(device)
    for _ in range(2):
        log.take()
        loss_and_grads = fs.accumulate(weighted(loss_fn), reduce="weighted")(params, microbatches)
    return loss_and_grads


def weighted(loss_fn):
    """Count the rows of a loss."""
    return lambda params, batch: (loss_fn(params, batch, "sum"), (batch[1] >= 0).sum())


def skipped(device, wrapper, **options):
    """Update donated states by gradients of which some are infinite; the state before such an update stays."""
    mesh = mesh_of(device)
    tx = wrapper(fs.from_torch(torch.optim.AdamW, lr=1e-1, **options))
    state = fs.TrainState.create(fs.shard({"w": torch.ones(8, dtype=torch.float64)}, fs.zero3(mesh)), tx)

    def loss_fn(params, factor):
        return (fs.gather(params)["w"] * factor).sum()

    for factor in torch.tensor([1.0, torch.inf, 2.0], dtype=torch.float64, device=device):
        log.take()
        _, grads = fs.value_and_grad(loss_fn)(state.params, factor)
        state = fs.update(tx, state, grads, donate=True)
    assert_on(device, state.params)
    # The whole state, so that counts are compared too.
    return state


def placed(device):
    """Parameters and buffers of modules of the processor, with values or without, lie on the mesh's device."""
    mesh, outputs = mesh_of(device), []
    for kind in ("cpu", "meta"):
        torch.manual_seed(0)
        with torch.device(kind):
            module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES)).double()
        model = fs.functionalize(module)
        params = model.init(fs.zero3(mesh), seed=None if kind == "cpu" else 0)
        assert_on(device, [params, model.buffers])
        x, _ = batches(device)[0]
        outputs.append(model.apply(params, x, buffers=model.buffers))
    whole = fs.shard({"w": torch.ones(4, 2)}, fs.ddp(mesh))
    assert_on(device, [whole, fs.reshard(whole, fs.zero3(mesh))])
    if device != "cpu":
        with raises(ValueError, f"expected a tensor on the CPU, as the mesh is, got one on {device}"):
            fs.shard({"w": torch.ones(2, device=device)}, fs.zero3(mesh_of("cpu")))
    log.take()
    return outputs


def generator_states(device):
    states = [torch.get_rng_state()]
    if device != "cpu":
        states.append(torch.get_device_module(device).get_rng_state())
    return states


def keyed(device):
    """Draw from a seed and from keys: generators stay as they were, and torch does not warn of those that it reads."""
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)).double()
    model = fs.functionalize(module)
    x, _ = batches(device)[0]
    states = generator_states(device)
    with warnings.catch_warnings(), patch.object(torch.random, "_fork_rng_warned_already", False):
        warnings.simplefilter("error")
        params = model.init(fs.zero3(mesh_of(device)), seed=0)
        outputs = [model.apply(params, x, key=key) for key in (1, 2, 1)]
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[1])
    assert all(map(torch.equal, states, generator_states(device)))
    log.take()
    # Devices draw different numbers.
    return params


def transformed(device, layout, state=False):
    """Differentiate with a transform in the layout."""
    params, loss_fn = modelled(device, layout, torch.float32)
    options = {"transform_state": fs.transform_state(params)} if state else {}
    results = []
    for batch in batches(device, torch.float32):
        log.take()
        loss, grads, *new_state = fs.value_and_grad(loss_fn, **options)(params, batch)
        if state:
            options = {"transform_state": new_state[0]}
        results.append([loss, grads])
    return results


def offloaded(device, **options):
    return lambda mesh: fs.compose(fs.offload(device), fs.zero3(mesh, **options))


def evaluated(device, traced):
    """Evaluate offloaded parameters between their gradients and updates that write over them.

    Args:
        device: The device.
        traced: Jitted functions of earlier calls, which this one takes or adds to.
    """
    params, loss_fn = modelled(device, offloaded(device, bucket_bytes=0))
    tx = fs.from_torch(torch.optim.SGD, lr=0.5)
    state = fs.TrainState.create(params, tx)

    def step(update, state, batch):
        _, grads = fs.value_and_grad(weighted(loss_fn), reduce="weighted")(state.params, batch)
        with torch.no_grad():
            loss = loss_fn(state.params, batch)
        return update(tx, state, grads), loss

    def update(tx, state, grads):
        return traced.setdefault("update", fs.jit(partial(fs.update, tx), donate_argnums=0))(state, grads)

    jitted = traced.setdefault(device, fs.jit(partial(step, fs.update), donate_argnums=0))
    steps = [jitted, jitted, partial(step, update), partial(step, partial(fs.update, donate=True))]
    losses = []
    for run, batch in zip(steps, batches(device), strict=True):
        log.take()
        state, loss = run(state, batch)
        losses.append(loss)
    return losses, state


def complex_leaves(device):
    """Gather complex leaves, and reduce their gradients: of one that is split over ranks, and one that is whole."""
    strategy = fs.zero3(mesh_of(device), min_shard_elements=9)
    full = {f"w{size}": torch.ones(size, dtype=torch.complex128) for size in (1, 24)}
    params = fs.shard(full, strategy)
    x, _ = batches(device)[0]

    def loss_fn(params):
        params = fs.gather(params)
        return (torch.fft.fft(x) * params["w24"] + params["w1"]).abs().mean()

    log.take()
    loss, grads = fs.value_and_grad(loss_fn)(params)
    return loss, {name: torch.view_as_real(grad.local) for name, grad in grads.items()}


def gathered(device):
    """Gather offloaded leaves several times: those that are split over ranks, and one that is whole."""
    strategy = fs.compose(fs.offload(device), fs.fully_shard(mesh_of(device), min_shard_elements=9))
    params = fs.shard({f"w{i}": torch.ones(6 - i, 4) for i in range(5)}, strategy)
    log.take()
    return [fs.gather(params) for _ in range(GATHERS)]


def saved(device):
    """A save in the background, a restore, a state dict, which is on the processor."""
    params, _ = modelled(device)
    tx = fs.from_torch(torch.optim.AdamW, lr=1e-2)
    state = fs.TrainState.create(params, tx)
    state = fs.update(tx, state, state.params)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, device=torch.device("cpu"))
    with fs.checkpoint.Manager(folder[0], keep=2, every=1) as manager:
        manager.save(state)
    restored = fs.checkpoint.restore(folder[0], state)
    assert_on(device, restored.params)
    results = fs.unshard(restored), fs.checkpoint.to_state_dict(restored.params)
    log.take()
    return results


def recovered(device):
    """Train while a rank fails in two steps: ranks meet again, and go on from a checkpoint, then from their states."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, device=torch.device("cpu"))
    is_last = dist.get_rank() == dist.get_world_size() - 1
    tx = fs.sgd(1e-1, momentum=0.9)

    def step(state, batch, fails=False):
        def loss_fn(params):
            x, _ = batch
            for name in ("first", "second"):
                x = torch.tanh(x @ fs.gather({name: params[name]})[name])
            if fails and is_last:
                raise ArithmeticError("bad sample 17")
            return x.square().mean()

        loss, grads = fs.value_and_grad(loss_fn)(state.params)
        return fs.update(tx, state, grads), loss

    full = {name: 0.1 * torch.eye(WIDTH, dtype=torch.float64) for name in ("first", "second")}
    start = fs.TrainState.create(fs.shard(full, fs.zero3(mesh_of(device))), tx)
    runs = []
    for failures in ((), (1, 2)):
        state = start
        losses = []
        for number, batch in enumerate(batches(device)):
            if number in failures:
                fs.checkpoint.save(f"{folder[0]}/{number}", state)
                with raises((ArithmeticError, fs.comm.CollectiveError), "bad sample 17"):
                    step(state, batch, fails=True)
                mesh_of(device)
            if failures and number == failures[0]:
                state = fs.checkpoint.restore(f"{folder[0]}/{number}", state)
            state, loss = step(state, batch)
            losses.append(loss)
        assert_on(device, state)
        runs.append([losses, state])
    undisturbed, disturbed = map(leaves_of, runs)
    assert all(map(torch.equal, undisturbed, disturbed)), "failures changed the bits of later steps"
    log.take()
    return runs


def saved_aside(device):
    """Save beside steps that write over the state, through a buffer that holds a part of a leaf, or several."""
    params = fs.shard({name: torch.arange(float(size)) for name, size in SAVED.items()}, fs.zero3(mesh_of(device)))
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, device=torch.device("cpu"))
    like = fs.tree_map(lambda leaf: torch.empty(leaf.shape), params)
    with patch.object(host_copies, "BUFFER_BYTES", BUFFER):
        log.take()
        saving = fs.checkpoint.save(folder[0], params, step=0, asynchronous=True)
        for leaf in fs.tree_leaves(params):
            leaf.zero_()
    saving.wait()
    return fs.checkpoint.restore(folder[0], like)


OPERATORS = torch.library.Library("accelerator_tests", "DEF")
OPERATORS.define("draw(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
torch.library.register_fake("accelerator_tests::draw", torch.empty_like, lib=OPERATORS)


@torch.library.impl(OPERATORS, "draw", "CompositeExplicitAutograd")
def _draw(x):
    """Draw from the generator of a device, as its kernels do; those of emu do not."""
    if x.device.type == "emu":
        return torch.rand(x.shape, generator=emu.GENERATOR, dtype=x.dtype).to(x.device)
    return torch.rand(x.shape, dtype=x.dtype, device=x.device)


class Noisy(nn.Linear):
    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=False)

    def run(self, x):
        x = super().forward(x)
        return (x * torch.ops.accelerator_tests.draw(x.detach())).sin()


def noisy(device):
    """Recompute what draws from a device, by a key, in a graph: its gradients are those of eager code."""
    torch.manual_seed(0)
    model = fs.functionalize(Noisy(WIDTH, CLASSES).double())
    params = model.init(fs.zero3(mesh_of(device)))
    x, _ = batches(device)[0]

    def step(params, x):
        return fs.value_and_grad(lambda params, x: model.apply(params, x, key=3).square().sum())(params, x)

    eager = step(params, x)
    states = generator_states(device)
    jitted = fs.jit(step)(params, x)
    after = generator_states(device)
    assert all(map(torch.equal, leaves_of(eager), leaves_of(jitted))), "a graph has drawn other numbers"
    assert all(map(torch.equal, states, after))
    log.take()
    # Devices draw different numbers.
    return params


def recomputed(device):
    """Differentiate by torch.func what draws from the generator of its device, and is computed again."""
    generator = emu.GENERATOR if device == "emu" else torch.default_generator
    generator.manual_seed(3)
    x = torch.linspace(0, 1, 5, dtype=torch.float64, device=device)

    def noisy(x):
        return (x * torch.rand(5, generator=generator, dtype=torch.float64).to(device)).sin().sum()

    gradient = torch.func.grad(fs.remat(noisy))(x)
    # The recomputation leaves the generator as it was.
    return gradient, torch.rand(5, generator=generator)


def leaves_of(tree):
    leaves = [leaf.local if isinstance(leaf, fs.Sharded) else leaf for leaf in fs.tree_leaves(tree)]
    return [leaf.detach().cpu() for leaf in leaves if isinstance(leaf, torch.Tensor)]


def eager_and_jitted(name, jit=None, alone=STATUS, strategy=fs.zero3, make=lambda: None):
    # A program that runs for many seeds traces its step once.
    traced = {}
    return {
        name: Program(lambda device: train(device, strategy, make()), alone=alone),
        f"{name} jitted": Program(lambda device: train(device, strategy, make(), jit=jit or {}, traced=traced)),
    }


PROGRAMS = {
    **eager_and_jitted("ddp", {"donate_argnums": 0}, strategy=fs.ddp),
    **eager_and_jitted("zero2", {"donate_argnums": 0}, strategy=fs.zero2),
    **eager_and_jitted("zero3", {"donate_argnums": 0}),
    "hsdp": Program(
        lambda device: train(device, lambda _: fs.hsdp(fs.init_mesh({"replicate": 2, "shard": -1}, device=device)))
    ),
    "placed": Program(placed),
    "keyed": Program(keyed),
    "checkpointed": Program(lambda device: train(device, remat=True)),
    "recomputed": Program(recomputed, {"copy_": 2}),
    "noisy": Program(noisy),
    **eager_and_jitted("skip_nonfinite", make=lambda: fs.skip_nonfinite(fs.adam(1e-2))),
    # torch's kernels that read the count of steps on an accelerator compute Adam's bias corrections in float32.
    "skip_nonfinite of torch": Program(lambda device: skipped(device, fs.skip_nonfinite), tolerance=BIAS_CORRECTION),
    "skip_nonfinite of torch, fused": Program(lambda device: skipped(device, fs.skip_nonfinite, fused=True)),
    "complex leaves": Program(complex_leaves, alone=STATUS),
    "accumulate weighted": Program(accumulated, alone=STATUS),
    "accumulate weighted, offloaded": Program(
        lambda device: accumulated(device, offloaded(device)), {"stream": 4, "copy_": 22}
    ),
    # Gradients are used on the processor: one wait for each reduction.
    "offloaded": Program(
        lambda device: transformed(device, offloaded(device)),
        {"stream": 1},
        SINGLE,
    ),
    # Before the update the host waits for copies that the evaluation has started.
    "evaluated": Program(partial(evaluated, traced={}), {"stream": 5, "copy_": 5, "device": 1}),
    "gathered from the processor": Program(gathered),
    "checkpoints": Program(saved),
    # The same bits on both devices, with failures and without.
    "recovered": Program(recovered, tolerance=0.0),
    # One for each time that a shard of a rank fills the buffer.
    "saved aside": Program(saved_aside, {"event": sum(math.ceil(2 * size / BUFFER) for size in SAVED.values())}),
}


def compare(program, alone):
    """Run a program on both devices; where there are no collectives of processors, on emu only.

    Returns the largest difference, and counts of the host's waits, its copies, and orders between streams.
    """
    expected = [] if alone else leaves_of(program.run("cpu"))
    # The results of the program before were read after its events.
    log.take()
    results = program.run("emu")
    events = [event.split(" ") for event in log.take()]
    actual = leaves_of(results)
    assert alone or len(actual) == len(expected)
    differences = [0.0]
    for leaf, expected_leaf in zip(actual, expected):
        if leaf.numel():
            largest = max(1.0, expected_leaf.double().abs().max())
            differences.append(((leaf.double() - expected_leaf.double()).abs().max() / largest).item())
    return {
        "difference": max(differences),
        "waits": Counter(" ".join(event[1:]) for event in events if event[0] == "sync"),
        "copies": Counter(" ".join(event[:2]) for event in events if event[0] == "to"),
        "streams": Counter(" ".join(event[:2]) for event in events if event[0] in ("record", "order")),
        "side_streams": len({event[-1] for event in events if event[0] == "order"}),
    }


def lose_waits():
    """Let no stream of the device wait for a collective."""
    wait = _compat.WAIT_TENSOR
    _compat.WAIT_TENSOR = lambda buffer: buffer if buffer.device.type == "emu" else wait(buffer)


def lose_records():
    """Let streams give memory that other streams use to other tensors."""
    torch.Tensor.record_stream = lambda *_: None


FAULTS = {"waits": lose_waits, "records": lose_records}


def run_late(program, library, seeds, fault=None):
    """Run a program with streams that run at once, and then late, once for each seed.

    Args:
        program: The program.
        library: The device.
        seeds: How many seeds.
        fault: One of `FAULTS`, for the late streams.

    Returns:
        What differs on this rank between late streams and others, by seed.
    """

    def run():
        log.take()
        results = program.run("emu")
        waits = [event for event in log.take() if event.startswith("sync")]
        return leaves_of(results), waits

    expected, expected_waits = run()
    if fault is not None:
        FAULTS[fault]()
    differences = {}
    for seed in range(seeds):
        # Ranks run in different orders.
        library.run_late(seed * dist.get_world_size() + dist.get_rank())
        leaves, waits = run()
        library.run_at_once()
        unequal = [not torch.equal(*pair) for pair in zip(leaves, expected, strict=True)]
        if any(unequal) or waits != expected_waits:
            differences[seed] = f"{sum(unequal)} of {len(leaves)} leaves have other bits, the host waits {waits}"
    return differences


def main(programs: dict[str, Program]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--alone", action="store_true", help="without collectives of processors")
    parser.add_argument("--late", type=int, help="with streams that run late, for so many seeds")
    parser.add_argument("--fault", choices=FAULTS, help="what to lose meanwhile")
    options = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    library = emu.load(options.library)
    log.take = library.take_events
    if options.alone:
        dist.init_process_group("emuccl")
    reports = {}
    # Before any mesh of processors, so that the process group serves both devices.
    mesh_of("emu")
    for name in options.names or programs:
        try:
            if options.late is None:
                reports[name] = compare(programs[name], options.alone)
            else:
                reports[name] = run_late(programs[name], library, options.late, options.fault)
        except Exception:
            reports[name] = {"error": traceback.format_exc()}
    # Late streams may give other numbers on one rank only.
    suffix = "" if options.late is None else f".{os.environ['RANK']}"
    if suffix or int(os.environ["RANK"]) == 0:
        options.result.with_name(options.result.name + suffix).write_text(json.dumps(reports))
    if options.alone:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(PROGRAMS)
