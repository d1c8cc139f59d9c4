"""What `fs.trace` costs: the step of a GPT traced, and as it is, interleaved and compared round by round.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 benchmarks/trace.py

Every round runs each system's step both ways, in an order that changes; a traced step is one whole `with fs.trace()`,
its context's begin and end included, its report not. The cost of a trace is the median over rounds of the ratio, with
the interval that holds the true median 95 times in 100; once of the time, once of the processor time of all threads of
this rank, which does not know of waiting. Of a step that is not traced either the same is told, which says what such a
number is worth, and of the recorder of collectives, which sees every operator. What is noted of one collective is also
timed alone, and told times a step's collectives; and so is the cost of a trace that is off, which is two looks at the
rank's flight recorder for each collective.
"""

import argparse
import gc
import math
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
import torch
import torch.distributed as dist
from rivals import SYSTEMS, make
from trained_gpt import Configuration

import fshard as fs
from fshard.comm.groups import Group

# Ways to run a step.
OFF, AGAIN, TRACED, RECORDED = "off", "off again", "traced", "recorded"

# Looks at the flight recorder, and collectives, that are timed together.
LOOKS = 10_000


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    results = report.circumstances("trace")
    results |= {
        "configuration": {"name": args.configuration.name, **args.configuration._asdict()},
        **{"ranks": mesh.size(), "backend": dist.get_backend(), "threads": torch.get_num_threads()},
        **{"rounds": args.rounds, "dropped_rounds": args.dropped, "systems": {}},
    }
    for name in args.systems:
        system = make(name, args.configuration, mesh)
        results["systems"][name] = measured(system.step, args.dropped, args.rounds)
        del system
        gc.collect()
    if mesh.get_rank() == 0:
        ratios = ("traced / off", "95%", "processor", "95%", "off / off", "95%", "recorded / off")
        columns = ("ms", *ratios, "collectives", "noted / step", "looks / step when off")
        rows = {name: cells(values) for name, values in results["systems"].items()}
        report.print_table(f"Cost of a trace, {args.configuration.name}, ranks: {mesh.size()}", columns, rows)
        report.write_json(args.results / "trace.json", results)


def measured(step: Callable[[], torch.Tensor], dropped: int, rounds: int) -> dict[str, Any]:
    """Seconds of each way in each round that counts, and what follows from them."""
    seconds: dict[str, list[float]] = {OFF: [], AGAIN: [], TRACED: [], RECORDED: []}
    processor: dict[str, list[float]] = {OFF: [], AGAIN: [], TRACED: [], RECORDED: []}
    collectives = 0
    for number in range(dropped + rounds):
        if number == dropped:
            gc.collect()
            gc.freeze()
        # The same order on every rank, without which they would wait for each other.
        for way in random.Random(number).sample(list(seconds), len(seconds)):
            dist.barrier()
            start, busy = time.perf_counter(), time.process_time()
            if way == TRACED:
                with fs.trace():
                    step()
            elif way == RECORDED:
                with fs.comm.record() as record:
                    step()
                collectives = len(record)
            else:
                step()
            dist.barrier()
            if number >= dropped:
                seconds[way].append(time.perf_counter() - start)
                processor[way].append(time.process_time() - busy)
    noted, look = noted_seconds(), look_seconds()
    gc.unfreeze()
    median_off = statistics.median(seconds[OFF])
    return {
        "median_seconds": {way: statistics.median(values) for way, values in seconds.items()},
        "ratio": median_ratio(seconds[TRACED], seconds[OFF]),
        "processor_ratio": median_ratio(processor[TRACED], processor[OFF]),
        "again_ratio": median_ratio(seconds[AGAIN], seconds[OFF]),
        "recorded_ratio": median_ratio(seconds[RECORDED], seconds[OFF]),
        "collectives": collectives,
        "noted_seconds": noted,
        "share_noted": collectives * noted / median_off,
        "look_seconds": look,
        "share_when_off": 2 * collectives * look / median_off,
        "seconds": seconds,
        "processor_seconds": processor,
    }


def median_ratio(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """The median of the ratios of rounds, and its 95% interval by order statistics."""
    ratios = sorted(a / b for a, b in zip(ours, theirs))
    # How many of n fair coins show heads is within 1.96 deviations of n / 2 that often.
    reach = 1.96 * math.sqrt(len(ratios)) / 2
    lower, upper = (round(len(ratios) / 2 + sign * reach) for sign in (-1, 1))
    return {
        "median": statistics.median(ratios),
        **{"lower": ratios[max(lower - 1, 0)], "upper": ratios[min(upper, len(ratios) - 1)]},
    }


def noted_seconds() -> float:
    """Seconds in which a trace notes one collective of one buffer, from its call to its landing."""
    tensors, label = [torch.zeros(1)], fs.comm.Label("gather", ("unit",))
    entry = fs.comm.Collective("all_gather", "shard", 2, label, 8, 1, False)
    group = Group("shard", [0, 1], 0, None, 1.0)
    with fs.trace() as trace:
        start = time.perf_counter()
        for _ in range(LOOKS):
            issued = fs.comm.PendingCollective(entry, fs.comm.rank_state(), group, group.chain[-1])
            trace.starts(issued, tensors)
            trace.started(issued)
            trace.waits(issued)
            trace.landed(issued)
        return (time.perf_counter() - start) / LOOKS


def look_seconds() -> float:
    """Seconds of one look at what this thread is to tell, and whom."""
    start = time.perf_counter()
    for _ in range(LOOKS):
        for _ in fs.comm.watchers():
            pass
    return (time.perf_counter() - start) / LOOKS


def cells(values: dict[str, Any]) -> list[str]:
    return [
        f"{1e3 * values['median_seconds'][OFF]:.1f}",
        *interval(values["ratio"]),
        *interval(values["processor_ratio"]),
        *interval(values["again_ratio"]),
        f"{values['recorded_ratio']['median']:.4f}",
        f"{values['collectives']}",
        f"{values['share_noted']:.6f}",
        f"{values['share_when_off']:.6f}",
    ]


def interval(ratio: dict[str, float]) -> tuple[str, str]:
    return f"{ratio['median']:.4f}", f"{ratio['lower']:.4f} to {ratio['upper']:.4f}"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configuration", type=Configuration.parse, default="d128-L4-B4-T64")
    systems = ["fshard-zero2", "fshard-zero3", "fshard-zero3-graph"]
    parser.add_argument("--systems", type=lambda names: names.split(","), default=systems)
    parser.add_argument("--rounds", type=int, default=301, help="rounds that count")
    parser.add_argument("--dropped", type=int, default=3, help="rounds before them")
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    args = parser.parse_args()
    if unknown := set(args.systems) - set(SYSTEMS):
        parser.error(f"no system is called {', '.join(sorted(unknown))}; there are {', '.join(SYSTEMS)}")
    if args.rounds < 2:
        parser.error("medians need 2 rounds or more")
    return args


if __name__ == "__main__":
    main()
