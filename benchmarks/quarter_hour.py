"""Run all that one accelerator can tell in a quarter of an hour, each stage in a process of its own.

    PYTHONPATH=. python benchmarks/quarter_hour.py --output runs/quarter_hour

The parent never touches the device. Each stage has a time limit; its findings are appended to `found.jsonl` in the
output folder as soon as they are there, its output goes to a log beside it, and a stage that no longer fits into
`--seconds` is left out by name. A table is printed last. `--only` runs some stages.

To rehearse without an accelerator: `--device emu` builds the device of `tests/accelerator`; stages that need CUDA are
left out by name.
"""

import argparse
import copy
import importlib.metadata
import itertools
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

import fshard as fs

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]
Findings = Iterator[dict[str, Any]]
# Where a stage finds the tests' device, to start ranks of its own on it.
LIBRARY = "QUARTER_HOUR_LIBRARY"


class Stage(NamedTuple):
    """One stage.

    Attributes:
        run: Does the work in a process of its own; yields findings, of which `passed` says whether one is as expected.
        seconds: The time that it may take.
        needs_cuda: Whether no other device will do.
    """

    run: Callable[[str], Findings]
    seconds: float
    needs_cuda: bool = False


def versions(device: str) -> Findings:
    """Versions, the device, and that fshard imports."""
    yield {
        "name": "versions",
        "passed": True,
        "torch": torch.__version__,
        "optree": importlib.metadata.version("optree"),
        "python": platform.python_version(),
        "fshard": fs.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if device == "cuda" else None,
    }


def readme(device: str) -> Findings:
    """The program of the README as printed, and where its parameters lie."""
    program = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    scope: dict[str, Any] = {}
    start = time.perf_counter()
    exec(program.replace("range(200)", "range(20)"), scope)
    kinds = sorted({leaf.device.type for leaf in fs.tree_leaves(scope["params"])})
    yield {
        "name": "README",
        "passed": kinds == [device],
        "parameters on": kinds,
        "loss": scope["loss"].item(),
        "seconds": time.perf_counter() - start,
        "mesh": str(scope["mesh"]),
        "default": str(torch.accelerator.current_accelerator()),
    }


