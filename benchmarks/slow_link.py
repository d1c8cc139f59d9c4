"""Ways to send less over a slow link between hosts, beside FSDP2's: time, bytes over the link, memory and bits.

Needs root and iproute2, as hosts.py does, whose two hosts and link this program uses. Each host has two ranks:

    python benchmarks/slow_link.py

One group of systems accumulates gradients over four microbatches on a mesh of 2 x 2, and one takes steps of one
microbatch with parameters that are split over all four ranks. In a third group each step waits for its batch, and may
gather the first block meanwhile. The first system of a group is its reference, for times and for bits. All systems live
in the same processes and take a step in each round, in an order that changes.

Small leaves are split too, and blocks are gathered one by one, as FSDP2 does. Bytes are those of the busier direction
of the link, without headers, next to what `fs.comm.record()` counts for all ranks of a host and to a formula. Peaks are
those of the rank that takes most: what a system keeps between steps, and what a step adds.
"""

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import hosts
import meter
import report
import torch
import torch.distributed as dist
from rivals import ADAMW, adamw, total_bytes
from rounds import mean_over_ranks, paired
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from trained_gpt import SEED, Configuration

import fshard as fs
from fshard.rounding import tolerance

HOSTS, RANKS_PER_HOST = 2, 2
RANKS = HOSTS * RANKS_PER_HOST
# What a step of the last group waits for its batch, as for a loader that is late.
BATCH_SECONDS = 0.25
# Axes whose ranks are on different hosts.
BETWEEN_HOSTS = ("replicate", "node")
MIB = 2**20

Batch = tuple[torch.Tensor, torch.Tensor]


class Program(NamedTuple):
    """A way to train.

    Attributes:
        step: Forward, backward and update; returns the loss of this rank.
        gradients: The full gradients, by names of parameters, without an update.
    """

    step: Callable[[], torch.Tensor]
    gradients: Callable[[], dict[str, torch.Tensor]]


class System(NamedTuple):
    """A row of the table.

    Attributes:
        make: Makes the program from the configuration and the microbatches of this rank.
        between_hosts: The bytes that all ranks of a host send to the other, in sizes of the parameters.
        is_exact: Whether these are the bytes, or the most that there can be.
    """

    make: Callable[[Configuration, Sequence[Batch]], Program]
    between_hosts: float | None = None
    is_exact: bool = True


def fshard(
    strategy: Callable[[], fs.ShardTransform],
    communicate: str | None = None,
    batch_seconds: float = 0.0,
    starts_ahead: bool = False,
) -> Callable[[Configuration, Sequence[Batch]], Program]:
    """fshard's step under a strategy.

    Args:
        strategy: Makes the strategy.
        communicate: How the gradients of microbatches are reduced.
        batch_seconds: How long a step waits for its batch.
        starts_ahead: Whether the first gathers start before that.
    """

    def make(configuration: Configuration, microbatches: Sequence[Batch]) -> Program:
        with torch.device("meta"):
            module = fs.with_init_weights(configuration.module())
        model = fs.functionalize(module, units=configuration.block)
        tx = fs.from_torch(torch.optim.AdamW, **ADAMW)
        state = fs.TrainState.create(model.init(strategy(), seed=SEED), tx)

        def loss_fn(params: Any, batch: Batch) -> torch.Tensor:
            return model.apply(params, *batch)

        accumulate = fs.accumulate(loss_fn, communicate=communicate)

        def started(params: Any) -> Any:
            """Start the gathers of the first block and of what is outside of blocks."""
            first = {}
            for name, leaf in params.items():
                if name.startswith("blocks.0.") or not name.startswith("blocks."):
                    first[name] = leaf
            return params | fs.start_gather(first)

        def differentiate() -> tuple[torch.Tensor, Any]:
            params = started(state.params) if starts_ahead else state.params
            wait_for_batch(batch_seconds)
            return accumulate(params, microbatches)

        def step() -> torch.Tensor:
            nonlocal state
            loss, grads = differentiate()
            state = fs.update(tx, state, grads, donate=True)
            return loss

        def gradients() -> dict[str, torch.Tensor]:
            _, grads = differentiate()
            return fs.unshard(grads)

        return Program(step, gradients)

    return make


