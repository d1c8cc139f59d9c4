"""Plans of a model from the command line, before there is a machine to run it on.

    python -m fshard.ext.plan --model gpt-175b --world-size 4096 --strategy zero3 --memory 80GB
    python -m fshard.ext.plan --model my_package.models:factory --world-size 8,64 --strategy zero2,zero3

A factory is a function without arguments that returns (module, batch), where module(*batch) is the loss, a scalar; the
batch is one rank's, a tuple of tensors or a tensor. It runs on the meta device, so that nothing is allocated. Where it
takes `layers`, with the depth as the default, a deep model is planned by extrapolation over its depth.

Times are estimates from rates that are stated, not measured: --tflops, --memory-rate, --link and --latency set them.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from fshard.ext.plan.models import GPTS, Workload, workload_of
from fshard.ext.plan.report import Rates, bytes_from, readable
from fshard.ext.plan.sweep import STRATEGIES, Estimate, cheapest, sweep

T = TypeVar("T")

HEADER = "strategy       mesh  activ.  regather       peak       sent  collectives     flops   seconds"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print plans, and the cheapest that fits; 0 where there is one."""
    try:
        return _run(_parsed(arguments))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m fshard.ext.plan", description=__doc__, formatter_class=raw)

    def add(option: str, text: str, default: Any = None, **more: Any) -> None:
        said = text if default is None else f"{text} (default: %(default)s)"
        parser.add_argument(option, help=said, default=default, **more)

    rates = Rates()
    add("--model", f"{', '.join(GPTS)}, or package:factory", required=True)
    add("--world-size", "ranks; several by commas", required=True)
    add("--strategy", f"several by commas, of {', '.join(STRATEGIES)}", "zero3")
    add("--memory", "memory of a rank", "80GB")
    add("--batch", "sequences of a rank, for known models", 1, type=int)
    add("--node", "ranks of hsdp's inner axis", 8, type=int)
    add("--units", "the units, by a pattern of names (default: the class of the repeated layers)")
    add("--activations", "kept; computed again in the backward; or both by a comma", "kept,again")
    add("--regather", "yes, no, or both by a comma, for zero3 and hsdp", "yes")
    dtypes = "bfloat16, float16, or float32 for the parameters' own"
    add("--param-dtype", f"that zero3 and hsdp gather in: {dtypes}", "bfloat16")
    parser.add_argument("--full-depth", action="store_true", help="trace all layers rather than extrapolate")
    add("--tflops", "10^12 floating-point operations a second of a rank", rates.flops / 1e12, type=float)
    add("--memory-rate", "GB/s of a rank to and from its own memory", rates.memory / 1e9, type=float)
    add("--link", "GB/s that a rank sends, or by axis, as replicate=40,shard=400", "40")
    add("--latency", "microseconds until a collective has begun", rates.latency * 1e6, type=float)
    return parser.parse_args(arguments)


def _run(args: argparse.Namespace) -> int:
    memory = bytes_from("plan", "memory", args.memory)
    workload = workload_of(args.model, args.batch)
    workload = workload._replace(units=args.units or workload.units)
    links = _each("--link", args.link, "GB/s, or those of each axis, as replicate=40,shard=400", _link)
    link = dict(links) if "" not in dict(links) else links[0][1]
    rates = Rates(args.tflops * 1e12, args.memory_rate * 1e9, link, args.latency / 1e6)
    dtypes = _chosen("--param-dtype", args.param_dtype, bfloat16=torch.bfloat16, float16=torch.float16, float32=None)
    estimates = sweep(
        workload,
        world_sizes=_each("--world-size", args.world_size, "whole numbers of ranks from 1, by commas", _ranks),
        strategies=_each("--strategy", args.strategy, "names by commas", str),
        regather=_chosen("--regather", args.regather, yes=True, no=False),
        checkpointed=_chosen("--activations", args.activations, kept=False, again=True),
        param_dtype=dtypes[0],
        node=args.node,
        full_depth=args.full_depth,
        rates=rates,
    )
    # With the first row, when all arguments are known to be good.
    head = [*about(workload, args.param_dtype, rates), HEADER]
    rows: list[Estimate] = []
    for row in estimates:
        print(*(() if rows else head), row, sep="\n", flush=True)
        rows.append(row)
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
    parameters = list(workload.make(workload.layers).parameters())
    count, dtypes = sum(p.numel() for p in parameters), dict.fromkeys(_dtype(p) for p in parameters)
    batch = ", ".join(f"{_dtype(x)}{list(x.shape)}" for x in workload.batch if isinstance(x, torch.Tensor))
    if workload.name in GPTS:
        batch = "{} x {} tokens".format(*workload.batch[0].shape)
    gathered = "" if param_dtype == "float32" else f" (zero3, hsdp: gathered as {param_dtype})"
    yield f"{workload.name}: {count:,} parameters of {', '.join(dtypes)}{gathered}, batch of a rank: {batch}"
    yield f"rates: {rates}"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _link(text: str) -> tuple[str, float]:
    axis, _, rate = text.rpartition("=")
    return axis, float(rate) * 1e9


def _ranks(text: str) -> int:
    return int(text) if int(text) > 0 else int("")


def _each(option: str, text: str, needed: str, convert: Callable[[str], T]) -> list[T]:
    """Convert the parts of an option between its commas."""
    try:
        return [convert(part.strip()) for part in text.split(",")]
    except (ValueError, KeyError):
        raise ValueError(f"plan: expected {option} to be {needed}, got {text!r}") from None


def _chosen(option: str, text: str, **choices: T) -> list[T]:
    return _each(option, text, f"one of {', '.join(choices)}", choices.__getitem__)


if __name__ == "__main__":
    sys.exit(main())
