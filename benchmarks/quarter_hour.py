"""Run all that one GPU can tell in a quarter of an hour, each stage in a process of its own.

    python benchmarks/quarter_hour.py --output runs/quarter_hour

It is for a machine with torch 2.11 or newer, Python 3.12 and no network. Bring a wheel of optree and this repository:

    pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \\
        --platform manylinux2014_x86_64 -d wheels optree==0.20.0
    pip install --no-index --no-deps --target site wheels/*.whl
    PYTHONPATH=site python benchmarks/quarter_hour.py --output runs/quarter_hour

The limits of all stages add up to the 530 seconds that `--seconds` allows, so that one command of ten minutes has room
for all of them. The parent never touches the device, and imports nothing but the standard library. A stage that takes
longer than its limit is stopped, with all that it started. A stage that no longer has half of its limit is left out by
name. The output folder has three files: `found.jsonl`, to which each finding is appended at once as a line of JSON;
`log.txt`, with all else that stages print; and `table.txt`, which is printed last. `--only` runs some stages.

Ranks that share the device send through processors. To try NCCL on one device instead, which takes 2.30 or newer, name
its library by `--nccl path/to/libnccl.so.2`; it has 250 MB.

To rehearse without a GPU, `--device emu` builds the device of `tests/accelerator` and runs the same lines with small
sizes. What it finds of times and memory says nothing.
"""

import argparse
import contextlib
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Stage(NamedTuple):
    """One stage.

    Attributes:
        run: Its module in the folder `stages` and its function.
        seconds: The time that it may take.
        about: What passes, for readers of the table.
    """

    run: str
    seconds: float
    about: str


STAGES = {
    "versions": Stage("one_rank.versions", 15, "versions; fshard imports"),
    "one_rank": Stage("one_rank.one_rank", 40, "README program on the device; bits of plain torch"),
    "faults": Stage("faults.faults", 35, "no NaN after skips; peak of clipping; leaves stay pinned"),
    "host_waits": Stage("faults.host_waits", 35, "no optimizer or wrapper lets the host wait"),
    "two_ranks": Stage("ranks.two_ranks", 35, "the processor's numbers, through processors"),
    "direct": Stage("ranks.direct", 35, "the processor's numbers, by NCCL, in the place of two_ranks"),
    "four_ranks": Stage("ranks.four_ranks", 40, "the processor's numbers, through processors"),
    "races": Stage("streams.races", 60, "rank 0 of 8: bits stay with random waits and NaN in free memory"),
    "sanitizer": Stage("streams.sanitizer", 35, "rank 0 of 8: no race for torch's checker of streams"),
    "model": Stage("speed.model", 60, "Llama of 1.2 B, one rank: ms, MFU, host ms, peak"),
    "loop": Stage("speed.loop", 60, "rank 0 of 8, layers of 7 B: exposed ms, peak over plan"),
    "capture": Stage("capture.capture", 20, "replays equal steps; counts on the processor are refused"),
    "inductor": Stage("speed.inductor", 45, "four layers of the Llama by Inductor"),
    "checkpoint": Stage("storage.checkpoint", 15, "a save holds its own step while donated steps go on"),
    "offload": Stage("storage.offload", 15, "pinned; GB/s"),
    "self_test": Stage("one_rank.self_test", 20, "simulated ranks; python -m fshard"),
}
# What ranks of torchrun run for a stage.
ON_RANKS = {"programs": "ranks.programs", "direct_programs": "ranks.direct_programs"}
SECONDS = 530
# The time in which a stage that is stopped may end its ranks.
GRACE_SECONDS = 5
# A rehearsal is about lines, not times, and its processors may be slow.
SLOWER = 20


def main() -> int:
    args = parse_args()
    if args.stage:
        work(args)
        return 0
    start = time.monotonic()
    args.output.mkdir(parents=True, exist_ok=True)
    for name in ("found.jsonl", "log.txt"):
        args.output.joinpath(name).write_text("")
    scale = 1
    if args.device == "emu":
        scale = SLOWER
        args.library = args.library or built(args.output)
    results = {}
    for name in args.only or STAGES:
        left = args.seconds * scale - (time.monotonic() - start)
        results[name] = reason_to_leave_out(name, args, left / scale)
        if not results[name]:
            results[name] = run_stage(name, min(scale * STAGES[name].seconds, left), args)
        print(f"{name}: {results[name]}", flush=True)
    lines = [f"{name:<11} {text}\n{'':<11} ({STAGES[name].about})" for name, text in results.items()]
    table = "\n".join([*lines, f"{time.monotonic() - start:.0f} s in all"])
    args.output.joinpath("table.txt").write_text(f"{table}\n")
    print(f"\n{table}")
    return any("not:" in text or "exit" in text for text in results.values())


