"""Times of a train step of thousands of small leaves, part by part: the host's own work, leaf by leaf.

    OMP_NUM_THREADS=1 python benchmarks/leaves.py
    OMP_NUM_THREADS=1 python benchmarks/leaves.py --leaves 2000 --systems ddp,fsdp2,fshard-zero3 --rounds 9

Two ranks, one thread each. Each block of the model multiplies its input by 100 vectors of 64 elements: one operator for
each leaf, and autograd saves them all. The parts of a step are timed apart: forward and backward, clipping by the
global norm, and the update by AdamW, which drops the gradients. CPU time is that of the main thread, to which waiting
does not add. Each system has processes of its own, and all wait while one takes a step. Times are medians over rounds.

By default fshard keeps leaves this small whole, and gathers neighbouring blocks together. What is named `split` splits
every leaf, as FSDP2 does, and in `zero3-split` gathers block by block. What is named `graph` is jitted, each part by
itself, and measured up to --traced leaves, because a trace of 20,000 takes minutes.
"""

import argparse
import random
import statistics
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import report
import torch
from gpt import SEED
from rivals import SYSTEMS, System, make
from rounds import Samples, Turn, check_losses, take_turn
from torch import nn

import fshard as fs

RANKS, BLOCK, WIDTH, BATCH = 2, 100, 64, 4
PARTS = ("forward and backward", "clip", "update")
SHARDED = ("fshard-zero3", "fshard-zero2-split", "fshard-zero3-split")
COMPARED = ("ddp", "fsdp2", *SHARDED, "fshard-zero3-graph", "fshard-zero3-split-graph")
REFERENCE = "fsdp2"
# The steps of a turn handle so many leaves.
TURN_LEAVES = 10_000
# A turn, or making a system and tracing it, ends before.
HUNG_SECONDS = 1800.0


class Block(nn.Module):
    """Multiplies its input by vectors, and adds the product to those of other blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.names = [f"scale{i}" for i in range(BLOCK)]
        for name in self.names:
            self.register_parameter(name, nn.Parameter(torch.empty(WIDTH)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for scale in self.parameters():
            nn.init.normal_(scale, 1.0, 0.05)

    def forward(self, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:  # (batch, width) all three
        for name in self.names:
            x = x * getattr(self, name)
        return total + x


class Blocks(nn.Module):
    """Learns to negate its input by the mean over blocks."""

    def __init__(self, leaves: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(leaves // BLOCK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, width), to a scalar
        total = torch.zeros_like(x)
        for block in self.blocks:
            total = block(x, total)
        return (total / len(self.blocks) + x).square().mean()


class Configuration(NamedTuple):
    """A model of so many leaves, and its batches, as `rivals.make` takes them."""

    leaves: int

    block = Block

    def module(self) -> Blocks:
        torch.manual_seed(SEED)
        return Blocks(self.leaves)

    def tokens(self, rank: int) -> tuple[torch.Tensor]:
        return (torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(rank)),)


@cache
def system_of(name: str, leaves: int) -> System:
    """The system of this process, made when it is first asked for."""
    return make(name, Configuration(leaves), fs.init_mesh({"shard": -1}, device="cpu"))


def take_steps(name: str, leaves: int, steps: int) -> list[Turn]:
    """Take steps; of each part the means over all of them but the first of several, which finds the caches cold."""
    turns = [[take_turn(part) for part in system_of(name, leaves).parts] for _ in range(steps)]
    return [Turn(*map(statistics.mean, zip(*part))) for part in zip(*(turns[1:] or turns))]


def measured(names: list[str], leaves: int, args: argparse.Namespace) -> dict[str, dict[str, Samples]]:
    """Start the processes of all systems, and let each take steps once a round, in an order that changes."""
    samples = {name: {part: Samples([], [], []) for part in PARTS} for name in names}
    with ExitStack() as stack:
        ranks = {name: stack.enter_context(fs.testing.Workers(RANKS, timeout=HUNG_SECONDS)) for name in names}
        for number in range(-args.dropped, args.rounds):
            for name in random.Random(number).sample(names, len(names)):
                steps = 1 + TURN_LEAVES // leaves if number >= 0 else 1
                turns = ranks[name].run(partial(take_steps, name, leaves, steps))[0]
                for part, turn in zip(PARTS, turns if number >= 0 else ()):
                    for values, value in zip(samples[name][part], turn):
                        values.append(value)
    check_losses({name: parts[PARTS[0]] for name, parts in samples.items()}, RANKS)
    return samples


def summary(samples: Samples) -> dict[str, Any]:
    wall, cpu = map(statistics.median, (samples.seconds, samples.main_thread_seconds))
    return {"median_seconds": wall, "median_main_thread_seconds": cpu, **samples._asdict()}


def main() -> None:
    args = parse_args()
    results = report.circumstances("leaves")
    results |= {"ranks": RANKS, "backend": "gloo", "threads": 1, "rounds": args.rounds, "dropped_rounds": args.dropped}
    columns = [f"{part}: CPU ms, wall ms" for part in PARTS] + ["CPU us a leaf", f"ratio to {REFERENCE}"]
    for leaves in args.leaves:
        names = [name for name in args.systems if leaves <= args.traced or not name.endswith("graph")]
        samples, cpu = measured(names, leaves, args), {}
        results[f"{leaves} leaves"] = found = {
            name: {p: summary(s) for p, s in samples[name].items()} for name in names
        }
        for name in names:
            cpu[name] = sum(part["median_main_thread_seconds"] for part in found[name].values())
        rows = {}
        for name, parts in found.items():
            times = [(part["median_main_thread_seconds"], part["median_seconds"]) for part in parts.values()]
            ratio = f"{cpu[name] / cpu[REFERENCE]:.3f}" if REFERENCE in cpu else "-"
            rows[name] = [f"{1e3 * a:.1f}, {1e3 * b:.1f}" for a, b in times] + [
                f"{1e6 * cpu[name] / leaves:.1f}",
                ratio,
            ]
        report.print_table(f"Parts of a train step, {leaves} leaves, ranks: {RANKS}", columns, rows)
    report.write_json(args.results / "leaves.json", results)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = [2000, 20_000]
    parser.add_argument("--leaves", type=lambda text: [*map(int, text.split(","))], default=sizes, help=f"by {BLOCK}")
    parser.add_argument("--systems", type=lambda names: names.split(","), default=COMPARED, help=f"of {list(SYSTEMS)}")
    parser.add_argument("--traced", type=int, default=2000, help="most leaves of systems that are jitted")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count")
    parser.add_argument("--dropped", type=int, default=2, help="rounds of one step before them")
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
