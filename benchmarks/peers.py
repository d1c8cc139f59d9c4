"""Step times of fshard and of torch's own ways to train, interleaved and compared round by round.

Two ranks, one thread each, for the configurations of the project's targets:

    OMP_NUM_THREADS=1 python benchmarks/peers.py --configuration d512-L8-B4-T256
    OMP_NUM_THREADS=1 python benchmarks/peers.py --configuration d1024-L8-B1-T128
    OMP_NUM_THREADS=1 python benchmarks/peers.py --configuration d64-L48-B1-T16
    OMP_NUM_THREADS=1 python benchmarks/peers.py --configuration d128-L4-B8-T128-V256

--compiled adds FSDP2 with compiled blocks and fshard by Inductor, which take minutes to compile. On one rank fshard
against plain PyTorch, for the whole step and for forward and backward alone:

    OMP_NUM_THREADS=1 python benchmarks/peers.py --ranks 1 --configuration d512-L8-B4-T256

Each system has processes of its own, as in use, and all wait while one takes a step: in one process the C allocator
gives back to the operating system what one system frees and another takes, and steps are slower by up to a third. From
one start to the next a process's times move by some percent, so all are started --launches times. The table has the
least and the largest ratio of a start: where they are further apart than 3% of the median the row guards nothing, and
says so. Most of the spread comes from page faults, of memory that the C allocator has given back and takes again, more
or less of it by where its heap ends: the table counts them. `fs.init_mesh` lets glibc keep more; torch's systems have a
mesh of torch's, and so glibc as it is. In all systems it keeps all memory with

    GLIBC_TUNABLES=glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=17179869184

and the results say so. --manual-gc does for all systems what torchtitan does: the garbage collector is off during a
round, and collects young objects between rounds. --pin keeps each rank, with the threads of its backend, on one core.
Where the systems would need more than --memory-fraction of the memory that is available, they are measured in groups
one after another, with the reference in each; one group that does not fit is refused.

Ratios are medians over rounds of the ratio to the reference (torch DDP, or plain PyTorch) in the same round. The time
of the main thread is CPU time, which waiting does not add to: what it exceeds plain PyTorch's by is overhead of the
host.
"""

import argparse
import gc
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import report
import torch.distributed as dist
from groups import grouped
from rivals import SYSTEMS, System, make
from rounds import Samples, Turn, check_losses, in_turn, paired, take_turn
from torch.distributed.device_mesh import init_device_mesh
from trained_gpt import Configuration

import fshard as fs

# Those that are to be compared with each other stand together, so that they share a group.
ACROSS_RANKS = (
    *("ddp", "fsdp2", "fshard-ddp", "fshard-zero2", "fshard-zero3"),
    *("fshard-ddp-graph", "fshard-zero2-graph", "fshard-zero3-graph"),
    *("fshard-zero1", "fsdp1", "fsdp2-fine", "zero-redundancy"),
)
ON_ONE_RANK = ("plain", "fshard-ddp", "fshard-zero2", "fshard-zero3", "fshard-zero3-graph")

# Ratios of starts that are further apart tell no two versions from each other.
SPREAD = 0.03

# A step, or making a system and compiling it, ends before.
HUNG_SECONDS = 600.0


def main() -> None:
    args = parse_args()
    names = args.systems or (ON_ONE_RANK if args.ranks == 1 else ACROSS_RANKS)
    names = [*names, "fshard-zero3-inductor", "fsdp2-compiled"] if args.compiled else list(names)
    wanted = "plain" if args.ranks == 1 else "ddp"
    reference = wanted if wanted in names else names[0]
    parts = ("step", "gradients") if args.ranks == 1 else ("step",)

    samples: dict[str, list[dict[str, list[Samples]]]] = {part: [] for part in parts}
    for group in grouped("peers.py", names, [reference], args.configuration, args.ranks, args.memory_fraction):
        launches = [measured(group, parts, args) for _ in range(args.launches)]
        for part in parts:
            samples[part].append({name: [launch[part][name] for launch in launches] for name in group})
    write(args, reference, samples)


