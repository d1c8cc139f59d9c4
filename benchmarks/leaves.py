"""Times of a train step of thousands of small leaves, part by part: the host's own work, leaf by leaf.

    OMP_NUM_THREADS=1 python benchmarks/leaves.py
    OMP_NUM_THREADS=1 python benchmarks/leaves.py --leaves 2000 --systems ddp,fsdp2-blocks,fshard-zero3 --rounds 9

Two ranks, one thread each. Each block of the model multiplies its input by 100 vectors of 64 elements: one operator for
each leaf, and autograd saves them all. The parts of a step are timed apart: forward and backward, clipping by the
global norm, and the update by AdamW, which drops the gradients. CPU time is that of the main thread, to which waiting
does not add. Each system has processes of its own, and all wait while one takes a step. Times are medians over rounds;
the first step is told apart.

By default fshard keeps leaves this small whole, and gathers neighbouring blocks together. What is named `split` splits
every leaf, as FSDP2 does, and in `zero3-split` gathers block by block. What is named `graph` is jitted, each part by
itself. `fsdp2-blocks` clips and steps block by block: the first time that FSDP2 is given a list of leaves, in `fsdp2`
all of them, takes time quadratic in its length. `fsdp2` and traces are measured up to --most leaves: of 20,000 the
first step of `fsdp2` would take 44 minutes, by what 500 to 2,000 take, and a trace takes some.
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
from rivals import ADAMW, MAX_NORM, SYSTEMS, Batch, System, torch_system
from rounds import Samples, Turn, check_losses, take_turn
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from trained_gpt import SEED

import fshard as fs

RANKS, BLOCK, WIDTH, BATCH = 2, 100, 64, 4
PARTS = ("forward and backward", "clip", "update")
SPLIT = ("fshard-zero2-split", "fshard-zero3-split")
SLOW = ("fsdp2", "fshard-zero3-graph", "fshard-zero3-split-graph")
COMPARED = ("ddp", "fsdp2-blocks", "fshard-zero3", *SPLIT, *SLOW)
REFERENCE = "fsdp2-blocks"
# The steps of a turn handle so many leaves.
TURN_LEAVES = 10_000
# A turn, or making a system and tracing it, ends before.
HUNG_SECONDS = 7200.0


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
    """A model of so many leaves, as the makers of systems take it."""

    leaves: int

    block = Block

    def module(self) -> Blocks:
        torch.manual_seed(SEED)
        return Blocks(self.leaves)


def fsdp2_blocks(configuration: Configuration, mesh: DeviceMesh, batch: Batch) -> System:
    module = configuration.module()
    for unit in (*module.blocks, module):
        fully_shard(unit, mesh=mesh)
    groups = [list(block.parameters()) for block in module.blocks]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], **ADAMW)
    system = torch_system(module, optimizer, batch)

    def clip() -> torch.Tensor:
        norms = [nn.utils.get_total_norm([parameter.grad for parameter in group]) for group in groups]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        for group in groups:
            nn.utils.clip_grads_with_norm_(group, MAX_NORM, norm)
        return torch.zeros(())

    return system._replace(parts=(system.parts[0], clip, system.parts[2]))


@cache
def system_of(name: str, leaves: int) -> System:
    """The system of this process, made when it is first asked for."""
    mesh, make = fs.init_mesh({"shard": -1}, device="cpu"), SYSTEMS.get(name, fsdp2_blocks)
    generator = torch.Generator().manual_seed(mesh.get_rank())
    return make(Configuration(leaves), mesh, (torch.randn(BATCH, WIDTH, generator=generator),))


def take_steps(name: str, leaves: int, steps: int) -> list[Turn]:
    """Take steps; of each part the means over all of them but the first of several, which finds the caches cold."""
    turns = [[take_turn(part) for part in system_of(name, leaves).parts] for _ in range(steps)]
    return [Turn(*map(statistics.mean, zip(*part))) for part in zip(*(turns[1:] or turns))]


def measured(names: list[str], leaves: int, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Start the processes of all systems, and let each take steps once a round, in an order that changes."""
    samples = {name: [Samples([], [], [], []) for _ in PARTS] for name in names}
    first: dict[str, float] = {}
    with ExitStack() as stack:
        ranks = {name: stack.enter_context(fs.testing.Workers(RANKS, timeout=HUNG_SECONDS)) for name in names}
        for number in range(-args.dropped, args.rounds):
            for name in random.Random(number).sample(names, len(names)):
                steps = 1 + TURN_LEAVES // leaves if number >= 0 else 1
                turns = ranks[name].run(partial(take_steps, name, leaves, steps))[0]
                first.setdefault(name, sum(turn.main_thread_seconds for turn in turns))
                for part, turn in zip(samples[name], turns if number >= 0 else ()):
                    for values, value in zip(part, turn):
                        values.append(value)
    check_losses({name: parts[0] for name, parts in samples.items()}, RANKS)
    return {
        name: {"first_step_main_thread_seconds": first[name]} | dict(zip(PARTS, map(summary, parts)))
        for name, parts in samples.items()
    }


def summary(samples: Samples) -> dict[str, Any]:
    wall, cpu = map(statistics.median, (samples.seconds, samples.main_thread_seconds))
    return {"median_seconds": wall, "median_main_thread_seconds": cpu, **samples._asdict()}


def main() -> None:
    args = parse_args()
    results = report.circumstances("leaves")
    results |= {"ranks": RANKS, "backend": "gloo", "threads": 1, "rounds": args.rounds, "dropped_rounds": args.dropped}
    columns = [f"{part}: CPU, wall ms" for part in PARTS]
    columns += ["CPU us a leaf", f"ratio to {REFERENCE}", "first step: CPU s"]
    for leaves in args.leaves:
        names = [name for name in args.systems if leaves <= args.most or name not in SLOW]
        results[f"{leaves} leaves"] = found = measured(names, leaves, args)
        cpu = {name: sum(found[name][part]["median_main_thread_seconds"] for part in PARTS) for name in names}
        rows = {name: cells(found[name], cpu[name], leaves, cpu.get(REFERENCE)) for name in names}
        report.print_table(f"Parts of a train step, {leaves} leaves, ranks: {RANKS}", columns, rows)
    report.write_json(args.results / "leaves.json", results)


def cells(found: dict[str, Any], cpu: float, leaves: int, reference: float | None) -> list[str]:
    parts = [(found[part]["median_main_thread_seconds"], found[part]["median_seconds"]) for part in PARTS]
    ratio = f"{cpu / reference:.3f}" if reference else "-"
    first = f"{found['first_step_main_thread_seconds']:.1f}"
    return [*(f"{1e3 * a:.1f}, {1e3 * b:.1f}" for a, b in parts), f"{1e6 * cpu / leaves:.1f}", ratio, first]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes, known = [2000, 20_000], f"of {', '.join((*SYSTEMS, REFERENCE))}"
    parser.add_argument("--leaves", type=lambda text: [*map(int, text.split(","))], default=sizes, help=f"by {BLOCK}")
    parser.add_argument("--systems", type=lambda names: names.split(","), default=COMPARED, help=known)
    parser.add_argument("--most", type=int, default=2000, help=f"leaves of {', '.join(SLOW)}")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count")
    parser.add_argument("--dropped", type=int, default=2, help="rounds of one step before them")
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
