"""Step times between hosts with links of a known rate: network namespaces of this machine, joined by veth pairs.

Needs root and iproute2 (`apt install iproute2`). Each host has processes of its own, started by torchrun with a
rendezvous over the link, whose rate `tc ... tbf` limits in both directions:

    python benchmarks/hosts.py --configuration d512-L8-B4-T256 --rates 10,1,0.4
    python benchmarks/hosts.py --ranks-per-host 2 --rates 1 --systems plain,ddp,fsdp2,fshard-zero3,fshard-hsdp

Each system has processes of its own, and all wait while one takes a step; see peers.py, also for --launches and
--memory-fraction.

The bound of a system is max(compute, wire): compute is the step of `plain`, which trains as many processes on the same
cores without a message, and wire is the bytes of the busier direction of the link, by the counters of what limits its
rate, divided by the rate. These count the headers of each segment, 66 bytes to 1448 of TCP, as a network card does;
the interface's counters do not, because the kernel cuts segments behind them. Bytes without headers are compared with
what `fs.comm.record()` counts.
"""

import argparse
import datetime
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import report
import torch
import torch.distributed as dist
from groups import grouped
from rivals import SYSTEMS, make
from rounds import mean_over_ranks
from trained_gpt import Configuration

import fshard as fs

NAMES = (
    *("plain", "ddp", "fsdp1", "fsdp2", "fshard-ddp", "fshard-zero2", "fshard-zero3"),
    *("fshard-zero2-graph", "fshard-zero3-graph", "fshard-zero3-prefetch2", "fshard-zero3-prefetch2-graph"),
    *("fshard-zero3-int8", "fshard-zero3-int8-both"),
)
ON_FOUR = (*NAMES, "fshard-hsdp")

# Of Ethernet, IP and TCP with timestamps, in each segment.
HEADER_BYTES = 14 + 20 + 20 + 12
# tc's bucket holds what the link sends between two ticks of the kernel's clock, and a packet before it is cut.
TICKS_PER_SECOND, LARGEST_PACKET = 250, 128 * 1024
# Of the rendezvous; the systems' own stores follow.
PORT = 29411
# A process waits for its turn while others make their systems, compile and take steps.
TURN_TIMEOUT = datetime.timedelta(minutes=30)


def main() -> None:
    args = parse_args()
    if args.worker:
        work(args)
        return
    prepare("hosts.py")
    results = report.circumstances("hosts")
    results |= {"configuration": {"name": args.configuration.name, **args.configuration._asdict()}}
    results |= {
        "hosts": 2,
        "ranks": 2 * args.ranks_per_host,
        "ranks_per_host": args.ranks_per_host,
        "launches": args.launches,
        "rounds": args.rounds,
        "dropped_rounds": args.dropped,
    }
    results["rates"] = {}
    references = [name for name in ("plain", "ddp") if name in args.systems]
    ranks = 2 * args.ranks_per_host
    groups = grouped("hosts.py", args.systems, references, args.configuration, ranks, args.memory_fraction)
    for rate in args.rates:
        found: dict[str, Any] = {}
        with hosts(2, rate) as names:
            for group in groups:
                launches = [run(names, group, args) for _ in range(args.launches)]
                found = summarised(launches, rate) | found
        results["rates"][f"{rate:g}"] = {name: found[name] for name in args.systems}
        show(results["rates"][f"{rate:g}"], rate, args)
    file = args.results / f"hosts-{args.configuration.name}-{2 * args.ranks_per_host}.json"
    report.write_json(file, results)
    draw(file.with_suffix(".png"), results)