def fsdp2(
    mesh_of: Callable[[], DeviceMesh],
    communicate: str = "each",
    batch_seconds: float = 0.0,
    starts_ahead: bool = False,
    **options: Any,
) -> Callable[[Configuration, Sequence[Batch]], Program]:
    """FSDP2's step on a mesh, with what stands for each of the arguments of `fshard`."""

    def make(configuration: Configuration, microbatches: Sequence[Batch]) -> Program:
        module = configuration.module()
        mesh = mesh_of()
        for unit in (*module.blocks, module):
            fully_shard(unit, mesh=mesh, **options)
        optimizer = adamw(module)

        def backward() -> torch.Tensor:
            if starts_ahead:
                module.unshard(async_op=True)
                module.blocks[0].unshard(async_op=True)
            wait_for_batch(batch_seconds)
            total = torch.zeros(())
            for number, batch in enumerate(microbatches, start=1):
                is_last = number == len(microbatches)
                module.set_requires_all_reduce(is_last or communicate == "each")
                loss = module(*batch) / len(microbatches)
                loss.backward()
                total += loss.detach()
            return total

        def step() -> torch.Tensor:
            loss = backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        def gradients() -> dict[str, torch.Tensor]:
            backward()
            grads = {name: parameter.grad.full_tensor() for name, parameter in module.named_parameters()}
            optimizer.zero_grad()
            return grads

        return Program(step, gradients)

    return make


def wait_for_batch(seconds: float) -> None:
    time.sleep(seconds)


def hybrid() -> fs.ShardTransform:
    """Shards within a host, and whole ones on each."""
    mesh = fs.init_mesh({"replicate": HOSTS, "shard": -1}, device="cpu")
    return fs.hsdp(mesh, min_shard_elements=0, bucket_bytes=0)


def all_at_once() -> fs.ShardTransform:
    """Shards of all ranks, which are gathered in one go."""
    return fs.zero3(fs.init_mesh({"shard": -1}, device="cpu"), min_shard_elements=0, bucket_bytes=0)


def by_axes(regather_axis: str | None = None) -> fs.ShardTransform:
    """Shards of all ranks, which are gathered between hosts first and then within them."""
    mesh = fs.init_mesh({"node": HOSTS, "local": -1}, device="cpu")
    options: dict[str, Any] = {"min_shard_elements": 0, "bucket_bytes": 0, "regather_axis": regather_axis}
    return fs.zero3(mesh, ("local", "node"), **options)


def with_policies() -> fs.ShardTransform:
    """As `by_axes`, but blocks of even numbers stay full until their backward."""
    mesh = fs.init_mesh({"node": HOSTS, "local": -1}, device="cpu")
    strategy = partial(fs.zero3, mesh, ("local", "node"), min_shard_elements=0, bucket_bytes=0)
    return fs.masked(strategy(regather=False), "blocks.[02468].*", otherwise=strategy())


def flat_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (RANKS,))


def hybrid_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (HOSTS, RANKS_PER_HOST), mesh_dim_names=("replicate", "shard"))


LATE = "a late batch"
# With R = 2 hosts an all-reduce sends 2 (R - 1) / R of the parameters' bytes, and a gather or a reduction half of that.
GROUPS: dict[str, dict[str, System]] = {
    "four microbatches": {
        "fshard-each": System(fshard(hybrid, "each"), between_hosts=4.0),
        "fshard-outer_once": System(fshard(hybrid, "outer_once"), between_hosts=1.0),
        "fshard-once": System(fshard(hybrid, "once"), between_hosts=1.0),
        "fsdp2-each": System(fsdp2(hybrid_mesh)),
        "fsdp2-outer_once": System(fsdp2(hybrid_mesh, "outer_once")),
    },
    "one microbatch": {
        "fshard-zero3-axes": System(fshard(by_axes), between_hosts=1.5, is_exact=False),
        "fshard-zero3": System(fshard(all_at_once)),
        "fshard-regather-axis": System(fshard(partial(by_axes, "local")), between_hosts=1.0),
        "fshard-policies": System(fshard(with_policies), between_hosts=1.5, is_exact=False),
        "fsdp2": System(fsdp2(flat_mesh)),
        "fsdp2-reshard-2": System(fsdp2(flat_mesh, reshard_after_forward=RANKS_PER_HOST)),
    },
    LATE: {
        "fshard-waiting": System(fshard(by_axes, batch_seconds=BATCH_SECONDS), between_hosts=1.5, is_exact=False),
        "fshard-started": System(
            fshard(by_axes, batch_seconds=BATCH_SECONDS, starts_ahead=True), between_hosts=1.5, is_exact=False
        ),
        "fsdp2-waiting": System(fsdp2(flat_mesh, batch_seconds=BATCH_SECONDS)),
        "fsdp2-started": System(fsdp2(flat_mesh, batch_seconds=BATCH_SECONDS, starts_ahead=True)),
    },
}
MICROBATCHES = {"four microbatches": 4, "one microbatch": 1, LATE: 1}