def measured(group: Sequence[str], parts: Sequence[str], args: argparse.Namespace) -> dict[str, dict[str, Samples]]:
    """Start the processes of some systems and measure them, part by part."""
    samples = {}
    with ExitStack() as stack:
        make_ranks = partial(fs.testing.Workers, args.ranks, timeout=HUNG_SECONDS)
        ranks = {name: stack.enter_context(make_ranks()) for name in group}
        for workers in ranks.values() if args.pin else ():
            workers.run(pin)
        for part in parts:
            turn = partial(steps_of, ranks, args, part)
            samples[part] = in_turn(group, turn, args.dropped, args.rounds)
            check_losses(samples[part], args.ranks)
    return samples


def pin() -> None:
    """Keep all threads of this rank on a core of its own, as far as there are cores."""
    cores = sorted(os.sched_getaffinity(0))
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {cores[dist.get_rank() % len(cores)]})


def together(launches: Sequence[Samples]) -> Samples:
    """The rounds of several launches, one after another."""
    return Samples(*(list(chain.from_iterable(values)) for values in zip(*launches, strict=True)))


def steps_of(
    ranks: Mapping[str, fs.testing.Workers], args: argparse.Namespace, part: str, name: str, steps: int
) -> Sequence[Turn]:
    """Let a system take steps, or parts of them, on each of its ranks."""
    configuration = args.configuration
    collecting = collecting_after if args.manual_gc else nullcontext

    def take() -> Turn:
        step = getattr(system_of(name, configuration), part)
        with collecting():
            return take_turn(step, steps)

    return ranks[name].run(take)


@contextmanager
def collecting_after() -> Iterator[None]:
    """Turn the garbage collector off, and collect young objects at the end."""
    gc.disable()
    try:
        yield
    finally:
        gc.collect(1)
        gc.enable()