class Block(torch.nn.Sequential):
    """A unit of the model that is compared with plain torch."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))


def next_bytes_loss(out: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.flatten(0, 1), rows[:, 1:].flatten())


def trained_by_torch(module: torch.nn.Module, batches: torch.Tensor, fused: bool) -> list[float]:
    """Train a module in place; return the losses."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3, fused=fused)
    losses = []
    for rows in batches:
        optimizer.zero_grad()
        loss = next_bytes_loss(module(rows[:, :-1]), rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained_by_fshard(
    module: torch.nn.Module, batches: torch.Tensor, fused: bool, strategy: fs.ShardTransform, mode: str
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train a model of a module, eager, jitted or donated; return the full parameters and the losses."""
    model = fs.functionalize(module, units=Block)
    tx = fs.chain(fs.clip_by_global_norm(1.0), fs.from_torch(torch.optim.AdamW, lr=3e-3, fused=fused))
    state = fs.TrainState.create(model.init(strategy), tx)

    def loss_fn(params: Any, rows: torch.Tensor) -> torch.Tensor:
        return next_bytes_loss(model.apply(params, rows[:, :-1]), rows)

    def step(state: fs.TrainState, rows: torch.Tensor) -> tuple[fs.TrainState, torch.Tensor]:
        loss, grads = fs.value_and_grad(loss_fn)(state.params, rows)
        return fs.update(tx, state, grads), loss

    run = step if mode == "eager" else fs.jit(step, donate_argnums=0 if mode == "donated" else ())
    losses = []
    for rows in batches:
        state, loss = run(state, rows)
        losses.append(loss.item())
    return fs.unshard(state.params), losses


def plain_torch(device: str) -> Findings:
    """Each strategy on one rank against plain torch on the same device: losses and parameters, bit for bit."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Embedding(256, 64), Block(), Block(), torch.nn.Linear(64, 256)).to(device)
    batches = torch.randint(256, (5, 8, 64), generator=torch.Generator().manual_seed(1)).to(device)
    mesh = fs.init_mesh({"shard": -1}, device=device)
    for fused in (False, True):
        trained = copy.deepcopy(module)
        expected = trained_by_torch(trained, batches, fused)
        for strategy in (fs.ddp, fs.zero1, fs.zero2, fs.zero3):
            for mode in ("eager", "jitted", "donated"):
                name = f"{strategy.__name__}, fused={fused}, {mode}"
                with reported(name) as row:
                    full, losses = trained_by_fshard(module, batches, fused, strategy(mesh), mode)
                    row["differs by"] = max((full[n] - p).abs().max().item() for n, p in trained.named_parameters())
                    row["passed"] = row["differs by"] == 0 and losses == expected
                yield row


def programs(device: str) -> Findings:
    """The programs of tests/accelerator on the ranks that there are, against the processor's numbers."""
    from tests.accelerator import programs

    fs.init_mesh({"shard": -1}, device=device)
    for name, program in programs.PROGRAMS.items():
        if name == "hsdp" and dist.get_world_size() == 1:
            continue
        try:
            expected = programs.leaves_of(program.run("cpu"))
            results = programs.leaves_of(program.run(device))
            difference = 0.0
            for result, reference in zip(results, expected, strict=True):
                if result.numel():
                    error = (result.double() - reference.double()).abs().max()
                    scale = max(1.0, reference.double().abs().max())
                    difference = max(difference, (error / scale).item())
            row = {"name": name, "passed": difference <= program.tolerance, "difference": difference}
        except Exception:
            row = {"name": name, "passed": False, "error": traceback.format_exc()[-1500:]}
        if dist.get_rank() == 0:
            yield row


def on_ranks(number: int) -> Callable[[str], Findings]:
    """The programs on so many ranks that share the device, through processors."""

    def run(device: str) -> Findings:
        with tempfile.TemporaryDirectory() as folder:
            torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(number))
            command = [*torchrun, __file__, "--stage", "programs", "--device", device, "--output", folder]
            if device == "emu":
                command += ["--library", os.environ[LIBRARY]]
            done = subprocess.run(command, cwd=ROOT, env=os.environ | {"EMU_DEVICES": "1", "OMP_NUM_THREADS": "2"})
            file = Path(folder, "found.jsonl")
            rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        for row in rows:
            row.pop("stage")
            yield row
        yield {"name": "exit code", "passed": done.returncode == 0 and bool(rows), "code": done.returncode}

    return run


def simulated(device: str) -> Findings:
    """Simulated ranks, threads of one process, on the default device."""

    def program() -> tuple[str, float]:
        mesh = fs.init_mesh({"shard": -1})
        params = fs.shard({"w": torch.arange(4096.0).reshape(64, 64)}, fs.zero3(mesh))
        x = torch.ones(4, 64, device=mesh.device_type)
        loss, grads = fs.value_and_grad(lambda p: (x @ fs.gather(p)["w"]).square().mean())(params)
        return mesh.device_type, loss.item(), fs.unshard(grads)["w"].norm().item()

    try:
        found = fs.testing.spmd(program, world=4)
        yield {"name": "spmd", "passed": len(set(found)) == 1, "found": found[0]}
    except Exception:
        yield {"name": "spmd", "passed": False, "error": traceback.format_exc()[-2500:]}


def suite(device: str) -> Findings:
    """The fast tests, on a machine that has an accelerator."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "14", "--dist", "worksteal", "--maxfail", "60"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    lines = done.stdout.splitlines()
    yield {
        "name": "fast tests",
        "passed": done.returncode == 0,
        "failed": [x for x in lines if x.startswith(("FAILED", "ERROR"))],
        "last": lines[-2:],
    }
    print(done.stdout[-400000:], done.stderr[-3000:])


@contextmanager
def reported(name: str) -> Iterator[dict[str, Any]]:
    """Make a finding that has not passed until it says so; it holds the error that leaves the block."""
    row: dict[str, Any] = {"name": name, "passed": False}
    try:
        yield row
    except Exception:
        row["error"] = traceback.format_exc()[-1500:]


@contextmanager
def no_waits() -> Iterator[None]:
    """Raise where the host waits for CUDA."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def optimizers() -> dict[str, Callable[[], Any]]:
    """Each wrapper around optimizers of torch and of fshard."""
    adamw = torch.optim.AdamW
    inner = {
        "AdamW": lambda **kw: fs.from_torch(adamw, lr=1e-3, **kw),
        "AdamW fused": lambda **kw: fs.from_torch(adamw, lr=1e-3, fused=True, **kw),
        "AdamW foreach": lambda **kw: fs.from_torch(adamw, lr=1e-3, foreach=True, **kw),
        "AdamW capturable": lambda **kw: fs.from_torch(adamw, lr=1e-3, capturable=True, **kw),
        "SGD momentum": lambda **kw: fs.from_torch(torch.optim.SGD, lr=1e-3, momentum=0.9, **kw),
        "fs.adamw": lambda: fs.adamw(1e-3),
    }
    wrap = {
        "": lambda tx: tx,
        "skip_nonfinite": fs.skip_nonfinite,
        "dynamic_loss_scale": fs.dynamic_loss_scale,
        "ema": lambda tx: fs.ema(tx, 0.9),
        "clip": lambda tx: fs.chain(fs.clip_by_global_norm(1.0), tx),
    }
    made = {f"{w}({i})" if w else i: (lambda a=wrap[w], b=inner[i]: a(b())) for w in wrap for i in inner}
    made["AdamW schedule"] = lambda: fs.from_torch(adamw, lr=lambda count: 1e-3 / (1 + count))
    made["fs.adamw schedule"] = lambda: fs.adamw(lambda count: 1e-3 / (1 + count))
    return made


def host_waits(device: str) -> Findings:
    """The steps of each optimizer and wrapper under set_sync_debug_mode("error")."""
    mesh = fs.init_mesh({"shard": -1}, device=device)
    module = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)]).to(device)
    model = fs.functionalize(module, units=torch.nn.Linear)
    x = torch.randn(4, 16, device=device)

    def train_step(tx: fs.Optimizer, donate: bool, state: fs.TrainState) -> fs.TrainState:
        scale = getattr(state.opt_state, "scale", 1.0)
        _, grads = fs.value_and_grad(lambda params: model.apply(params, x).square().sum() * scale)(state.params)
        return fs.update(tx, state, grads, donate=donate)

    for name, make in optimizers().items():
        for mode in ("eager", "donated", "jitted"):
            with reported(f"{name}, {mode}") as row:
                tx = make()
                state = fs.TrainState.create(model.init(fs.zero3(mesh)), tx)
                step = partial(train_step, tx, mode == "donated")
                run = fs.jit(step, donate_argnums=0) if mode == "jitted" else step
                for _ in range(2):
                    state = run(state)
                torch.cuda.synchronize()
                with no_waits():
                    for _ in range(2):
                        state = run(state)
                row["passed"] = True
            yield row


