"""Losses of one training at several numbers of ranks, with reduction_order="tree" and without.

    OMP_NUM_THREADS=1 python benchmarks/bits.py
    OMP_NUM_THREADS=1 python benchmarks/bits.py --steps 20 --ranks 1,2 --no-moved

Runs examples/train_gpt.py by torchrun: the same data, dropout masks and microbatches at each number of ranks, and with
the tree also one run that is ended and goes on at other numbers of ranks. Drift is the distance of a loss from that of
the run on one rank. benchmarks/sums.py measures what the tree costs.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import report

EXAMPLE = Path(__file__).parents[1] / "examples/train_gpt.py"
MICROBATCHES = 8
ORDERS = {"in turn": (), "tree": ("--reduction-order", "tree")}
# A run that is ended at shares of its steps: numbers of ranks, and where each ends.
MOVED = ((4, 0.25), (2, 0.5), (8, 0.75), (1, 1.0))


def main() -> None:
    args = parse_args()
    with tempfile.TemporaryDirectory() as folder:
        losses = {
            order: {
                str(ranks): train(Path(folder) / f"{order} {ranks}", ranks, args.steps, flags) for ranks in args.ranks
            }
            for order, flags in ORDERS.items()
        }
        for ranks, share in MOVED if args.moved else ():
            end = ("--stop-at", round(share * args.steps))
            losses["tree"]["moved"] = train(Path(folder) / "moved", ranks, args.steps, (*ORDERS["tree"], *end))
    results = {
        **report.circumstances("bits"),
        "ranks": max(args.ranks),
        "configuration": {"example": EXAMPLE.name, "preset": "tiny", "microbatches": MICROBATCHES, "steps": args.steps},
        "losses": losses,
        "drift": {order: {name: drift(runs["1"], run) for name, run in runs.items()} for order, runs in losses.items()},
    }
    columns = ("losses that differ", "first step", "largest distance", "at the end")
    for order, runs in results["drift"].items():
        rows = {name: [f"{value}" for value in found.values()] for name, found in runs.items()}
        report.print_table(f"Distances from one rank, {order}, {args.steps} steps", columns, rows)
    report.write_json(args.output.with_suffix(".json"), results)
    plot(args.output.with_suffix(".png"), losses)


def train(directory: Path, ranks: int, steps: int, flags: tuple[Any, ...]) -> list[float]:
    """Train to the end, or as far as the flags say, and read the losses of all steps."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", ranks, EXAMPLE]
    command += ["--directory", directory, "--steps", steps, "--microbatches", MICROBATCHES, "--sample", 1, *flags]
    subprocess.run([str(part) for part in command], check=True, capture_output=True)
    return [float(line.split()[1]) for line in (directory / "losses.txt").read_text().splitlines()]


def drift(reference: list[float], run: list[float]) -> dict[str, Any]:
    gaps = [abs(a - b) for a, b in zip(reference, run, strict=True)]
    first = next((step for step, gap in enumerate(gaps) if gap), None)
    return {"differ": sum(map(bool, gaps)), "first": first, "largest": max(gaps), "last": gaps[-1]}


def plot(path: Path, losses: dict[str, dict[str, list[float]]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, *panels) = pyplot.subplots(1, 3, figsize=(9, 2.8), constrained_layout=True)
    for name, run in losses["tree"].items():
        left.plot(run, linewidth=1, label="4, 2, 8, 1 ranks" if name == "moved" else f"{name} ranks")
    left.set(title='losses, reduction_order="tree"', xlabel="step", ylabel="loss (nats per byte)")
    for axes, (order, runs) in zip(panels, losses.items(), strict=True):
        for name, run in runs.items():
            gaps = [abs(a - b) for a, b in zip(runs["1"], run, strict=True)]
            axes.plot(gaps, linewidth=1, label="4, 2, 8, 1" if name == "moved" else name)
        axes.set(title=f"distance from 1 rank, {order}", xlabel="step")
        axes.set_yscale("symlog", linthresh=1e-8)
        axes.set_ylim(-1e-9, 1)
        axes.legend(title="ranks", fontsize=7, title_fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    print(f"Plot: {path}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--ranks", type=lambda text: [*map(int, text.split(","))], default=[1, 2, 4])
    parser.add_argument("--moved", action=argparse.BooleanOptionalAction, default=True, help="the run that is ended")
    parser.add_argument("--output", type=Path, default=report.RESULTS / "bits", help="of the JSON and the PNG")
    return parser.parse_args()


if __name__ == "__main__":
    main()
