"""How soon ranks hear of a fault, and the cost of what finds it.

    OMP_NUM_THREADS=1 python benchmarks/failures.py
    OMP_NUM_THREADS=1 python benchmarks/failures.py --ranks 2 --repeats 3
    OMP_NUM_THREADS=1 python benchmarks/failures.py --ranks 2 4 8 --places 4 --calls 10    # in about five minutes

For each fault, and each program and place of `tests/faults.py` and `tests/ext/faults.py`, or some: seconds from
the begin of the call to the error on the last rank, as medians and maxima. Then the milliseconds and bytes of the
message that begins a call, of a tagged exchange and of its tag, a step with the watcher and without it, and the
operations on the store of one look of the watcher, and of a rank that fails, among 4, 16 and 64 ranks.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import report
import torch
import torch.distributed as dist

import fshard as fs
from fshard.comm.connect import connect_groups
from fshard.comm.failure import Position, notify_peers, poll_peers
from fshard.comm.groups import Group, PendingCollective, RankState, tag_of
from fshard.testing import Workers

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.ext.faults import PROGRAMS as OF_EXTENSIONS
from tests.faults import PROGRAMS, broken_program, outcomes_of_survivors, places_of

FAULTS = {"raises": "raise", "is killed": "kill", "exits": "exit"}


def main() -> None:
    args = parse_args()
    found: dict[str, Any] = {}
    for ranks in args.ranks:
        for name, fault in FAULTS.items():
            seconds = [s for _ in range(args.repeats) for s in times(ranks, fault, args.places)]
            found[f"{ranks} ranks, one {name}"] = seconds
    rows = {
        name: [f"{len(each)}", f"{statistics.median(each):.2f}", f"{max(each):.2f}"] for name, each in found.items()
    }
    report.print_table("seconds until the last rank has its error", ("cases", "median", "maximum"), rows)
    costs: dict[str, dict[str, float]] = {}
    for ranks in args.ranks:
        with Workers(ranks) as pool:
            costs[f"{ranks} ranks"] = pool.run(partial(measured, args.calls), timeout=600.0)[0]
    names = list(next(iter(costs.values())))
    rows = {name: [f"{each[name]:.4g}" for each in costs.values()] for name in names}
    report.print_table("costs", tuple(costs), rows)
    operations = {f"{ranks} ranks": counted(ranks) for ranks in (4, 16, 64)}
    rows = {name: [f"{of[name]}" for of in operations.values()] for name in next(iter(operations.values()))}
    report.print_table("operations on the store", tuple(operations), rows)
    report.write_json(
        Path(__file__).parent / "results/failures.json",
        {
            **report.circumstances("failures"),
            "ranks": args.ranks,
            "calls": args.calls,
            "seconds": found,
            "costs": costs,
            "operations": operations,
        },
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--places", type=int, default=100, help="how many of the programs and places, spread over all")
    parser.add_argument("--calls", type=int, default=100, help="calls that a median is taken of")
    return parser.parse_args()


class Setting:
    """Sets attributes, as pytest's monkeypatch does."""

    setattr = staticmethod(setattr)


def times(ranks: int, fault: str, most_places: int) -> list[float]:
    """The seconds of each program and place; none of those whose other ranks have no more to wait for."""
    programs = PROGRAMS | OF_EXTENSIONS
    places = []
    for name, place in places_of(programs):
        if name != "gather":
            program, _ = programs[name]
            places.append((program, place))
    places = places[:: math.ceil(len(places) / most_places)]
    if fault == "raise":
        with Workers(ranks) as pool:
            outcomes = [pool.run(partial(broken_program, *place, fault, "idle"), timeout=60.0) for place in places]
        return [max(each.seconds for each in rows[:-1]) for rows in outcomes]
    found = []
    for place in places:
        with tempfile.TemporaryDirectory() as directory:
            program = partial(broken_program, *place, fault, "idle")
            texts = outcomes_of_survivors(ranks, program, Path(directory), Setting)
        found.append(max(float(text.split("\n", 1)[0]) for text in texts))
    return found


