"""Steps under a memory budget: time, peak, copies and bits at ten budgets, beside checkpoints by hand and FSDP2.

    python benchmarks/fit.py
    python benchmarks/fit.py --models gpt
    python benchmarks/fit.py --models gpt,pass --small --rounds 1 --results /tmp/fit
    python benchmarks/fit.py --page

The models are a GPT of width 1024 with 8 layers, and a Llama and a Mixtral of transformers with 200 million parameters
(architectures.py). Two processes train each under zero3 with fused AdamW, jitted and donated. Ten budgets lie evenly
between the least that `fs.fit` can keep and the peak of the step without a budget. "pass" measures the time of the pass
alone, for steps of 8 and 96 layers that are only traced.

All steps of fshard share one state in one pair of processes: they take turns, round by round, each from the state that
the one before has left. Each takes its first step from the same state, and the loss, the parameters and the optimizer's
state after it are compared by their bits. Peers have processes of their own, which alternate with the step that has no
budget. A time is the median over rounds of the ratio to that step in the same round; the slower rank counts.

A peak is what the arguments of a step take, and what the process allocates beyond them while the step runs, by the
counter of meter.py. The first step, in which jit traces, is left out.

--page writes the section of docs/performance.md, and docs/pictures/draw_results.py its picture, from the results.
"""

import argparse
import gc
import hashlib
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import fit_page
import meter
import report
import torch
import torch.distributed as dist
from architectures import Configured, parse
from bound import bounds_of
from rivals import ADAMW, System, adamw, torch_system
from torch import nn
from torch._functorch import config as partitioner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.fx import Graph
from torch.utils.checkpoint import checkpoint
from trained_gpt import SEED

import fshard as fs
from fshard.ext.fit.search import find_plan
from fshard.ext.fit.step import StepFacts
from fshard.ext.jit.graph import StepGraph
from fshard.extend import PassedGraph, Rates, Traced, graph_nodes

MODELS = ("gpt", "llama", "mixtral", "pass")
RANKS, BUDGETS = 2, 10
# Tokens of the models of transformers. With 128, what a Llama saves for the backward is less than its update takes.
TIMES = {"llama": 512, "mixtral": 128}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
# The steps that are only traced, and what part of their peak beyond the arguments they may keep.
PASS_NAMES, PASS_PART = ("d64-L8-B8-T256-V256", "d64-L96-B8-T256-V256"), 0.7
WHOLE, BY_HAND = "whole", "checkpointed"
# FSDP2 with compiled blocks has budgets of torch's partitioner, as parts of what it would save without one.
PEERS = {
    "fsdp2": {},
    "fsdp2-checkpointed": {"checkpointed": True},
    "fsdp2-compiled-0.5": {"torch_budget": 0.5},
    "fsdp2-compiled-0.2": {"torch_budget": 0.2},
}
# A first step, with its trace and the search of the pass or with a compiler, ends before.
HUNG_SECONDS = 900.0
LOSS_TOLERANCE = 1e-3

Rows = dict[str, dict[str, Any]]


class Turn(NamedTuple):
    """One step on one rank: its wall time, what it allocated beyond its arguments, and the loss of this rank."""

    seconds: float
    bytes: int
    loss: float


def main() -> None:
    args = parse_args()
    if args.page:
        fit_page.write_section(args.results)
        return
    with tempfile.TemporaryDirectory() as folder:
        counter = meter.build_counter(Path(folder))
        # For the processes that are started from here on.
        os.environ |= counter.environment() | {"OMP_NUM_THREADS": "1"}
        for name in args.models:
            print(f"Measuring {name}", flush=True)
            results = report.circumstances("fit")
            results |= {"ranks": RANKS, "backend": "gloo", "threads": 1, "fallback_reason": counter.reason or None}
            results |= {"steps": measure_pass()} if name == "pass" else measure_model(name, args)
            fit_page.print_tables(results)
            report.write_json(args.results / f"fit-{name}.json", results)


def configure(name: str, small: bool) -> Configured:
    """The model of a name, or a tiny one of its architecture."""
    if name not in MODELS:
        return parse(name)
    if name == "gpt":
        return parse("d64-L2-B2-T32-V256" if small else "d1024-L8-B1-T256")
    architecture = parse(name)._replace(time=32 if small else TIMES[name])
    if not small:
        return architecture
    return architecture._replace(sizes=architecture.sizes | TINY, vocabulary=256)


