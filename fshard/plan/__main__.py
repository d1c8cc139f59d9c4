"""Plans of a model from the command line, before there is a machine to run it on.

    python -m fshard.plan --model gpt-175b --world-size 4096 --strategy zero3 --memory 80GB
    python -m fshard.plan --model my_package.models:factory --world-size 8,64 --strategy zero2,zero3

A factory returns (module, batch): a module that, called with the batch, returns a scalar loss. It runs on the meta
device, so that nothing is allocated; where it takes `layers`, a deep model is planned by extrapolation over its depth.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch

from fshard.plan.kinds import Bytes
from fshard.plan.models import workload_of
from fshard.plan.report import bytes_from, readable
from fshard.plan.sweep import DEPTHS, Estimate, cheapest, sweep
from fshard.plan.workload import STRATEGIES, Workload

T = TypeVar("T")

HEADER = "strategy       mesh  activ.  regather       peak       sent collectives flops seconds"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print plans, and the cheapest that fits; 0 where there is one."""
    try:
        return _run(_parsed(arguments))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m fshard.plan", description="What a train step takes, without running it."
    )
    add = parser.add_argument
    add("--model", required=True, help="a known GPT, such as gpt-175b, or package:factory")
    add("--world-size", required=True, help="ranks; several by commas")
    add("--strategy", default="zero3", help=f"several by commas, of {', '.join(STRATEGIES)}")
    add("--memory", default="80GB", help="what a rank has")
    add("--batch", type=int, default=1, help="sequences of a rank, for known models")
    add("--node", type=int, default=8, help="ranks of hsdp's inner axis")
    add("--units", help="what is gathered together, by a pattern of names")
    add("--activations", default="kept,again", help="kept, computed again in the backward, or both")
    add("--regather", default="yes", help="yes, no, or both by a comma, for zero3 and hsdp")
    add("--param-dtype", default="bfloat16", help="for zero3 and hsdp; float32 keeps the parameters'")
    add("--full-depth", action="store_true", help="trace all layers rather than extrapolate")
    return parser.parse_args(arguments)


def _run(args: argparse.Namespace) -> int:
    memory = bytes_from("plan: memory", args.memory)
    workload = workload_of(args.model, args.batch)
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": None}
    (param_dtype,) = _chosen("--param-dtype", args.param_dtype, dtypes)[:1]
    print(HEADER)
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
        report=lambda row: print(row, flush=True),
    )
    return _conclude(workload, rows, memory, args.memory)


def _conclude(workload: Workload, rows: Sequence[Estimate], memory: int, said: str) -> int:
    best = cheapest(rows, memory)
    if best is None:
        least = min(row.peak.total for row in rows)
        print(f"none fits {said}: the least is {readable(least)}")
        return 1
    print(f"\nthe cheapest that fits {said}, by time that is estimated from stated rates:\n{best}")
    for name, nbytes in zip(Bytes._fields, best.peak, strict=True):
        print(f"  {name.replace('_', ' '):<16}{readable(nbytes):>12}")
    if not best.traced:
        print("  ~: about, by extrapolation over the depth; --full-depth counts collectives exactly")
    return 0


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _numbers(text: str) -> list[int]:
    if not all(part.isdigit() and int(part) for part in _listed(text)):
        raise ValueError(f"plan: --world-size is {text!r}, needed whole numbers of ranks from 1, by commas")
    return [int(part) for part in _listed(text)]


def _chosen(option: str, text: str, choices: Mapping[str, T]) -> list[T]:
    if unknown := [part for part in _listed(text) if part not in choices]:
        raise ValueError(f"plan: {option} is {unknown[0]!r}, needed one of {', '.join(choices)}")
    return [choices[part] for part in _listed(text)]


if __name__ == "__main__":
    sys.exit(main())