def built(folder: Path) -> Path:
    """Build the tests' device, unless it is there."""
    sys.path.insert(0, str(ROOT))
    from tests.accelerator import emu

    library = folder / "emu.so"
    return library if library.exists() else emu.build(folder)


def reason_to_leave_out(name: str, args: argparse.Namespace, left: float) -> str:
    """Say why a stage is not run; the empty text for one that is."""
    if args.device == "cuda" and name == "direct" and not args.nccl:
        return "left out: needs --nccl"
    if args.device == "cuda" and name == "two_ranks" and args.nccl:
        return "left out: direct is in its place"
    if left < STAGES[name].seconds / 2:
        return f"left out: needs {STAGES[name].seconds:.0f} s, {left:.0f} s are left"
    return ""


def run_stage(name: str, seconds: float, args: argparse.Namespace) -> str:
    """Run a stage in a process of its own; return what it came to."""
    command = [sys.executable, __file__, "--stage", name, "--device", args.device, "--output", str(args.output)]
    for option in ("library", "nccl"):
        if getattr(args, option):
            command += [f"--{option}", str(getattr(args, option))]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    start = time.monotonic()
    cpu_start = cpu_seconds_of_children()
    with open(args.output / "log.txt", "a") as log:
        print(f"=== {name}", file=log, flush=True)
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, process_group=0)
        try:
            ending = f"exit {code}" if (code := process.wait(seconds)) else ""
        except subprocess.TimeoutExpired:
            ending = f"exit: stopped after {seconds:.0f} s"
        finally:
            end_with_its_ranks(process)
    took = time.monotonic() - start
    rows = findings(args.output, name)
    times = {"seconds": took, "cpu seconds": cpu_seconds_of_children() - cpu_start}
    with open(args.output / "found.jsonl", "a") as file:
        print(json.dumps({"stage": name, "name": "seconds", "passed": not ending, **times}), file=file)
    return summary(rows, took, ending)


def end_with_its_ranks(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs, with all that it has started, which would keep the device busy."""
    if process.poll() is not None:
        return
    # Ranks are in groups of their own, and torchrun ends them if it is asked to.
    os.killpg(process.pid, signal.SIGTERM)
    end = time.monotonic() + GRACE_SECONDS
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < end:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def cpu_seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def findings(folder: Path, stage: str) -> list[dict[str, Any]]:
    """Read what a stage has found."""
    rows = [json.loads(line) for line in (folder / "found.jsonl").read_text().splitlines()]
    return [row for row in rows if row["stage"] == stage]


def summary(rows: list[dict[str, Any]], took: float, ending: str) -> str:
    """Say in a line how many findings are as expected, and name the others."""
    failed = [row["name"] for row in rows if not row["passed"]]
    parts = [f"{took:5.1f} s, {len(rows) - len(failed)} of {len(rows)} passed"]
    if failed:
        parts.append(f"not: {', '.join(failed)[:300]}")
    if ending:
        parts.append(ending)
    return "; ".join(parts)


def work(args: argparse.Namespace) -> None:
    """Run one stage here."""
    sys.path.insert(0, str(ROOT))
    from stages import Place

    emu = None
    if args.library:
        from tests.accelerator import emu as tests_device

        emu = tests_device.load(args.library)
    module, name = (STAGES[args.stage].run if args.stage in STAGES else ON_RANKS[args.stage]).split(".")
    run = getattr(importlib.import_module(f"stages.{module}"), name)
    place = Place(args.device, emu, args.library, args.nccl)
    with open(args.output / "found.jsonl", "a") as file:
        for row in with_last_error(run, place):
            print(json.dumps({"stage": args.stage, **row}, default=str), file=file, flush=True)


def with_last_error(run: Callable[[Any], Iterator[dict[str, Any]]], place: Any) -> Iterator[dict[str, Any]]:
    """Yield what a stage finds, and the error that ends it, if one does."""
    try:
        yield from run(place)
    except Exception:
        yield {"name": "the stage itself", "passed": False, "error": traceback.format_exc()[-1500:]}
        raise


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/quarter_hour"))
    parser.add_argument("--device", choices=("cuda", "emu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="that all stages may take together")
    parser.add_argument("--only", type=lambda text: text.split(","), help=f"of {','.join(STAGES)}")
    parser.add_argument("--nccl", type=Path, help="the library of an NCCL that takes several ranks on one device")
    parser.add_argument("--library", type=Path, help="the tests' device, where it is built already")
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
