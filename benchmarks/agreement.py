"""What it costs a rank to agree with the others: to start, and to compare a call with theirs.

    OMP_NUM_THREADS=1 python benchmarks/agreement.py
    OMP_NUM_THREADS=1 python benchmarks/agreement.py --ranks 2 4 --repeats 1 --results /tmp

Real processes on this machine make a mesh of one axis between processors and compare calls. For each number of ranks:
the sockets that a rank opens, its requests to the store, the segments and bytes that it sends there with those of
torch's groups, the bytes of one comparison, and times. Then the counts by the laws that `tests/comm/test_cost_laws.py`
asserts, up to 4,096 ranks.
"""

import argparse
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import report

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.comm.costs import costs_by_law, costs_of_ranks

# The numbers of ranks that laws are printed for, beside those that are measured.
FAR = (64, 1024, 4096)
# What is timed, in milliseconds; the key of quartiles of each rank.
TIMED = ("comparison, ms", "comparison, ms of the main thread")


def main() -> None:
    args = parse_args()
    measured = {f"{ranks}": measure(ranks, args.repeats) for ranks in args.ranks}
    names = list(next(iter(measured.values())))
    rows = {name: [write(costs[name]) for costs in measured.values()] for name in names}
    report.print_table("measured, for a rank", [f"{ranks} ranks" for ranks in measured], rows)
    laws = {f"{ranks}": costs_by_law(ranks) for ranks in (*args.ranks, *FAR)}
    names = list(next(iter(laws.values())))
    rows = {name: [f"{law[name]:,}" for law in laws.values()] for name in names}
    report.print_table("by law, for a rank", [f"{ranks} ranks" for ranks in laws], rows)
    found = {**report.circumstances(args.name), "ranks": args.ranks, "measured": measured, "laws": laws}
    report.write_json(args.results / f"{args.name}.json", found)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--repeats", type=int, default=3, help="starts of the processes; counts are those of the last")
    parser.add_argument("--name", default="agreement", help="name of the file of results")
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    return parser.parse_args()


def measure(ranks: int, repeats: int) -> dict[str, Any]:
    """Measure some starts of the processes: the largest count on any rank, and the median and range of each time."""
    starts = []
    times: dict[str, list[list[float]]] = {name: [] for name in TIMED}
    for _ in range(repeats):
        costs = costs_of_ranks(ranks, is_timed=True)
        # From when the last rank has come until the last one goes on.
        first, last = max(rank["begin"] for rank in costs), max(rank["end"] for rank in costs)
        starts.append(1e3 * (last - first))
        for name in TIMED:
            times[name] += [rank[name] for rank in costs]
    counts: dict[str, Any] = {"sockets": max(sum(rank["sockets"].values()) for rank in costs)}
    counts["requests to the store"] = max(sum(rank["requests to the store"].values()) for rank in costs)
    for name in ("segments to the store", "bytes to the store", "bytes of a comparison"):
        counts[name] = max(rank[name] for rank in costs)
    counts["init_mesh, ms, shortest"] = min(starts)
    counts["init_mesh, ms"] = {"median": statistics.median(starts), "least": min(starts), "most": max(starts)}
    for name, quartiles in times.items():
        lower, middle, upper = zip(*quartiles)
        counts[name] = {"median": statistics.median(middle), "least": min(lower), "most": max(upper)}
    return counts


def write(value: Any) -> str:
    """Write a count, or a time as its median and range."""
    if isinstance(value, dict):
        return f"{value['median']:.3g} ({value['least']:.3g} to {value['most']:.3g})"
    return f"{math.ceil(value):,}"


if __name__ == "__main__":
    main()