def nonfinite(device: str) -> Findings:
    """A gradient of infinity under skip_nonfinite and dynamic_loss_scale: parameters must not move."""
    mesh = fs.init_mesh({"shard": -1}, device=device)

    def train_step(tx: fs.Optimizer, donate: bool, state: fs.TrainState, factor: torch.Tensor) -> fs.TrainState:
        _, grads = fs.value_and_grad(lambda params: (fs.gather(params)["w"] * factor).sum())(state.params)
        return fs.update(tx, state, grads, donate=donate)

    flags = (False, True)
    for wrapper, fused, donate, jitted in itertools.product((fs.skip_nonfinite, fs.dynamic_loss_scale), *[flags] * 3):
        mode = "jitted" if jitted else "eager"
        with reported(f"{wrapper.__name__}, fused={fused}, donate={donate}, {mode}") as row:
            tx = wrapper(fs.from_torch(torch.optim.AdamW, lr=1e-1, fused=fused))
            state = fs.TrainState.create(fs.shard({"w": torch.ones(8)}, fs.zero3(mesh)), tx)
            step = partial(train_step, tx, donate)
            run = fs.jit(step, donate_argnums=0 if donate else ()) if jitted else step
            state = run(state, torch.tensor(1.0, device=device))
            before = fs.unshard(state.params)["w"].clone()
            state = run(state, torch.tensor(torch.inf, device=device))
            row["passed"] = torch.equal(before, fs.unshard(state.params)["w"])
        yield row


def offload(device: str) -> Findings:
    """Offloaded parameters: whether they stay pinned, and the GB/s of gathering them."""
    mesh = fs.init_mesh({"shard": -1}, device=device)
    full = {f"w{i}": torch.randn(4096, 4096, device=device) for i in range(16)}
    params = fs.shard(full, fs.zero3(mesh, layout=fs.compose(fs.offload(device), fs.fully_shard(mesh["shard"]))))
    leaves = fs.tree_leaves(params)
    row = {"name": "offload", "on": leaves[0].device.type, "pinned": device == "cuda" and leaves[0].is_pinned()}
    seconds = []
    for _ in range(4):
        torch.accelerator.synchronize()
        start = time.perf_counter()
        got = fs.gather(params)
        torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - start)
    equal = all(torch.equal(got[name], full[name]) for name in full)
    nbytes = sum(tensor.nbytes for tensor in full.values())
    yield row | {"passed": equal and row["pinned"], "equal": equal, "GB/s": nbytes / min(seconds) / 1e9}
    tx = fs.from_torch(torch.optim.AdamW, lr=1e-3)
    state = fs.TrainState.create(params, tx)
    _, grads = fs.value_and_grad(lambda p: sum(w.square().sum() for w in fs.gather(p).values()))(state.params)
    state = fs.update(tx, state, grads)
    pinned = [device == "cuda" and leaf.is_pinned() for leaf in fs.tree_leaves(state.params)]
    yield {"name": "after an update", "passed": all(pinned), "pinned": sum(pinned), "of": len(pinned)}


