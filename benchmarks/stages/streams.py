"""Races between streams: one process as rank 0 of 8, disturbed at random, and under torch's checker of streams."""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import loop_backend
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fshard as fs
from stages import Findings, Place, copied, is_equal, reported
from stages.one_rank import Block, batches_of, next_bytes_loss, small_model

RANKS = 8
SEEDS = 20
STEPS = 2
# Cycles that a stream waits at most: a millisecond, in which the host queues many kernels of the small model.
LONGEST = 2_000_000
# Free blocks of a rehearsal, the smaller of which no allocator gives to anyone.
SIZES = [2**bits for bits in range(19, 22)]
# Blocks of at most so many bytes lie in segments of their own in CUDA's allocator; smaller rests of large segments are
# not given to anyone.
SMALL_BLOCK = 2**20
Program = Callable[[fs.TrainState], tuple[fs.TrainState, torch.Tensor]]


def layouts(place: Place) -> dict[str, fs.ShardTransform]:
    """Strategies that keep several streams busy."""
    mesh = fs.init_mesh({"shard": -1}, device=place.device)
    halves = fs.init_mesh({"replicate": 2, "shard": -1}, device=place.device)
    fine: dict[str, Any] = {"min_shard_elements": 0, "bucket_bytes": 0}
    offloaded = fs.compose(fs.offload(place.device), fs.fully_shard(mesh["shard"], min_shard_elements=0))
    return {
        "zero3": fs.zero3(mesh, **fine),
        "zero3, bf16": fs.zero3(mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32, **fine),
        "zero2": fs.zero2(mesh, **fine),
        "hsdp": fs.hsdp(halves, **fine),
        "offloaded": fs.zero3(mesh, layout=offloaded, bucket_bytes=0),
    }


def programs(place: Place) -> Iterator[tuple[str, fs.TrainState, Program]]:
    """Each strategy, eager and jitted: a state, and a step that donates it."""
    batches = batches_of(place, 1)
    for name, layout in layouts(place).items():
        for mode in ("eager", "jitted"):
            model = fs.functionalize(small_model(place), units=Block)
            tx = fs.chain(fs.clip_by_global_norm(1.0), fs.from_torch(torch.optim.AdamW, lr=3e-3, fused=True))

            def loss_fn(params: Any, model: Any = model) -> torch.Tensor:
                return next_bytes_loss(model.apply(params, batches[0][:, :-1]), batches[0])

            def step(donate: bool, state: fs.TrainState, loss_fn: Any = loss_fn, tx: Any = tx) -> Any:
                loss, grads = fs.value_and_grad(loss_fn)(state.params)
                return fs.update(tx, state, grads, donate=donate), loss

            run = partial(step, True) if mode == "eager" else fs.jit(partial(step, False), donate_argnums=0)
            yield f"{name}, {mode}", fs.TrainState.create(model.init(layout), tx), run


def trained(state: fs.TrainState, run: Program) -> Any:
    """Train some steps from a copy of a state; return what they computed."""
    state = copied(state)
    losses = []
    for _ in range(STEPS):
        state, loss = run(state)
        losses.append(loss)
    torch.accelerator.synchronize()
    return losses, state


def races(place: Place) -> Findings:
    """Steps with waits of random length on all streams and NaN in free memory: the bits of undisturbed ones."""
    loop_backend.start(RANKS, place.device)
    seeds = place.sized(SEEDS, 2)
    for name, state, run in programs(place):
        with reported(name) as row:
            expected = trained(state, run)
            row["repeats itself"] = is_equal(trained(state, run), expected)
            row["seeds that differ"] = []
            for seed in range(seeds):
                with disturbed(place, seed):
                    results = trained(state, run)
                if not is_equal(results, expected):
                    row["seeds that differ"].append(seed)
            row["seeds"] = seeds
            row["passed"] = row["repeats itself"] and not row["seeds that differ"]
        yield row
    yield planted(place)


def planted(place: Place) -> dict[str, Any]:
    """A race that is put in: results are read before they are there. The seeds must tell."""
    with reported("a planted race is found") as row:
        _, state, run = next(programs(place))
        expected = trained(state, run)
        with disturbed(place, 0), loop_backend.replaced(waits=False):
            row["differs"] = not is_equal(trained(state, run), expected)
        # On the tests' device work may be done at once.
        row["passed"] = row["differs"] or place.is_rehearsal
    return row


@contextmanager
def disturbed(place: Place, seed: int) -> Iterator[None]:
    """Let streams wait at random around collectives, and fill memory that is free with NaN."""
    generator = random.Random(seed)

    def disturb() -> None:
        if generator.random() < 0.3:
            loop_backend.sleep(place.device, generator.randrange(LONGEST))
        if generator.random() < 0.1:
            fill_free_memory(place)

    with loop_backend.replaced(disturb=disturb):
        yield


