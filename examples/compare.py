"""Train a small GPT under several strategies, print a table and draw a plot, for the examples of transforms."""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from gpt import GPT, Block, batch, standard_library
from installed import EXAMPLES, installed_by
from progress_bar import progress
from throughput import Meter

import fshard as fs

with installed_by(EXAMPLES):
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

Batch = tuple[torch.Tensor, torch.Tensor]
CountBytes = Callable[[fs.comm.Collective], float]


class Run(NamedTuple):
    """A training: by step the loss and two counts of megabytes sent so far; megabytes stored, and seconds taken."""

    losses: list[float]
    sent: list[float]
    part: list[float]
    stored: float
    seconds: float


def compare(
    args: argparse.Namespace,
    strategies: Mapping[str, fs.ShardTransform],
    part: str,
    count_bytes: CountBytes,
) -> None:
    """Train under each strategy on the same batches; `count_bytes` says how many bytes of a collective are `part`."""
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    torch.set_num_threads(1)
    runs = {}
    for name, strategy in strategies.items():
        runs[name] = train(args, name, mesh, strategy, count_bytes)
    if mesh.get_rank() == 0:
        report(runs, part, args.steps)
        plot(args, runs, part, mesh.size())
        print(f"Curves: {args.plot}")


def train(
    args: argparse.Namespace,
    name: str,
    mesh: Any,
    strategy: fs.ShardTransform,
    count_bytes: CountBytes,
) -> Run:
    torch.manual_seed(args.seed)
    module = GPT(args.width, args.layers, heads=4, context=args.context)
    model = fs.functionalize(module, units=Block)
    # Error feedback delays parts of a gradient; large momentum would delay these parts even more.
    adamw = fs.from_torch(torch.optim.AdamW, lr=args.lr, betas=(0.5, 0.95))
    tx = fs.chain(fs.clip_by_global_norm(1.0), adamw)
    state = fs.TrainState.create(model.init(strategy), tx)

    def loss_fn(params: Any, xy: Batch) -> torch.Tensor:
        x, y = xy
        logits = model.apply(params, x)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    losses = []
    sent = []
    part = []
    start = time.perf_counter()
    for xy in batches(args, name, mesh, losses):
        with fs.comm.record() as record:
            value_and_grad = fs.value_and_grad(loss_fn, transform_state=state.transform_state)
            loss, grads, transform_state = value_and_grad(state.params, xy)
            state = fs.update(tx, state, grads, donate=True, transform_state=transform_state)
        losses.append(loss.item())
        sent.append(record.bytes_sent() / 1e6)
        part.append(sum(count_bytes(entry) for entry in record if not entry.scalar) / 1e6)
    return Run(
        losses,
        sent=list(accumulate(sent)),
        part=list(accumulate(part)),
        stored=sum(leaf.nbytes for leaf in fs.tree_leaves(state)) / 1e6,
        seconds=time.perf_counter() - start,
    )


def batches(args: argparse.Namespace, name: str, mesh: Any, losses: list[float]) -> Iterator[Batch]:
    """This rank's batches, behind a bar that shows loss, tokens per second and the time left."""
    text, _ = standard_library()
    rank = mesh.get_rank()
    ranks = mesh.size()
    bar = progress(range(args.steps), f"{name:<24}", shown=rank == 0)
    meter = Meter(tokens=args.batch * args.context * ranks)
    for step in bar:
        yield batch(text, args.batch, args.context, seed=step * ranks + rank)
        meter.end_step()
        bar.set_postfix_str(f"loss {losses[-1]:.3f}, {meter.tokens_a_second():,.0f} tokens/s", refresh=False)


def smooth(losses: Sequence[float]) -> list[float]:
    """Means that forget a twentieth with each step, because batches are small."""
    means = []
    total = 0.0
    weight = 0.0
    for loss in losses:
        total = 0.95 * total + 0.05 * loss
        weight = 0.95 * weight + 0.05
        means.append(total / weight)
    return means


def report(runs: Mapping[str, Run], part: str, steps: int) -> None:
    titles = ("loss", "MB sent a step", part, "MB stored", "seconds")
    print(f"{'of each rank':<24}" + "".join(f"{title:>16}" for title in titles))
    for name, run in runs.items():
        cells = (
            smooth(run.losses)[-1],
            run.sent[-1] / steps,
            run.part[-1] / steps,
            run.stored,
            run.seconds,
        )
        print(f"{name:<24}" + "".join(f"{cell:>16.3f}" for cell in cells))


def plot(args: argparse.Namespace, runs: Mapping[str, Run], part: str, ranks: int) -> None:
    figure = Figure(figsize=(13, 4.8), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    for number, (name, run) in enumerate(runs.items()):
        # The first strategy is what the others are compared with.
        style = {"color": "0.7", "linewidth": 4}
        if number > 0:
            style = {"color": f"C{number - 1}", "linewidth": 1.5}
        steps = range(1, args.steps + 1)
        for panel, x in zip(panels, (steps, run.sent, run.part)):
            panel.plot(x, smooth(run.losses), label=f"{name}, {run.stored:.2f} MB stored", **style)
    labels = ("step", "MB sent by each rank", f"MB sent by each rank {part}")
    for panel, label in zip(panels, labels):
        panel.set_xlabel(label)
        panel.grid(color="0.92")
    panels[0].locator_params("x", integer=True)
    panels[0].set_ylabel("loss (nats per byte, smoothed)")
    # One rank sends nothing.
    if ranks > 1:
        for panel in panels[1:]:
            panel.set_xscale("log")
            panel.xaxis.set(major_locator=LogLocator(subs=(1, 3)), major_formatter="{x:g}")
            # Labels of minor ticks would overlap after few steps.
            panel.xaxis.set(minor_formatter=NullFormatter())
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(f"The same GPT on the same batches, on {ranks} rank{'s' * (ranks > 1)}")
    figure.savefig(args.plot, dpi=120)


def parse_args(name: str, description: str, **more_sizes: float) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sizes = {"steps": 250, "width": 64, "layers": 2, "context": 64, "batch": 8, "lr": 3e-3, "seed": 0}
    sizes |= more_sizes
    for option, default in sizes.items():
        parser.add_argument(f"--{option}", type=type(default), default=default)
    parser.add_argument("--plot", type=Path, default=Path(f"{name}.png"))
    return parser.parse_args()