def checkpoint(device: str) -> Findings:
    """An asynchronous save while donated steps go on: it must hold the values of its own step."""
    mesh = fs.init_mesh({"shard": -1}, device=device)
    tx = fs.from_torch(torch.optim.AdamW, lr=1e-2, fused=True)
    full = {f"w{i}": torch.randn(2048, 2048, device=device) for i in range(8)}

    def step(state):
        loss, grads = fs.value_and_grad(lambda p: sum(w.square().sum() for w in fs.gather(p).values()))(state.params)
        return fs.update(tx, state, grads), loss

    run = fs.jit(step, donate_argnums=0)
    state = fs.TrainState.create(fs.shard(full, fs.zero3(mesh)), tx)
    state, _ = run(state)
    kept = fs.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, state)
    with tempfile.TemporaryDirectory() as folder, fs.checkpoint.Manager(folder, keep=2, every=1) as manager:
        torch.accelerator.synchronize()
        start = time.perf_counter()
        manager.save(state)
        blocked = time.perf_counter() - start
        for _ in range(20):
            state, _ = run(state)
        manager.wait()
        restored = manager.restore(like=state)
        pairs = zip(fs.tree_leaves(restored), fs.tree_leaves(kept), strict=True)
        equal = all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)
        yield {"name": "asynchronous save", "passed": equal, "blocked ms": 1e3 * blocked}


def gpu_bench(*options: str) -> Callable[[str], Findings]:
    """One configuration of gpu.py; its JSON is the finding."""

    def run(device: str) -> Findings:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), *options, "--results", folder]
            done = subprocess.run(command, cwd=ROOT)
            files = list(Path(folder).glob("*.json"))
            for file in files:
                results = json.loads(file.read_text())
                for name, values in results["systems"].items():
                    if values is None:
                        yield {"name": name, "passed": False, "error": "does not fit"}
                        continue
                    yield {
                        "name": name,
                        "passed": True,
                        "ms": 1e3 * values["median_seconds"],
                        "host ms": 1e3 * values["median_host_seconds"],
                        "MFU": values["mfu"],
                        "peak GiB": values["peak_bytes"] / 2**30,
                        "loss": values["losses"][-1],
                    }
                predicted = results.get("predicted")
                if predicted:
                    yield {"name": "predicted", "passed": True, **predicted}
            if not files:
                yield {"name": "gpu.py", "passed": False, "error": f"exit code {done.returncode}; see its log"}

    return run


def self_test(device: str) -> Findings:
    """python -m fshard."""
    done = subprocess.run([sys.executable, "-m", "fshard"], cwd=ROOT, capture_output=True, text=True)
    yield {"name": "python -m fshard", "passed": done.returncode == 0, "output": done.stdout + done.stderr[-500:]}


def loop(device: str) -> Findings:
    """One process as rank 0 of 8 by the loop backend: layers of 7B, and the peak beside the plan's."""
    import loop_backend
    from gpt import Configuration
    from predict import MIXED, chip_of, predicted

    loop_backend.start(8, device)
    mesh = fs.init_mesh({"shard": -1}, device=device)
    # Elsewhere this is a rehearsal, of a small model.
    configuration = Configuration.parse(LAYERS_OF_7B if device == "cuda" else "d64-L4-B1-T16-V256")
    plan = predicted(configuration, "zero3", {"shard": 8}, chip_of("H200"), on=mesh)
    yield {"name": "plan", "passed": plan is not None, "plan": plan}
    wide = {"bucket_bytes": 500_000_000}
    for sleep, options in ((0, {}), (2_000_000, {}), (2_000_000, wide)):
        loop_backend.SLEEP = sleep
        for backend in (None, "graph"):
            with reported(f"zero3 {backend or 'eager'}, {sleep} cycles a collective, {options}") as row:
                row |= timed_in_loop(configuration, mesh, backend, MIXED | options)
            yield row