def fill_free_memory(place: Place) -> None:
    """Fill memory that is free with NaN, each block on the stream that the allocator will give it to next.

    Whoever still reads a block after it was freed, on another stream and without having said so, reads NaN.
    """
    held = []
    for pointer, nbytes in free_blocks(snapshot(place)):
        with stream_of(place, pointer):
            # All bits set are NaN in every dtype of floats.
            held.append(torch.full((nbytes,), 255, dtype=torch.uint8, device=place.device))


def snapshot(place: Place) -> list[dict[str, Any]]:
    """List the segments of CUDA's allocator; in a rehearsal one with free blocks of some sizes."""
    if not place.is_rehearsal:
        return torch.cuda.memory_snapshot()
    blocks = [{"size": nbytes, "state": "inactive"} for nbytes in SIZES]
    return [{"stream": 0, "segment_type": "large", "blocks": blocks}]


def stream_of(place: Place, pointer: int) -> AbstractContextManager[Any]:
    """Make a stream of CUDA the current one for a while."""
    if place.is_rehearsal:
        return nullcontext()
    # The default stream has no pointer, for which ExternalStream would make another stream.
    return torch.cuda.stream(torch.cuda.ExternalStream(pointer) if pointer else torch.cuda.default_stream())


def free_blocks(segments: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """List the streams and sizes of free blocks, largest first: the allocator gives each to who asks for its size."""
    blocks = []
    for segment in segments:
        for block in segment["blocks"]:
            is_rest = segment["segment_type"] == "large" and block["size"] <= SMALL_BLOCK
            if block["state"] == "inactive" and not is_rest:
                blocks.append((segment["stream"], block["size"]))
    return sorted(blocks, key=lambda block: -block[1])


class Watch(TorchDispatchMode):
    """Show each kernel to a checker, but for operators of fshard: what they run is shown by itself."""

    def __init__(self, checker: Any) -> None:
        super().__init__()
        self.checker = checker
        self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fshard":
            return func(*args, **(kwargs or {}))
        self.kernels += 1
        return self.checker.__torch_dispatch__(func, types, args, kwargs)


class NoChecker:
    """Stands for torch's checker in a rehearsal: it knows only CUDA's streams."""

    def __init__(self) -> None:
        self.event_handler = SimpleNamespace(_handle_kernel_launch=lambda *args: [])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        self.event_handler._handle_kernel_launch()
        return outputs


def checker_of(place: Place, races: list[str]) -> Any:
    """Make torch's checker of streams. It is told of each event of CUDA from now on.

    Args:
        place: Where this runs.
        races: Gets the texts of races. The checker itself would raise at the first, and a failed call ends a mesh.
    """
    if place.is_rehearsal:
        checker: Any = NoChecker()
    else:
        from torch.cuda._sanitizer import CUDASanitizerDispatchMode

        checker = CUDASanitizerDispatchMode()
    handle = checker.event_handler._handle_kernel_launch

    def collect(*args: Any) -> list[Any]:
        races.extend(map(str, handle(*args)))
        return []

    checker.event_handler._handle_kernel_launch = collect
    return checker


def sanitizer(place: Place) -> Findings:
    """The same programs once under torch's checker of streams, collectives included."""
    races: list[str] = []
    checker = checker_of(place, races)
    loop_backend.start(RANKS, place.device)
    # One thread runs all nodes of autograd, and so all kernels are shown.
    with torch.autograd.set_multithreading_enabled(False):
        for name, state, run in programs(place):
            with reported(name) as row:
                trained(state, run)
                races.clear()
                row["kernels"] = watched(checker, state, run)
                row["races"] = len(races)
                row["first"] = races[:1]
                row["passed"] = row["kernels"] > 0 and not races
            yield row
        with reported("a planted race is found") as row:
            _, state, run = next(programs(place))
            races.clear()
            with loop_backend.replaced(waits=False):
                watched(checker, state, run)
            row["races"] = len(races)
            # In a rehearsal there is no checker that could tell.
            row["passed"] = bool(races) or place.is_rehearsal
        yield row


def watched(checker: Any, state: fs.TrainState, run: Program) -> int:
    """Train under a checker; return how many kernels it has seen."""
    watch = Watch(checker)
    inner = Watch(checker)
    # An operator of fshard runs without the modes around it, and so its collective needs one of its own.
    with watch, loop_backend.replaced(watch=lambda: inner):
        trained(state, run)
    return watch.kernels + inner.kernels
