"""Plans of a model from the command line, before there is a machine to run it on.

    python -m fshard.ext.plan --model my_package.models:factory --world-size 8 64 --strategy zero2 zero3 --memory 80

A factory is a function without arguments that returns (module, batch), where module(*batch) is the loss, a scalar; the
batch is one rank's, a tuple of tensors or a tensor. It runs on the meta device, so that nothing is allocated. Where it
takes `layers`, with the depth as the default, a deep model is planned by extrapolation over its depth.

Units are the blocks that a ModuleList, ModuleDict or Sequential holds several of; --units names others. The first lines
say which.

The step that is planned is a jitted one of fs.value_and_grad and fused AdamW, without clipping, whose state is donated.
The strategy has its defaults, and all dtypes are those of the module that the factory returns.

Times are estimates from rates that are stated, not measured: --tflops, --memory-rate, --link and --latency set them.
"agree ms" is the time of the host in which each call compares with the other ranks, and "sockets" counts what a rank
opens to them. Both are of accelerators, whose backend sends the data.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from itertools import product
from typing import Any

from fshard.ext.plan import models
from fshard.ext.plan.report import Rates, format_bytes, warn_of_sockets

HEADER = "strategy       mesh       peak       sent  collectives     flops  agree ms  sockets   seconds"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print plans, and the cheapest that fits.

    Args:
        arguments: The words of the command line; None takes those of this process.

    Returns:
        The exit status: 0 if a plan fits, 1 if none does, 2 if the arguments are wrong.
    """
    args = _parse(arguments)
    try:
        return _print_plans(args)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m fshard.ext.plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def add(option: str, default: Any, text: str, **more: Any) -> None:
        parser.add_argument(option, help=f"{text} (default: %(default)s)", default=default, **more)

    parser.add_argument("--model", help="package:factory", required=True)
    parser.add_argument("--world-size", help="ranks", required=True, type=int, nargs="+")
    add("--strategy", ["zero3"], "one or several", choices=models.STRATEGIES, nargs="+")
    parser.add_argument(
        "--units",
        help="name patterns of the submodules to gather as units, such as 'layers.*', or a least number of parameters "
        "(default: the blocks that containers hold several of)",
        nargs="+",
        type=lambda text: int(text) if text.isdecimal() else text,
    )
    add("--memory", 80.0, "GB of a rank", type=float)
    add("--node", 8, "ranks of hsdp's inner axis", type=int)
    parser.add_argument("--full-depth", action="store_true", help="trace all layers rather than extrapolate")
    rates = Rates()
    add("--tflops", rates.flops / 1e12, "10^12 floating-point operations a second of a rank", type=float)
    add("--memory-rate", rates.memory / 1e9, "GB/s of a rank to and from its own memory", type=float)
    add("--link", ["40"], "GB/s that a rank sends, or by axis, as replicate=40 shard=400", nargs="+")
    add("--latency", rates.latency * 1e6, "microseconds until a collective has begun", type=float)
    return parser.parse_args(arguments)


def _print_plans(args: argparse.Namespace) -> int:
    workload = models.make_workload(args.model, args.units)
    rates = _read_rates(args)
    meshes = []
    for strategy, ranks in product(args.strategy, args.world_size):
        meshes.append((strategy, models.choose_mesh(strategy, ranks, args.node)))
    headline = [f"{args.model}; rates: {rates}", models.describe_units(workload), HEADER]
    rows: list[models.Estimate] = []
    for strategy, mesh in meshes:
        rows.append(models.estimate(workload, strategy, mesh, rates=rates, full_depth=args.full_depth))
        if len(rows) == 1:
            # Not before the first row, when all arguments are known to be good.
            print(*headline, sep="\n")
        print(rows[-1], *warn_of_sockets(rows[-1].sockets), sep="\n", flush=True)
    fits = [row for row in rows if row.peak.total <= args.memory * 1e9]
    if not fits:
        least = min(row.peak.total for row in rows)
        print(f"none fits {args.memory} GB: the least is {format_bytes(least)}")
        return 1
    # The fastest, and of several the one with the fewest ranks.
    best = min(fits, key=lambda row: (row.seconds, math.prod(row.mesh.values())))
    print(f"\nthe cheapest that fits {args.memory} GB, by the time that is estimated from these rates:\n{best}")
    print(*best.peak.write_lines(), sep="\n")
    return 0


def _read_rates(args: argparse.Namespace) -> Rates:
    links = {}
    for part in args.link:
        axis, _, rate = part.rpartition("=")
        links[axis] = float(rate) * 1e9
    # A rate without an axis is that of one link for all axes.
    return Rates(args.tflops * 1e12, args.memory_rate * 1e9, links.get("", links), args.latency / 1e6)


if __name__ == "__main__":
    sys.exit(main())