def timed_in_loop(configuration: Any, mesh: Any, backend: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Time a step of zero3 on rank 0 of the loop backend."""
    import gpu
    import rivals

    x, y = (tokens.to(mesh.device_type) for tokens in configuration.tokens(0))
    with torch.device(mesh.device_type):
        system = rivals.fshard(lambda mesh: fs.zero3(mesh, **options), backend)(configuration, mesh, (x, y))
    if mesh.device_type != "cuda":
        losses = [system.step().item() for _ in range(4)]
        return {"passed": all(map(math.isfinite, losses)), "losses": losses}
    samples = gpu.measure(system.step, dropped=3, rounds=6)
    return {
        "passed": all(map(math.isfinite, samples.losses)),
        "losses": samples.losses,
        "ms": 1e3 * statistics.median(samples.seconds),
        "host ms": 1e3 * statistics.median(samples.host_seconds),
        "peak GB": samples.peak_bytes / 1e9,
        "reserved GB": torch.cuda.memory_stats()["reserved_bytes.all.peak"] / 1e9,
    }


LAYERS_OF_7B = "d4096-L6-B1-T4096-V32000"
MODEL = "d2048-L24-B4-T2048-V32000"
STAGES = {
    "versions": Stage(versions, 60),
    "readme": Stage(readme, 60),
    "plain_torch": Stage(plain_torch, 60),
    "programs": Stage(programs, 60),
    "nonfinite": Stage(nonfinite, 60),
    "host_waits": Stage(host_waits, 90, needs_cuda=True),
    "two_ranks": Stage(on_ranks(2), 80),
    "four_ranks": Stage(on_ranks(4), 80),
    "simulated": Stage(simulated, 40),
    "offload": Stage(offload, 40),
    "checkpoint": Stage(checkpoint, 40),
    "model": Stage(
        gpu_bench(
            *("--configurations", MODEL, "--systems", "plain,fsdp2,fshard-zero3,fshard-zero3-graph"),
            *("--rounds", "8", "--dropped", "3"),
        ),
        120,
        needs_cuda=True,
    ),
    "capture": Stage(
        gpu_bench(
            *(
                "--configurations",
                MODEL,
                "--systems",
                "fshard-zero3-graph-captured,plain-compiled,fshard-zero3-inductor",
            ),
            *("--rounds", "8", "--dropped", "3"),
        ),
        150,
        needs_cuda=True,
    ),
    "loop": Stage(loop, 90),
    "self_test": Stage(self_test, 60),
    "suite": Stage(suite, 150),
}


def main() -> None:
    args = parse_args()
    if args.stage:
        work(args)
        return
    start = time.monotonic()
    args.output.mkdir(parents=True, exist_ok=True)
    args.output.joinpath("found.jsonl").write_text("")
    library = None
    if args.device == "emu":
        from tests.accelerator import emu

        library = args.output / "emu.so"
        if not library.exists():
            emu.build(args.output)
    rows: list[tuple[str, str]] = []
    for name in args.only or STAGES:
        stage = STAGES[name]
        left = args.seconds - (time.monotonic() - start)
        if stage.needs_cuda and args.device != "cuda":
            rows.append((name, "left out: needs CUDA"))
            continue
        if left < 15:
            rows.append((name, f"left out: {left:.0f} s are left"))
            continue
        rows.append((name, run_stage(name, min(stage.seconds, left), args, library)))
        print(f"{name}: {rows[-1][1]}", flush=True)
    print()
    for name, text in rows:
        print(f"{name:<14}{text}")


def run_stage(name: str, seconds: float, args: argparse.Namespace, library: Path | None) -> str:
    """Run a stage in a process of its own; return what it came to."""
    command = [sys.executable, __file__, "--stage", name, "--device", args.device, "--output", str(args.output)]
    if library:
        command += ["--library", str(library)]
    start = time.monotonic()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with open(args.output / f"{name}.log", "w") as log:
        try:
            code: Any = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, timeout=seconds, env=environment
            ).returncode
        except subprocess.TimeoutExpired:
            code = f"stopped after {seconds:.0f} s"
    took = time.monotonic() - start
    rows = []
    for line in (args.output / "found.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["stage"] == name:
            rows.append(row)
    failed = [row["name"] for row in rows if not row["passed"]]
    summary = f"{took:5.1f} s, exit {code}, {len(rows) - len(failed)} of {len(rows)} passed"
    if failed:
        summary += f"; not: {', '.join(failed)[:300]}"
    return summary


def work(args: argparse.Namespace) -> None:
    """Run one stage here."""
    if args.library:
        from tests.accelerator import emu

        emu.load(args.library)
        os.environ[LIBRARY] = str(args.library.resolve())
    with open(args.output / "found.jsonl", "a") as file:
        for row in STAGES[args.stage].run(args.device):
            print(json.dumps({"stage": args.stage, **row}), file=file, flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/quarter_hour"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=530, help="that all stages may take together")
    parser.add_argument("--only", type=lambda text: text.split(","), help=f"of {','.join(STAGES)}")
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    parser.add_argument("--library", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
