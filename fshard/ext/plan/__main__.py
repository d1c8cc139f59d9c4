"""Plans of a model from the command line, before there is a machine to run it on.

    python -m fshard.ext.plan --model gpt-175b --world-size 4096 --strategy zero3 --memory 80GB
    python -m fshard.ext.plan --model my_package.models:factory --world-size 8 64 --strategy zero2 zero3

A factory is a function without arguments that returns (module, batch), where module(*batch) is the loss, a scalar; the
batch is one rank's, a tuple of tensors or a tensor. It runs on the meta device, so that nothing is allocated. Where it
takes `layers`, with the depth as the default, a deep model is planned by extrapolation over its depth.

Times are estimates from rates that are stated, not measured: --tflops, --memory-rate, --link and --latency set them.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch

from fshard.ext.plan.models import GPTS, Workload, workload_of
from fshard.ext.plan.report import Rates, bytes_from, readable
from fshard.ext.plan.sweep import CHOOSE, STRATEGIES, Estimate, Options, cheapest, estimate, mesh_of

HEADER = "strategy       mesh  activ.  regather       peak       sent  collectives     flops   seconds"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print plans, and the cheapest that fits; 0 where there is one."""
    args = _parsed(arguments)
    try:
        return _run(args)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    raw, rates = argparse.RawDescriptionHelpFormatter, Rates()
    parser = argparse.ArgumentParser("python -m fshard.ext.plan", description=__doc__, formatter_class=raw)

    def add(option: str, default: Any, text: str, *choices: str, **more: Any) -> None:
        parser.add_argument(
            option, help=f"{text} (default: %(default)s)", default=default, choices=choices or None, **more
        )

    parser.add_argument("--model", help=f"{', '.join(GPTS)}, or package:factory", required=True)
    parser.add_argument("--world-size", help="ranks", required=True, type=int, nargs="+")
    add("--strategy", ["zero3"], "one or several", *STRATEGIES, nargs="+")
    add("--memory", "80GB", "memory of a rank")
    add("--batch", 1, "sequences of a rank, for known models", type=int)
    add("--node", 8, "ranks of hsdp's inner axis", type=int)
    add("--units", "class of the repeated layers", "the units, by a pattern of names")
    add("--activations", ["kept", "again"], "kept, or computed again in the backward", "kept", "again", nargs="+")
    add("--regather", ["yes"], "gather again in the backward, for zero3 and hsdp", "yes", "no", nargs="+")
    dtypes = ("bfloat16", "float16", "float32")
    add("--param-dtype", "bfloat16", "that zero3 and hsdp gather in; float32 for the parameters' own", *dtypes)
    parser.add_argument("--full-depth", action="store_true", help="trace all layers rather than extrapolate")
    add("--tflops", rates.flops / 1e12, "10^12 floating-point operations a second of a rank", type=float)
    add("--memory-rate", rates.memory / 1e9, "GB/s of a rank to and from its own memory", type=float)
    add("--link", ["40"], "GB/s that a rank sends, or by axis, as replicate=40 shard=400", nargs="+")
    add("--latency", rates.latency * 1e6, "microseconds until a collective has begun", type=float)
    return parser.parse_args(arguments)


def _run(args: argparse.Namespace) -> int:
    memory = bytes_from("plan", "memory", args.memory)
    workload = workload_of(args.model, args.batch)
    if " " not in args.units:
        workload = workload._replace(units=args.units)
    links = {axis: float(rate) * 1e9 for axis, _, rate in (part.rpartition("=") for part in args.link)}
    rates = Rates(args.tflops * 1e12, args.memory_rate * 1e9, links.get("", links), args.latency / 1e6)
    dtype = None if args.param_dtype == "float32" else getattr(torch, args.param_dtype)
    meshes = [(name, mesh_of(name, ranks, args.node)) for name, ranks in product(args.strategy, args.world_size)]
    head, rows = [*about(workload, args.param_dtype, rates), HEADER], list[Estimate]()
    for (name, mesh), activations in product(meshes, args.activations):
        for regather in args.regather if name in CHOOSE else ["yes"]:
            options = Options(name, regather == "yes", dtype if name in CHOOSE else None, activations == "again")
            rows.append(estimate(workload, options, mesh, rates=rates, full_depth=args.full_depth))
            # With the first row, when all arguments are known to be good.
            print(*(head if len(rows) == 1 else ()), rows[-1], sep="\n", flush=True)
    best = cheapest(rows, memory)
    if best is None:
        print(f"none fits {args.memory}: the least is {readable(min(row.peak.total for row in rows))}")
        return 1
    print(f"\nthe cheapest that fits {args.memory}, by the time that is estimated from these rates:\n{best}")
    print(*best.peak.lines(), sep="\n")
    if not best.traced:
        print("  ~: about, by extrapolation over the depth; --full-depth counts collectives exactly")
    return 0


def about(workload: Workload, param_dtype: str, rates: Rates) -> Iterator[str]:
    """Write lines of the workload and of the rates that times are estimated from."""
    count = sum(parameter.numel() for parameter in workload.make(workload.layers).parameters())
    batch = ", ".join(f"{x.dtype} {list(x.shape)}" for x in workload.batch if isinstance(x, torch.Tensor))
    yield f"{workload.name}: {count:,} parameters, by zero3 and hsdp gathered as {param_dtype}"
    yield f"batch of a rank: {batch}"
    yield f"rates: {rates}"


if __name__ == "__main__":
    sys.exit(main())