def measure_model(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure a model's steps at all budgets, and those of its peers."""
    configuration = configure(name, args.small)
    (bound,) = bounds_of(["fshard-zero3-graph"], configuration, RANKS).values()
    with fs.testing.Workers(RANKS, timeout=HUNG_SECONDS) as workers:
        ranks = workers.run(partial(describe_steps, name, args.small))
        rows = merge_rows([rank["rows"] for rank in ranks])
        take = {row: partial(workers.run, partial(take_turn, name, args.small, row)) for row in rows}
        add_times(rows, take_rounds(take, args.rounds))
        for peer in args.peers:
            rows[peer] = measure_peer(peer, name, args, take[WHOLE])
    check_losses(rows)
    return {
        "configuration": {"name": configuration.name, **configuration._asdict()},
        **{"rounds": args.rounds, "measure": ranks[0]["measure"], "arguments": ranks[0]["arguments"]},
        **{"bound": {**bound._asdict(), "bound": bound.total}, "rows": rows},
    }


def merge_rows(ranks: list[Rows]) -> Rows:
    """What all ranks say of each step: the largest number counts, and bits are equal where they are on every rank."""
    rows: Rows = {}
    for name, first in ranks[0].items():
        rows[name] = dict(first)
        for key in ("predicted", "search_seconds"):
            if key in first:
                rows[name][key] = max(rank[name][key] for rank in ranks)
        rows[name]["first_loss"] = statistics.mean(rank[name]["first_loss"] for rank in ranks)
        rows[name]["has_equal_bits"] = all(rank[name]["has_equal_bits"] for rank in ranks)
    return rows


def take_rounds(take: Mapping[str, Callable[[], list[Turn]]], rounds: int) -> dict[str, list[Turn]]:
    """Let each step take a turn in each round, in an order that changes; the slower or the larger rank counts."""
    turns: dict[str, list[Turn]] = {name: [] for name in take}
    for number in range(rounds):
        for name in random.Random(number).sample(list(take), len(take)):
            ranks = take[name]()
            seconds = max(turn.seconds for turn in ranks)
            loss = statistics.mean(turn.loss for turn in ranks)
            turns[name].append(Turn(seconds, max(turn.bytes for turn in ranks), loss))
    return turns


def add_times(rows: Rows, turns: Mapping[str, list[Turn]]) -> None:
    """Add to each row what its turns took, beside those of the step without a budget in the same rounds."""
    references = [turn.seconds for turn in turns[WHOLE]]
    for name, of_step in turns.items():
        if name not in rows:
            continue
        seconds = [turn.seconds for turn in of_step]
        ratios = [a / b for a, b in zip(seconds, references, strict=True)]
        rows[name] |= {
            "peak": rows[name]["arguments"] + max(turn.bytes for turn in of_step),
            "median_seconds": statistics.median(seconds),
            "ratio": statistics.median(ratios),
            "seconds": seconds,
        }


def measure_peer(peer: str, name: str, args: argparse.Namespace, whole: Callable[[], list[Turn]]) -> dict[str, Any]:
    """Measure FSDP2 in processes of its own, in turn with the step that has no budget."""
    with fs.testing.Workers(RANKS, timeout=HUNG_SECONDS) as workers:
        ranks = workers.run(partial(describe_peer, peer, name, args.small))
        rows = {peer: ranks[0] | {"first_loss": statistics.mean(rank["first_loss"] for rank in ranks)}}
        take = {WHOLE: whole, peer: partial(workers.run, partial(take_turn_of_peer, peer, name, args.small))}
        add_times(rows, take_rounds(take, args.rounds))
    return rows[peer]


def check_losses(rows: Rows) -> None:
    """Refuse to compare steps that did not do the same work."""
    losses = {name: row["first_loss"] for name, row in rows.items()}
    if max(losses.values()) - min(losses.values()) > LOSS_TOLERANCE * max(losses.values()):
        raise RuntimeError(f"losses of the first step differ: {losses}")


def measure_pass() -> Rows:
    """Measure the time of the pass for steps that never run."""
    with fs.testing.Workers(RANKS, timeout=HUNG_SECONDS) as workers:
        return {name: workers.run(partial(time_pass, name))[0] for name in PASS_NAMES}


# From here on, what runs in each measured process.


class ObservedPass:
    """A pass that notes what another one does to a graph.

    Attributes:
        name: As `fs.jit` asks for it.
        notes: The seconds that the other pass took, the peak after it, and the operators and gathers that it added.
    """

    name = "observed"

    def __init__(self, make_pass: Callable[[Traced], Any]) -> None:
        self._make_pass = make_pass
        self.notes: dict[str, Any] = {}

    def __call__(self, traced: Traced) -> PassedGraph:
        operators, gathers = count_operators(traced.module.graph)
        graph_pass = self._make_pass(traced)
        start = time.perf_counter()
        passed = graph_pass(traced)
        seconds = time.perf_counter() - start
        operators_after, gathers_after = count_operators(passed.traced.module.graph)
        self.notes = {
            "operators": operators,
            "search_seconds": seconds,
            "predicted": StepGraph(passed.traced).peak_bytes(),
            "copies": operators_after - operators,
            "gathers": gathers_after - gathers,
        }
        return passed


class LeastPass:
    """A pass that changes nothing, and notes the least bytes in which `fs.fit` can run a graph.

    Attributes:
        name: As `fs.jit` asks for it.
        arguments: The bytes of the graph's arguments.
        peak: The most bytes that the graph holds, arguments included.
        least: The most bytes that it would hold at the least.
    """

    name = "least"
    arguments = peak = least = 0

    def __call__(self, traced: Traced) -> PassedGraph:
        step = StepFacts(traced.module.graph, Rates())
        self.arguments = step.arguments
        self.peak = step.arguments + StepGraph(traced).peak_bytes()
        self.least = find_plan(step, 1).peak
        return PassedGraph(traced, "")


def count_operators(graph: Graph) -> tuple[int, int]:
    """Count the operators of a graph, and the gathers among them."""
    operators = [node for node in graph.nodes if node.op == "call_function"]
    collectives = [graph_nodes.find_collective(node) for node in operators]
    gathers = [collective for collective in collectives if collective and collective.op == "all_gather"]
    return len(operators), len(gathers)


def checkpoint_blocks(module: nn.Module, block: type[nn.Module]) -> nn.Module:
    """Compute each block of a module again in the backward."""

    class Checkpointed(block):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return checkpoint(super().forward, *args, use_reentrant=False, **kwargs)

    for part in module.modules():
        if type(part) is block:
            part.__class__ = Checkpointed
    return module


class Steps:
    """All steps of fshard in this process, and the one state that they share."""

    def __init__(self, name: str, small: bool) -> None:
        torch.set_num_threads(1)
        self.mesh = fs.init_mesh({"shard": -1}, device="cpu")
        self.memory = meter.meter()
        self.configuration = configure(name, small)
        self.batch = self.configuration.tokens(self.mesh.get_rank())
        self.tx = fs.from_torch(torch.optim.AdamW, **ADAMW)
        self.models = {is_checkpointed: self.make_model(is_checkpointed) for is_checkpointed in (True, False)}
        # A model gets its buffers when it draws its parameters, and both draw the same.
        for model in self.models.values():
            params = model.init(fs.zero3(self.mesh), seed=SEED)
        self.state = fs.TrainState.create(params, self.tx)
        self.arguments = 0
        self.jitted: dict[str, Callable[..., Any]] = {}

    def make_model(self, is_checkpointed: bool) -> Any:
        """The model as functions."""
        with torch.device("meta"):
            module = fs.with_init_weights(self.configuration.module())
        if is_checkpointed:
            checkpoint_blocks(module, self.configuration.block)
        return fs.functionalize(module, units=self.configuration.block)

    def jit(self, passes: tuple[Any, ...], is_checkpointed: bool = False) -> Callable[..., Any]:
        """A train step under passes."""
        model = self.models[is_checkpointed]

        def train_step(state: fs.TrainState, *batch: torch.Tensor) -> tuple[fs.TrainState, torch.Tensor]:
            loss, grads = fs.value_and_grad(model.apply)(state.params, *batch)
            return fs.update(self.tx, state, grads, donate=True), loss

        return fs.jit(train_step, donate_argnums=0, passes=passes)

    def take(self, name: str) -> Turn:
        """Take a step from the state that the one before has left."""

        def step() -> torch.Tensor:
            self.state, loss = self.jitted[name](self.state, *self.batch)
            return loss

        return take_measured(step, self.memory)


def take_measured(step: Callable[[], torch.Tensor], memory: meter.Meter) -> Turn:
    """Take a step from when all ranks begin; what it allocates is counted from there on."""
    dist.barrier()
    memory.reset()
    before, start = memory.current(), time.perf_counter()
    loss = step()
    seconds = time.perf_counter() - start
    dist.barrier()
    return Turn(seconds, memory.peak() - before, loss.item())


@cache
def steps_of(name: str, small: bool) -> Steps:
    """The steps of this process, made when they are first asked for."""
    return Steps(name, small)


def take_turn(name: str, small: bool, row: str) -> Turn:
    """Take a step of fshard."""
    return steps_of(name, small).take(row)


def describe_steps(name: str, small: bool) -> dict[str, Any]:
    """Make all steps of fshard and let each take its first step, from the same state.

    Returns:
        The measure of memory, the bytes of a step's arguments, and for each step its budget, what the graph tells of it
        and whether its bits are those of the step without a budget.
    """
    steps = steps_of(name, small)
    passes = find_budgets(steps)
    initial = fs.tree_map(torch.clone, steps.state)
    rows: Rows = {}
    for row, budget in {WHOLE: None, BY_HAND: None, **passes}.items():
        observed = ObservedPass(lambda _, budget=budget: fs.fit(budget) if budget else leave_alone)
        steps.jitted[row] = steps.jit((observed,), is_checkpointed=row == BY_HAND)
        steps.state = fs.tree_map(torch.clone, initial)
        loss = steps.take(row).loss
        digest = digest_of(steps.state, loss)
        rows[row] = observed.notes | {"budget": budget, "arguments": steps.arguments, "first_loss": loss}
        rows[row]["predicted"] += steps.arguments
        rows[row]["digest"] = digest
    for values in rows.values():
        values["has_equal_bits"] = values["digest"] == rows[WHOLE]["digest"]
    # Otherwise the objects of all programs would be walked again and again in the time of whichever runs.
    gc.collect()
    gc.freeze()
    return {"measure": steps.memory.name, "arguments": steps.arguments, "rows": rows}


def find_budgets(steps: Steps) -> dict[str, int]:
    """Ten budgets from the peak of a step down to the least that it can keep; ranks agree on the largest of theirs."""
    finder = LeastPass()
    fs.make_graph(steps.jit((finder,)))(steps.state, *steps.batch)
    steps.arguments = finder.arguments
    ends = torch.tensor([finder.peak, finder.least])
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    peak, least = ends.tolist()
    gaps = BUDGETS - 1
    return {f"budget {number}": peak - (peak - least) * number // gaps for number in range(BUDGETS)}


def leave_alone(traced: Traced) -> PassedGraph:
    """Change nothing."""
    return PassedGraph(traced, "")


def digest_of(state: fs.TrainState, loss: float) -> str:
    """A digest of this rank's bits of a state and of a loss."""
    digest = hashlib.sha256(repr(loss).encode())
    for leaf in fs.tree_leaves(state):
        local = getattr(leaf, "local", leaf)
        if isinstance(local, torch.Tensor):
            digest.update(memoryview(local.detach().contiguous().flatten().view(torch.uint8).numpy()))
    return digest.hexdigest()


class Peer(NamedTuple):
    """FSDP2 in this process, and what reads its memory."""

    system: System
    memory: meter.Meter


@cache
def peer_of(peer: str, name: str, small: bool) -> Peer:
    """FSDP2 in the way of a name, made when it is first asked for."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    options = PEERS[peer]
    configuration = configure(name, small)
    module = configuration.module()
    blocks = [part for part in module.modules() if type(part) is configuration.block]
    if options.get("checkpointed"):
        checkpoint_blocks(module, configuration.block)
    if "torch_budget" in options:
        partitioner.activation_memory_budget = options["torch_budget"]
        for block in blocks:
            block.compile()
    for unit in (*blocks, module):
        fully_shard(unit, mesh=mesh)
    return Peer(torch_system(module, adamw(module), configuration.tokens(mesh.get_rank())), meter.meter())


def describe_peer(peer: str, name: str, small: bool) -> dict[str, Any]:
    """Let FSDP2 take its first step; returns what it keeps between steps, and its loss."""
    system = peer_of(peer, name, small).system
    loss = system.step()
    gc.collect()
    return {"arguments": sum(system.stored()), "first_loss": loss.item()}


def take_turn_of_peer(peer: str, name: str, small: bool) -> Turn:
    """Take a step of FSDP2."""
    system, memory = peer_of(peer, name, small)
    return take_measured(system.step, memory)


def time_pass(name: str) -> dict[str, Any]:
    """Trace a step, fit it to a part of its peak beyond the arguments, and note how long that took."""
    steps = Steps(name, small=False)

    def make_pass(traced: Traced) -> Any:
        arguments = StepFacts(traced.module.graph, Rates()).arguments
        return fs.fit(arguments + int(PASS_PART * StepGraph(traced).peak_bytes()))

    observed = ObservedPass(make_pass)
    fs.make_graph(steps.jit((observed,)))(steps.state, *steps.batch)
    return observed.notes


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=lambda names: names.split(","), default=list(MODELS), help=",".join(MODELS))
    parser.add_argument("--peers", type=lambda names: [*filter(None, names.split(","))], default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count")
    parser.add_argument("--small", action="store_true", help="tiny models, to rehearse")
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    parser.add_argument("--page", action="store_true", help="write the section of the page of performance")
    args = parser.parse_args()
    if unknown := (set(args.models) - set(MODELS)) | (set(args.peers) - set(PEERS)):
        parser.error(f"nothing is called {', '.join(sorted(unknown))}; there are {', '.join((*MODELS, *PEERS))}")
    return args


if __name__ == "__main__":
    main()