def main() -> None:
    args = parse_args()
    if args.worker:
        work(args)
        return
    hosts.prepare("slow_link.py")
    options = ["--configuration", args.configuration.name, "--rounds", str(args.rounds), "--dropped", str(args.dropped)]
    with tempfile.TemporaryDirectory() as folder:
        counter = meter.build_counter(Path(folder))
        file = Path(folder) / "groups.json"
        command_line = [__file__, "--worker", str(file), *options]
        with hosts.hosts(HOSTS, args.rate) as names:
            hosts.launch(names, RANKS_PER_HOST, command_line, counter.environment(), args.timeout)
        measured = json.loads(file.read_text())
    results = report.circumstances("slow_link")
    results |= {"configuration": {"name": args.configuration.name, **args.configuration._asdict()}}
    results |= {"hosts": HOSTS, "ranks": RANKS, "gigabits_per_second": args.rate, "backend": "gloo", "threads": 1}
    results |= {"rounds": args.rounds, "dropped_rounds": args.dropped, "fallback_reason": counter.reason or None}
    results |= measured
    for title, systems in results["groups"].items():
        show(f"{title}, {args.configuration.name}, 2 hosts x 2 ranks, {args.rate:g} Gbit/s", systems)
    report.write_json(args.results / "slow_link.json", results)


def work(args: argparse.Namespace) -> None:
    """Measure all systems as one rank; the first rank writes what it found."""
    torch.set_num_threads(1)
    fs.init_mesh({"ranks": -1}, device="cpu")
    results = measure(args, meter.meter())
    if dist.get_rank() == 0:
        Path(args.worker).write_text(json.dumps(results))
    # FSDP2's threads would end the process with an abort.
    dist.destroy_process_group()


def measure(args: argparse.Namespace, memory: meter.Meter) -> dict[str, Any]:
    """Measure all groups, and add the bytes that formulas give."""
    with torch.device("meta"):
        parameter_bytes = total_bytes(args.configuration.module().parameters())
    results: dict[str, Any] = {"measure": memory.name, "parameter_bytes": parameter_bytes, "groups": {}}
    for title, systems in GROUPS.items():
        found = measure_group(systems, MICROBATCHES[title], args, memory)
        for name, values in found.items():
            factor = systems[name].between_hosts
            values["formula_bytes"] = factor and factor * parameter_bytes
            values["formula_is_exact"] = systems[name].is_exact
        results["groups"][title] = found
    return results