def prepare(program: str) -> None:
    """Refuse to start without what namespaces need, and let them go also where somebody ends this process."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        raise SystemExit(f"{program}: expected root and iproute2 (ip, tc), for namespaces with links of a known rate")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(f"{program}: ended by SIGTERM"))


@contextmanager
def hosts(count: int, rate: float) -> Iterator[list[str]]:
    """Make namespaces on one bridge, each with a link of a rate in Gbit/s; remove them whatever happens."""
    tag = f"fs{os.getpid()}"
    with ExitStack() as stack:

        def made(make: str, remove: str) -> None:
            command(make)
            stack.callback(command, remove, check=False)

        bridge, names = f"{tag}b", [f"{tag}h{i}" for i in range(count)]
        made(f"ip netns add {bridge}", f"ip netns del {bridge}")
        command(f"ip -n {bridge} link add br0 type bridge")
        command(f"ip -n {bridge} link set br0 up")
        for i, name in enumerate(names):
            made(f"ip netns add {name}", f"ip netns del {name}")
            command(f"ip link add eth0 netns {name} type veth peer name port{i} netns {bridge}")
            command(f"ip -n {bridge} link set port{i} master br0 up")
            command(f"ip -n {name} address add 10.77.0.{i + 1}/24 dev eth0")
            command(f"ip -n {name} link set lo up")
            command(f"ip -n {name} link set eth0 up")
            burst = max(LARGEST_PACKET, int(rate * 1e9 / 8 / TICKS_PER_SECOND))
            command(f"tc -n {name} qdisc add dev eth0 root tbf rate {rate * 1e3:g}mbit burst {burst} latency 400ms")
        yield names


def command(text: str, check: bool = True) -> None:
    subprocess.run(text.split(), check=check, capture_output=not check)


# Of each rank of each system, what it measured.
Launch = Mapping[str, Sequence[dict[str, Any]]]


def run(names: Sequence[str], group: Sequence[str], args: argparse.Namespace) -> Launch:
    """Start the processes of some systems on the hosts, and measure them."""
    options = ["--systems", ",".join(group), "--configuration", args.configuration.name]
    options += ["--rounds", str(args.rounds), "--dropped", str(args.dropped)]
    options += ["--ranks-per-host", str(args.ranks_per_host)]
    with tempfile.TemporaryDirectory() as folder:
        command_line = [__file__, "--worker", folder, *options]
        launch(names, args.ranks_per_host * len(group), command_line, os.environ, args.timeout)
        return {
            name: [json.loads(path.read_text()) for path in sorted(Path(folder).glob(f"{name}.rank-*.json"))]
            for name in group
        }


def launch(
    names: Sequence[str],
    processes_per_host: int,
    command_line: Sequence[str],
    environment: Mapping[str, str],
    timeout: float,
) -> None:
    """Run a script in some processes on each host, started by torchrun with a rendezvous over the link."""
    environment = {**environment, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    processes = []
    for i, name in enumerate(names):
        torchrun = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(names)), "--node-rank", str(i)),
            *("--nproc-per-node", str(processes_per_host), "--rdzv-backend", "c10d"),
            *("--rdzv-id", "hosts", "--rdzv-conf", f"is_host={i == 0}"),
            *("--rdzv-endpoint", f"10.77.0.1:{PORT}", "--local-addr", f"10.77.0.{i + 1}"),
        ]
        on_host = ["ip", "netns", "exec", name]
        processes.append(subprocess.Popen([*on_host, *torchrun, *command_line], env=environment))
    try:
        codes = [process.wait(timeout) for process in processes]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)
    if any(codes):
        raise SystemExit(f"{Path(command_line[0]).name}: torchrun ended with {codes}")


def work(args: argparse.Namespace) -> None:
    """Measure one system on one rank of its own, in turn with the processes of others; write the samples."""
    torch.set_num_threads(1)
    every = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=TURN_TIMEOUT)
    number, local_rank = divmod(int(os.environ["LOCAL_RANK"]), args.ranks_per_host)
    name, host = args.systems[number], int(os.environ["GROUP_RANK"])
    # A world of its own, with a store of its own, beside those of the other systems.
    os.environ |= {
        "RANK": str(host * args.ranks_per_host + local_rank),
        "WORLD_SIZE": str(2 * args.ranks_per_host),
        "LOCAL_RANK": str(local_rank),
        "MASTER_ADDR": "10.77.0.1",
        "MASTER_PORT": str(PORT + 1 + number),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    system = make(name, args.configuration, mesh)
    samples: dict[str, Any] = {"host": host, "seconds": [], "sent": [], "payload": [], "losses": []}
    last = args.dropped + args.rounds
    rounds = [random.Random(n).sample(args.systems, len(args.systems)) for n in range(last + 1)]
    for turn, (n, whose) in enumerate((n, whose) for n, order in enumerate(rounds) for whose in order):
        if whose != name:
            continue
        if turn:
            every.wait([f"turn {turn}"])
        dist.barrier()
        before = counters()
        dist.barrier()
        start = time.perf_counter()
        with fs.comm.record() if n == last else nullcontext() as record:
            loss = system.step()
        # No barrier before the clock: the slowest rank's time counts, and counters settle after it.
        seconds = time.perf_counter() - start
        dist.barrier()
        sent, segments = (after - earlier for after, earlier in zip(counters(), before))
        payload = sent - HEADER_BYTES * segments
        mean = mean_over_ranks(loss)
        if record is not None:
            samples["recorded"] = record.bytes_sent()
        elif n >= args.dropped:
            for key, value in {"seconds": seconds, "sent": sent, "payload": payload, "losses": mean}.items():
                samples[key].append(value)
        if dist.get_rank() == 0:
            every.set(f"turn {turn + 1}", "")
    Path(args.worker, f"{name}.rank-{dist.get_rank()}.json").write_text(json.dumps(samples))
    # FSDP2's threads would end the process with an abort.
    dist.destroy_process_group()


def counters() -> tuple[int, int]:
    """Bytes that this host's link has sent, with the headers of segments, and the number of segments."""
    shown = subprocess.run(
        ["tc", "-s", "-j", "qdisc", "show", "dev", "eth0"], check=True, capture_output=True, text=True
    )
    (link,) = json.loads(shown.stdout)
    return link["bytes"], link["packets"]