def median_ms(call: Callable[[], Any], calls: int) -> float:
    seconds = []
    for _ in range(calls):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(seconds)


def measured(calls: int) -> dict[str, float]:
    """Milliseconds and bytes on this rank."""
    time_of = partial(median_ms, calls=calls)
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    axis, own = fs.axis_of(mesh), fs.comm.rank_state()
    params = fs.shard({f"{i}": torch.ones(64, 64) for i in range(8)}, fs.zero3(axis, min_shard_elements=0))
    x = torch.ones(4, 64)

    def loss(p: Any) -> torch.Tensor:
        h = x
        for i in range(8):
            h = h @ fs.gather({"w": p[f"{i}"]})["w"] / 64
        return h.sum()

    def step(p: Any) -> Any:
        return fs.value_and_grad(loss)(p)[0]

    jitted, eight, other = fs.jit(step), [torch.ones(8)], Group("of nobody", [0], 0, None, 1.0)
    for run in (step, jitted):
        run(params), run(params)
    with fs.comm.record() as record:
        step(params)
    sent = {name: sum(e.sent for e in record if e.label == name) for name in ("start", "objective")}
    found = {
        "start message, ms": time_of(lambda: fs.comm.check_same_facts("a call", {axis: "{}"})),
        "exchange of 8 numbers, ms": time_of(lambda: fs.comm.all_reduce(eight, axis, "numbers")),
        "gloo's own all_reduce of them, ms": time_of(lambda: dist.all_reduce(eight[0].clone())),
        "tag and hash, ms": time_of(lambda: tag_of(other.record_start("all_reduce", "a label " * 8, ""), 32)),
        "start message, bytes": sent["start"],
        "fingerprint, bytes": 0.0,
        "objective, bytes": sent["objective"],
    }
    for name, run in {"eager": step, "jitted": jitted}.items():
        watched, alone = [], []
        for _ in range(5):
            own.watcher = None
            connect_groups(own, [axis.group_name])
            watched.append(time_of(partial(run, params)))
            own.watcher._over.set()  # type: ignore[union-attr]
            own.watcher.join()  # type: ignore[union-attr]
            alone.append(time_of(partial(run, params)))
        found[f"{name} step, ms"] = statistics.median(watched)
        found[f"{name} step without the watcher, ms"] = statistics.median(alone)
    return found


class Counted(RankState):
    """A rank whose operations on the store are counted."""

    @property
    def board(self) -> Any:
        store, counts = super().board, self.counts

        class Board:
            def __getattr__(self, name: str) -> Any:
                counts[name] += 1
                return getattr(store, name)

        return Board()


def counted(ranks: int) -> dict[str, int]:
    """Count what one look of the watcher asks of the store, and what a rank asks that fails, where nobody answers."""
    rank = Counted(0, dist.HashStore())
    rank.counts = Counter()
    everyone = list(range(ranks))
    group = rank.groups["shard"] = Group("shard", everyone, 0, None, 30.0)
    entry = group.record_start("all_reduce", "psum", "(psum)")
    issued = PendingCollective(None, rank, group, entry, since=time.monotonic(), awaits=(-1, everyone))
    rank.awaited = issued
    for other in everyone[1:]:
        waits = Position({"shard": [entry]}, "shard", entry, -1, everyone)
        super(Counted, rank).board.set(f"at/{other}", json.dumps(waits))
    poll_peers(rank, issued)
    looked = sum(rank.counts.values())
    rank.counts.clear()
    # Its group has no connections that could be cut.
    rank.simulation = SimpleNamespace(wake=lambda *_: None, states=[rank])
    notify_peers(rank, "rank 0 failed")
    return {"a look": looked, "a failure": sum(rank.counts.values())}


if __name__ == "__main__":
    main()
