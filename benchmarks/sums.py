"""The cost of the same bits at any world size: steps with reduction_order="tree" next to sums in turn, by rounds.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 benchmarks/sums.py

For each number of microbatches of the job: the median over rounds of the ratio of step times, the bytes that a step
sends for gradients and parameters, and those of the norms. Steps are ZeRO-3 with a clip that is active, and AdamW.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
import torch
import torch.distributed as dist
from rounds import measure, paired
from trained_gpt import SEED, Block, Configuration

import fshard as fs


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    rows, found = {}, {}
    for number in args.microbatches:
        steps = {sums: make(args.configuration, mesh, number, sums) for sums in ("in turn", "tree")}
        sent = {sums: bytes_of(step) for sums, step in steps.items()}
        samples = measure(steps, args.dropped, args.rounds)
        ratios = paired(samples["tree"].seconds, samples["in turn"].seconds)
        lower, median, upper = statistics.quantiles(ratios, n=4, method="inclusive")
        name = f"{number} microbatches"
        found[name] = {
            "microbatches": number,
            **{"ratio": median, "ratio_quartiles": [lower, upper], "bytes": sent},
            "seconds": {sums: values.seconds for sums, values in samples.items()},
        }
        rows[name] = [
            f"{1e3 * statistics.median(samples['in turn'].seconds):.0f}",
            f"{1e3 * statistics.median(samples['tree'].seconds):.0f}",
            f"{median:.3f}",
            f"{lower:.3f} to {upper:.3f}",
            *(f"{sent['tree'][part] - sent['in turn'][part]:+.0f}" for part in ("leaves", "others")),
        ]
    if mesh.get_rank() == 0:
        columns = ("in turn ms", "tree ms", "ratio", "quartiles", "bytes of leaves", "other bytes")
        report.print_table(f'{args.configuration.name}, ranks: {mesh.size()}; reduction_order="tree"', columns, rows)
        results = report.circumstances("sums")
        results |= {
            "configuration": {"name": args.configuration.name, **args.configuration._asdict()},
            **{"ranks": mesh.size(), "backend": dist.get_backend(), "threads": torch.get_num_threads()},
            **{"rounds": args.rounds, "dropped_rounds": args.dropped, "steps": found},
        }
        report.write_json(args.results / f"sums-{args.configuration.name}.json", results)


def make(configuration: Configuration, mesh: Any, number: int, sums: str) -> Callable[[], torch.Tensor]:
    """Make a step of a fixed batch, which is cut in microbatches."""
    torch.manual_seed(SEED)
    model = fs.functionalize(configuration.module(), units=Block)
    order = "tree" if sums == "tree" else None
    tx = fs.chain(fs.clip_by_global_norm(1e-3, reduction_order=order), fs.adamw(1e-4))
    state = fs.TrainState.create(model.init(fs.zero3(mesh)), tx)
    shape = number, configuration.batch, configuration.time + 1
    tokens = torch.randint(configuration.vocabulary, shape, generator=torch.Generator().manual_seed(SEED))
    mine = fs.microbatches(list(tokens.unbind()), like=state.params)
    run = fs.accumulate(lambda p, x: model.apply(p, x[:, :-1], x[:, 1:]), reduction_order=order)

    def step() -> torch.Tensor:
        nonlocal state
        loss, grads = run(state.params, mine)
        state = fs.update(tx, state, grads, donate=True)
        return loss

    return step


def bytes_of(step: Callable[[], torch.Tensor]) -> dict[str, float]:
    """Count the bytes that a step sends for leaves, and for losses, norms and messages."""
    step()
    with fs.comm.record() as record:
        step()
    leaves = sum(entry.sent for entry in record if entry.about.verb in ("gather", "scatter"))
    return {"leaves": leaves, "others": sum(entry.sent for entry in record) - leaves}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configuration", type=Configuration.parse, default="d256-L4-B2-T64-V512")
    parser.add_argument("--microbatches", type=lambda text: list(map(int, text.split(","))), default=[2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=15, help="rounds that count")
    parser.add_argument("--dropped", type=int, default=3, help="rounds before them")
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