@cache
def system_of(name: str, configuration: Configuration) -> System:
    """The system of this process, made when it is first asked for, on a mesh of its own library's."""
    if name.startswith("fshard"):
        return make(name, configuration, fs.init_mesh({"shard": -1}, device="cpu"))
    return make(name, configuration, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",)))


def summary(name: str, launches: Mapping[str, list[Samples]], reference: str) -> dict[str, Any]:
    """Medians over rounds, of times and of ratios to the same round of the reference and of FSDP2."""
    group = {system: together(rounds) for system, rounds in launches.items()}
    samples = group[name]
    starts = [
        statistics.median(paired(own.seconds, other.seconds))
        for own, other in zip(launches[name], launches[reference], strict=True)
    ]
    ratios = paired(samples.seconds, group[reference].seconds)
    lower, median, upper = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    cpu_ratios = paired(samples.main_thread_seconds, group[reference].main_thread_seconds)
    to_fsdp2 = statistics.median(paired(samples.seconds, group["fsdp2"].seconds)) if "fsdp2" in group else None
    return {
        "median_seconds": statistics.median(samples.seconds),
        "median_main_thread_seconds": statistics.median(samples.main_thread_seconds),
        "median_page_faults": statistics.median(samples.page_faults),
        "ratio": median,
        "ratio_quartiles": [lower, upper],
        "ratios_of_starts": starts,
        "guards": max(starts) - min(starts) <= SPREAD * median,
        "main_thread_ratio": statistics.median(cpu_ratios),
        "ratio_to_fsdp2": to_fsdp2,
        **samples._asdict(),
    }


def write(args: argparse.Namespace, reference: str, samples: Mapping[str, list[dict[str, list[Samples]]]]) -> None:
    ranks = args.ranks
    name = args.configuration.name
    # Other results than those that the pages show.
    suffix = "-manual-gc" if args.manual_gc else ""
    results = report.circumstances(f"peers{suffix}")
    results |= {
        "configuration": {"name": name, **args.configuration._asdict()},
        **{"ranks": ranks, "backend": "gloo", "threads": 1},
        **{"reference": reference, "launches": args.launches, "rounds": args.rounds, "dropped_rounds": args.dropped},
        **{"pinned": args.pin, "allocator": os.environ.get("GLIBC_TUNABLES", "as it is")},
        "manual_gc": args.manual_gc,
    }
    collector = ", no garbage collection in a round" if args.manual_gc else ""
    columns = ("ms", "ratio", "quartiles", "starts", "guards", "to fsdp2", "main thread ms", "ratio", "page faults")
    bars = {}
    for part, groups in samples.items():
        results[part] = [{system: summary(system, group, reference) for system in group} for group in groups]
        title = {"step": "Train step", "gradients": "Forward and backward alone"}[part]
        for number, summaries in enumerate(results[part], start=1):
            of = f", group {number} of {len(groups)}" if len(groups) > 1 else ""
            rows = {system: cells(values) for system, values in summaries.items()}
            report.print_table(f"{title}, {name}, ranks: {ranks}{of}{collector}; {reference} = 1", columns, rows)
            label = "{}" if part == "step" else "{}, gradients"
            bars |= {label.format(system): values["ratio"] for system, values in summaries.items()}
    file = args.results / f"{'one-rank' if ranks == 1 else 'peers'}-{name}{suffix}.json"
    report.write_json(file, results)
    title = f"Time of a train step, {name}, ranks: {ranks}{collector}"
    marks = [report.Mark(1.0, reference)]
    report.write_bars(file.with_suffix(".png"), title, f"ratio to {reference}, lower is better", bars, marks)


def cells(values: Mapping[str, Any]) -> list[str]:
    lower, upper = values["ratio_quartiles"]
    return [
        f"{1e3 * values['median_seconds']:.1f}",
        f"{values['ratio']:.3f}",
        f"{lower:.3f} to {upper:.3f}",
        f"{min(values['ratios_of_starts']):.3f} to {max(values['ratios_of_starts']):.3f}",
        "yes" if values["guards"] else "no",
        "-" if values["ratio_to_fsdp2"] is None else f"{values['ratio_to_fsdp2']:.3f}",
        f"{1e3 * values['median_main_thread_seconds']:.1f}",
        f"{values['main_thread_ratio']:.3f}",
        f"{values['median_page_faults']:.0f}",
    ]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configuration", type=Configuration.parse, default="d512-L8-B4-T256")
    parser.add_argument("--systems", type=lambda names: names.split(","), help=f"of {','.join(SYSTEMS)}")
    parser.add_argument("--compiled", action="store_true", help="also FSDP2 with compiled blocks, and Inductor")
    parser.add_argument("--ranks", type=int, default=2, help="of each system; 1 is against plain PyTorch")
    parser.add_argument("--launches", type=int, default=3, help="times that the processes are started")
    parser.add_argument("--pin", action="store_true", help="each rank to a core of its own")
    parser.add_argument("--manual-gc", action="store_true", help="collect garbage between rounds alone, in all systems")
    parser.add_argument("--rounds", type=int, default=4, help="rounds that count, of each launch")
    parser.add_argument("--dropped", type=int, default=2, help="rounds before them")
    parser.add_argument("--memory-fraction", type=float, default=0.8, help="of the available memory, to use at most")
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    args = parser.parse_args()
    if unknown := set(args.systems or ()) - set(SYSTEMS):
        parser.error(f"no system is called {', '.join(sorted(unknown))}; there are {', '.join(SYSTEMS)}")
    if min(args.ranks, args.launches) < 1:
        parser.error(f"--ranks is {args.ranks}, --launches is {args.launches}; there is at least one")
    return args


if __name__ == "__main__":
    main()
