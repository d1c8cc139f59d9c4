"""Plans of a model from the command line, before there is a machine to run it on.

    python -m fshard.plan --model gpt-175b --world-size 4096 --strategy zero3 --memory 80GB
    python -m fshard.plan --model my_package.models:factory --world-size 8,64 --strategy zero2,zero3

A factory is a function without arguments that returns (module, batch), where module(*batch) is the loss, a scalar; the
batch is one rank's, a tuple of tensors or a tensor. It runs on the meta device, so that nothing is allocated. Where it
takes `layers`, with the depth as the default, a deep model is planned by extrapolation over its depth.

Times are estimates from rates that are stated, not measured: --tflops, --memory-rate, --link and --latency set them.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from fshard.plan.models import model_sizes, workload_of
from fshard.plan.rates import Rates
from fshard.plan.report import bytes_from, parts_of, readable
from fshard.plan.sweep import DEPTHS, Estimate, cheapest, sweep
from fshard.plan.workload import STRATEGIES, Workload

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
    parser = argparse.ArgumentParser("python -m fshard.plan", description=__doc__, formatter_class=raw)

    def add(option: str, text: str, default: Any = None, **more: Any) -> None:
        said = text if default is None else f"{text} (default: %(default)s)"
        parser.add_argument(option, help=said, default=default, **more)

    add("--model", f"{', '.join(model_sizes())}, or package:factory", required=True)
    add("--world-size", "ranks; several by commas", required=True)
    add("--strategy", f"several by commas, of {', '.join(STRATEGIES)}", "zero3")
    add("--memory", "what a rank has", "80GB")
    add("--batch", "sequences of a rank, for known models", 1, type=int)
    add("--node", "ranks of hsdp's inner axis", 8, type=int)
    add("--units", "what is gathered together, by a pattern of names (default: the class of the repeated layers)")
    add("--activations", "kept; computed again in the backward; or both by a comma", "kept,again")
    add("--regather", "yes, no, or both by a comma, for zero3 and hsdp", "yes")
    add(
        "--param-dtype",
        "that zero3 and hsdp gather in: bfloat16, float16, or float32 for the parameters' own",
        "bfloat16",
    )
    parser.add_argument("--full-depth", action="store_true", help="trace all layers rather than extrapolate")
    rates = Rates()
    add("--tflops", "10^12 floating-point operations a second of a rank", rates.flops / 1e12, type=float)
    add("--memory-rate", "GB/s of a rank to and from its own memory", rates.memory / 1e9, type=float)
    add("--link", "GB/s that a rank sends, or by axis, as replicate=40,shard=400", f"{rates.link_of('') / 1e9:g}")
    add("--latency", "microseconds until a collective has begun", rates.latency * 1e6, type=float)
    return parser.parse_args(arguments)


def _run(args: argparse.Namespace) -> int:
    memory = bytes_from("plan", "memory", args.memory)
    workload = workload_of(args.model, args.batch)
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": None}
    (param_dtype,) = _chosen("--param-dtype", args.param_dtype, dtypes)[:1]
    rates = Rates(args.tflops * 1e12, args.memory_rate * 1e9, _link(args.link), args.latency / 1e6)
    # With the first row, when all arguments are known to be good.
    head = iter([*about(workload, args.param_dtype, rates), HEADER])

    def report(row: Estimate) -> None:
        print(*head, row, sep="\n", flush=True)

    rows = sweep(
        workload,
        world_sizes=_numbers(args.world_size),
        strategies=_listed(args.strategy),
        units=(args.units,),
        regather=_chosen("--regather", args.regather, {"yes": True, "no": False}),
        checkpointed=_chosen("--activations", args.activations, {"kept": False, "again": True}),
        param_dtype=param_dtype,
        node=args.node,
        depths=None if args.full_depth else DEPTHS,
        report=report,
        rates=rates,
    )
    return _conclude(workload, rows, memory, args.memory)


def _conclude(workload: Workload, rows: Sequence[Estimate], memory: int, said: str) -> int:
    best = cheapest(rows, memory)
    if best is None:
        least = min(row.peak.total for row in rows)
        print(f"none fits {said}: the least is {readable(least)}")
        return 1
    print(f"\nthe cheapest that fits {said}, by the time that is estimated from these rates:\n{best}")
    print(*parts_of(best.peak), sep="\n")
    if not best.traced:
        print("  ~: about, by extrapolation over the depth; --full-depth counts collectives exactly")
    return 0


def about(workload: Workload, param_dtype: str, rates: Rates) -> Iterator[str]:
    """Lines of what is planned, and of what its time is estimated from."""
    parameters = list(workload.make(workload.layers or 0).parameters())
    count, dtypes = sum(p.numel() for p in parameters), dict.fromkeys(_dtype(p) for p in parameters)
    batch = ", ".join(f"{_dtype(x)}{list(x.shape)}" for x in workload.batch if isinstance(x, torch.Tensor))
    sizes = model_sizes().get(workload.name)
    if sizes is not None:
        batch = f"{len(workload.batch[0])} x {sizes.context} tokens"
    gathered = "" if param_dtype == "float32" else f" (zero3, hsdp: gathered as {param_dtype})"
    yield f"{workload.name}: {count:,} parameters of {', '.join(dtypes)}{gathered}, batch of a rank: {batch}"
    yield f"rates: {rates}"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _link(text: str) -> float | dict[str, float]:
    """Bytes a second of all links, or of each axis."""
    try:
        if "=" not in text:
            return float(text) * 1e9
        return {axis: float(rate) * 1e9 for axis, _, rate in (part.partition("=") for part in _listed(text))}
    except ValueError:
        needed = "GB/s, or those of each axis, as replicate=40,shard=400"
        raise ValueError(f"plan: expected --link to be {needed}, got {text!r}") from None


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _numbers(text: str) -> list[int]:
    if not all(part.isdigit() and int(part) for part in _listed(text)):
        raise ValueError(f"plan: expected --world-size to be whole numbers of ranks from 1, by commas, got {text!r}")
    return [int(part) for part in _listed(text)]


def _chosen(option: str, text: str, choices: Mapping[str, T]) -> list[T]:
    if unknown := [part for part in _listed(text) if part not in choices]:
        raise ValueError(f"plan: expected {option} to be one of {', '.join(choices)}, got {unknown[0]!r}")
    return [choices[part] for part in _listed(text)]


if __name__ == "__main__":
    sys.exit(main())