def measure_group(
    systems: Mapping[str, System], microbatches: int, args: argparse.Namespace, memory: meter.Meter
) -> dict[str, Any]:
    """Measure systems that do the same work, the first of which is the reference."""
    first = dist.get_rank() * microbatches
    batches = [args.configuration.tokens(first + number) for number in range(microbatches)]
    programs, found = {}, {}
    expected: dict[str, torch.Tensor] = {}
    for name, system in systems.items():
        before = memory.current()
        programs[name] = system.make(args.configuration, batches)
        kept_bytes = memory.current() - before
        grads = programs[name].gradients()
        expected = expected or grads
        values = compare(grads, expected, terms=RANKS * microbatches)
        del grads
        gc.collect()
        before = memory.current()
        # The optimizer makes its state.
        programs[name].step()
        gc.collect()
        values |= {"kept_bytes": kept_bytes + memory.current() - before, "recorded_bytes": recorded(programs[name])}
        values |= {"seconds": [], "link_bytes": [], "payload_bytes": [], "step_bytes": [], "losses": []}
        found[name] = values
    for number in range(args.dropped + args.rounds):
        # The same order on every rank, without which they would wait for each other.
        for name in random.Random(number).sample(list(programs), len(programs)):
            turn = take_turn(programs[name].step, memory)
            for key, value in turn.items() if number >= args.dropped else ():
                found[name][key].append(value)
    reference = next(iter(found))
    for values in found.values():
        values["median_seconds"] = statistics.median(values["seconds"])
        values["ratio"] = statistics.median(paired(values["seconds"], found[reference]["seconds"]))
        values["peak_bytes"] = values["kept_bytes"] + max(values["step_bytes"])
    return found


def compare(grads: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], terms: int) -> dict[str, Any]:
    """Compare gradients with expected ones: are all bits equal, and if not, what part of the bound do they differ by?

    The bound is that of sums of the same terms, one of each microbatch of each rank, in two orders.
    """
    has_equal_bits = all(torch.equal(value, expected[name]) for name, value in grads.items())
    largest = 0.0
    for name, value in grads.items():
        scale = float(expected[name].abs().max())
        distance = float((value - expected[name]).abs().max())
        largest = max(largest, distance / tolerance(value.dtype, terms, scale))
    return {"has_equal_bits": has_equal_bits, "part_of_bound": largest}


def recorded(program: Program) -> int:
    """Count the bytes that a step of all ranks of a host sends over the axes between hosts."""
    with fs.comm.record() as record:
        program.step()
    sent = sum(entry.sent for entry in record if entry.axis in BETWEEN_HOSTS and not entry.scalar)
    return RANKS_PER_HOST * sent


def take_turn(step: Callable[[], torch.Tensor], memory: meter.Meter) -> dict[str, float]:
    """Take a step; of its time, its bytes and its memory the largest of all ranks counts."""
    gc.collect()
    is_counting = dist.get_rank() % RANKS_PER_HOST == 0
    dist.barrier()
    before = hosts.counters() if is_counting else (0, 0)
    memory.reset()
    idle = memory.current()
    dist.barrier()
    start = time.perf_counter()
    loss = step()
    seconds = time.perf_counter() - start
    step_bytes = memory.peak() - idle
    dist.barrier()
    after = hosts.counters() if is_counting else (0, 0)
    link_bytes, segments = (end - begin for begin, end in zip(before, after))
    payload = link_bytes - hosts.HEADER_BYTES * segments
    largest = torch.tensor([seconds, link_bytes, payload, step_bytes], dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    keys = ("seconds", "link_bytes", "payload_bytes", "step_bytes")
    return {**dict(zip(keys, largest.tolist())), "losses": mean_over_ranks(loss)}


def show(title: str, systems: Mapping[str, Any]) -> None:
    rows = {}
    for name, values in systems.items():
        bits = "equal" if values["has_equal_bits"] else f"{values['part_of_bound']:.2g} of bound"
        formula = values["formula_bytes"]
        bound = "" if values["formula_is_exact"] else "<= "
        rows[name] = [
            f"{values['median_seconds']:.2f}",
            f"{values['ratio']:.2f}",
            f"{statistics.median(values['payload_bytes']) / 1e6:.1f}",
            f"{values['recorded_bytes'] / 1e6:.1f}" if values["recorded_bytes"] else "-",
            f"{bound}{formula / 1e6:.1f}" if formula else "-",
            f"{values['peak_bytes'] / MIB:.0f}",
            bits,
            f"{values['losses'][-1]:.4f}",
        ]
    columns = ("s", "ratio", "MB over link", "recorded", "formula", "peak MiB", "bits", "loss")
    report.print_table(title, columns, rows)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configuration", type=Configuration.parse, default="d512-L4-B1-T64-V4096")
    parser.add_argument("--rate", type=float, default=1.0, help="of the link, in Gbit/s")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count")
    parser.add_argument("--dropped", type=int, default=1, help="rounds before them")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for all")
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