def summarised(launches: Sequence[Launch], rate: float) -> dict[str, Any]:
    """Summarise the samples of all ranks and launches by system."""
    names = list(launches[0])
    slowest = {name: in_rounds(launches, name, "seconds", max) for name in names}
    compute = statistics.median(slowest["plain"]) if "plain" in slowest else None
    found = {}
    for name, seconds in slowest.items():
        busiest, payload = (statistics.median(in_rounds(launches, name, key, max)) for key in ("sent", "payload"))
        wire = busiest * 8 / (rate * 1e9)
        bound = None if compute is None else max(compute, wire)
        median = statistics.median(seconds)
        # Ranks of one host share an interface, and what they send each other does not pass it.
        recorded = {rank["host"]: rank["recorded"] for rank in launches[0][name]}
        found[name] = {
            "median_seconds": median,
            "wire_seconds": wire,
            "bound_seconds": bound,
            "to_bound": bound and median / bound,
            "link_bytes": busiest,
            "payload_bytes": payload,
            "recorded_bytes": max(recorded.values()),
            "ratio": paired(seconds, slowest.get("fsdp2")),
            "to_ddp": paired(seconds, slowest.get("ddp")),
            "seconds": seconds,
            "losses": in_rounds(launches, name, "losses", lambda values: values[0]),
        }
    return found


def in_rounds(launches: Sequence[Launch], name: str, key: str, of_ranks: Callable[[Any], float]) -> list[float]:
    """One value of all ranks for each round, launch after launch."""
    return [of_ranks(values) for launch in launches for values in zip(*(rank[key] for rank in launch[name]))]


def paired(seconds: Sequence[float], others: Sequence[float] | None) -> float | None:
    """Compute the median over rounds of the ratio to another system in the same round."""
    return None if others is None else statistics.median(a / b for a, b in zip(seconds, others))


def show(found: dict[str, Any], rate: float, args: argparse.Namespace) -> None:
    rows = {
        name: [
            f"{1e3 * values['median_seconds']:.0f}",
            f"{1e3 * values['wire_seconds']:.0f}",
            "-" if values["to_bound"] is None else f"{values['to_bound']:.3f}",
            f"{values['to_ddp']:.3f}" if values["to_ddp"] else "-",
            f"{values['link_bytes'] / 1e6:.1f}",
            f"{values['payload_bytes'] / 1e6:.1f}",
            f"{values['recorded_bytes'] / 1e6:.1f}" if values["recorded_bytes"] else "-",
            f"{values['losses'][-1]:.4f}",
        ]
        for name, values in found.items()
    }
    columns = ("ms", "wire ms", "to bound", "to ddp", "MB sent", "payload", "recorded", "loss")
    report.print_table(f"{args.configuration.name}, 2 hosts x {args.ranks_per_host}, {rate:g} Gbit/s", columns, rows)


def draw(path: Path, results: dict[str, Any]) -> None:
    """Plot step times against rates, with the bound of ZeRO-3."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rates = sorted(map(float, results["rates"]))
    if len(rates) < 2:
        return
    figure, axes = pyplot.subplots(figsize=(9, 5), constrained_layout=True)
    axes.set_prop_cycle(color=pyplot.get_cmap("tab20").colors)
    for name in results["rates"][f"{rates[0]:g}"]:
        times = [results["rates"][f"{rate:g}"][name]["median_seconds"] for rate in rates]
        style = "o-" if name.startswith("fshard") else "s--"
        axes.plot(rates, times, style, label=name, linewidth=1, markersize=4)
    bounds = [results["rates"][f"{rate:g}"].get("fshard-zero3", {}).get("bound_seconds") for rate in rates]
    if all(bounds):
        axes.plot(rates, bounds, "k:", label="max(compute, wire) of fshard-zero3")
    name = results["configuration"]["name"]
    title = f"Time of a train step, {name}, two hosts, ranks: {results['ranks']}"
    axes.set(xscale="log", xlabel="link, Gbit/s", ylabel="seconds", title=title, ylim=(0, None))
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    figure.legend(loc="outside right", frameon=False, fontsize="small")
    figure.savefig(path, dpi=120)
    print(f"Plot: {path}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configuration", type=Configuration.parse, default="d512-L8-B4-T256")
    parser.add_argument(
        "--rates", type=lambda text: [float(part) for part in text.split(",")], default=[10.0, 1.0, 0.4]
    )
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--systems", type=lambda names: names.split(","), help=f"of {','.join(SYSTEMS)}")
    parser.add_argument("--launches", type=int, default=2, help="times that the processes are started")
    parser.add_argument("--rounds", type=int, default=4, help="rounds that count, of each launch")
    parser.add_argument("--dropped", type=int, default=2, help="rounds before them")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for each rate")
    parser.add_argument("--memory-fraction", type=float, default=0.8, help="of the available memory, to use at most")
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.systems = args.systems or list(NAMES if args.ranks_per_host == 1 else ON_FOUR)
    if unknown := set(args.systems) - set(SYSTEMS):
        parser.error(f"no system is called {', '.join(sorted(unknown))}; there are {', '.join(SYSTEMS)}")
    return args


if __name__ == "__main__":
    main()
