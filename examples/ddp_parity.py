"""Prove that a train step equals torch DDP's, or find the first step and leaf that differ.

    torchrun --standalone --nproc_per_node 2 examples/ddp_parity.py --strategy zero3
    torchrun --standalone --nproc_per_node 2 examples/ddp_parity.py --break frozen
    python examples/ddp_parity.py --steps 100

The first command trains a byte-level GPT on the sources of the Python standard library. It runs two systems side by
side, step by step: fshard (jitted, with units) and DDP. It prints the bytes that each rank stores and sends, the time
of a step, a sample of the model's text, and the largest difference between the two runs. With a counter of memory
(`make demo`) it also prints the peak of each rank. The difference is 0 on one and two ranks, where sums have the same
order.

The second command puts a mistake into a correct step, and prints the reports of fs.testing on both steps. These
comparisons use float64, where rounding is small, and a tolerance that is derived from the dtype and the steps. They use
plain SGD, because Adam and clipping cancel a wrong factor of the gradients.
"""

import argparse
import copy
import ctypes
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPT, Block, batch, standard_library
from installed import EXAMPLES
from progress_bar import progress
from train_gpt import sample

import fshard as fs

STRATEGIES = {"ddp": fs.ddp, "zero1": fs.zero1, "zero2": fs.zero2, "zero3": fs.zero3}
ADAMW = {"betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
MAX_NORM = 1.0

# Steps that do not count for time and memory.
WARM_UP = 3

Batch = tuple[torch.Tensor, torch.Tensor]
MISTAKES = {
    "mean": "gradients are summed over ranks, where DDP takes the mean",
    "rate": "the learning rate is halved from the third update on",
    "psum": "the loss is averaged over ranks by hand, and then a second time",
    "frozen": "one leaf is left out of the update",
}


class Bytes(NamedTuple):
    """Bytes that one rank stores between steps."""

    parameters: int
    gradients: int
    optimizer: int


class Run:
    """A system that trains, and its results so far.

    Attributes:
        name: Its name in tables and pictures.
        step: Takes a batch, and returns the mean loss over ranks.
        losses: By step.
        seconds: By step.
        transient: The most bytes that a step has taken beyond those stored; 0 where nothing counts them.
    """

    def __init__(self, name: str, step: Callable[[Batch], float]) -> None:
        self.name, self.step = name, step
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.transient = 0

    def take_step(self, xy: Batch, counter: Any) -> None:
        """Take a step, and note its loss, its time and its memory."""
        if counter:
            counter.malloc_counter_reset()
            before = counter.malloc_counter_current()
        start = time.perf_counter()
        loss = self.step(xy)
        self.seconds.append(time.perf_counter() - start)
        # The first steps trace, and make what is kept.
        if counter and len(self.losses) >= WARM_UP:
            self.transient = max(self.transient, counter.malloc_counter_peak() - before)
        self.losses.append(loss)

    def milliseconds(self) -> float:
        """Time of a step, the median."""
        return 1e3 * statistics.median(self.seconds[WARM_UP:] or self.seconds)


def main() -> None:
    args = parse_args()
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    rank, ranks = mesh.get_rank(), mesh.size()
    train_text, held_out = standard_library()
    torch.manual_seed(args.seed)
    module = GPT(args.width, args.layers, args.heads, args.context)

    def batches(text: torch.Tensor, first: int, count: int) -> Any:
        return (batch(text, args.batch, args.context, seed=(first + i) * ranks + rank) for i in range(count))

    if args.mistake:
        for mistake in ("", args.mistake):
            check(mistake, args, mesh, module.double(), list(batches(train_text, 0, 4)))
        return

    def schedule(count: int) -> float:
        """Linear warm-up over 5% of the steps, then a cosine down to a tenth."""
        warm_up = max(1, args.steps // 20)
        progress = max(0.0, (count - warm_up) / max(1, args.steps - warm_up))
        return args.lr * min((count + 1) / warm_up, 0.55 + 0.45 * math.cos(math.pi * min(1.0, progress)))

    model = fs.functionalize(module, units=Block)
    rate = fs.from_torch_scheduler(torch.optim.lr_scheduler.LambdaLR, lr=1.0, steps=args.steps, lr_lambda=schedule)
    tx = fs.chain(fs.clip_by_global_norm(MAX_NORM), fs.from_torch(torch.optim.AdamW, lr=rate, **ADAMW))
    state = fs.TrainState.create(model.init(STRATEGIES[args.strategy](mesh)), tx)

    def loss_fn(params: Any, xy: Batch) -> torch.Tensor:
        return F.cross_entropy(model.apply(params, xy[0]).flatten(0, 1), xy[1].flatten())

    @partial(fs.jit, donate_argnums=0)
    def train_step(state: fs.TrainState, xy: Batch) -> tuple[fs.TrainState, torch.Tensor]:
        loss, grads = fs.value_and_grad(loss_fn)(state.params, xy)
        return fs.update(tx, state, grads), loss

    def sharded_step(xy: Batch) -> float:
        nonlocal state
        state, loss = train_step(state, xy)
        return loss.item()

    ours = Run(f"fshard {args.strategy}", sharded_step)
    ddp_step, ddp_stored = ddp(copy.deepcopy(module), schedule, ranks)
    theirs = Run("torch DDP", ddp_step)
    record = train((ours, theirs), batches(train_text, 0, args.steps), args, ranks)

    full = fs.gather(state.params)
    with torch.no_grad():
        evaluated = [loss_fn(full, xy) for xy in batches(held_out, 10**6, 20)]
        held_out_loss = fs.objective(torch.stack(evaluated).mean(), like=state.params).item()
        text = sample(model, full, args.context, args.sample, args.seed) if rank == 0 else ""
    # Gradients of a jitted step are there inside it alone.
    stored = Bytes(tree_bytes(state.params), 0, tree_bytes(state.opt_state)), ddp_stored()[0]
    params = fs.unshard(state.params), ddp_stored()[1]
    if rank == 0:
        print(f"\nA sample, {args.sample} bytes after {args.steps} steps:\n{indent(text, '    ')}\n")
        report(args, ranks, (ours, theirs), stored, params, held_out_loss, record, state.params)
        plot(args, ranks, (ours, theirs), stored)


def train(runs: Sequence[Run], batches: Any, args: argparse.Namespace, ranks: int) -> Any:
    """Train all systems side by side, step by step; returns what the first one sent in a step."""
    # Counts what the C library allocates, if the process was started with it: see benchmarks/meter.py.
    library = ctypes.CDLL(None)
    counter = library if hasattr(library, "malloc_counter_peak") else None
    if counter:
        for function in (counter.malloc_counter_current, counter.malloc_counter_peak):
            function.restype = ctypes.c_long
    record = None
    names = " and ".join(run.name for run in runs)
    bar = progress(batches, names, shown=dist.get_rank() == 0, total=args.steps)
    for number, xy in enumerate(bar):
        for run in runs:
            # The first step traces.
            recording = run is runs[0] and number == min(1, args.steps - 1)
            with fs.comm.record() if recording else nullcontext(record) as record:
                run.take_step(xy, counter)
    return record


def ddp(
    module: torch.nn.Module, schedule: Callable[[int], float], ranks: int
) -> tuple[Callable[[Batch], float], Callable[[], tuple[Bytes, dict[str, torch.Tensor]]]]:
    """The same step by torch alone: DDP, its clipping and the stateful AdamW; and what it has stored."""
    model = torch.nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, **ADAMW)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)

    def step(xy: Batch) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(xy[0]).flatten(0, 1), xy[1].flatten())
        loss.backward()
        # clip_grad_norm_ in two steps, with the norm in float64: in float32 it depends on how gradients are split.
        norm = torch.nn.utils.get_total_norm([parameter.grad.double() for parameter in module.parameters()])
        torch.nn.utils.clip_grads_with_norm_(module.parameters(), MAX_NORM, norm.float())
        optimizer.step()
        scheduler.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean.item() / ranks

    def stored() -> tuple[Bytes, dict[str, torch.Tensor]]:
        slots = [value for state in optimizer.state.values() for value in state.values()]
        grads = [parameter.grad for parameter in module.parameters()]
        sizes = Bytes(*(tree_bytes(tree) for tree in (list(module.parameters()), grads, slots)))
        return sizes, {name: parameter.detach() for name, parameter in module.named_parameters()}

    return step, stored


def check(mistake: str, args: argparse.Namespace, mesh: Any, module: torch.nn.Module, batches: list[Batch]) -> None:
    """Compare a step, with a mistake in it or with none, with DDP, and print the reports of the tools."""
    model, axis, lr = fs.functionalize(module), fs.axis_of(mesh), 0.1
    # A gradient adds up a term for each token, below 1, in another order, so it is off by as many eps, and a parameter
    # by lr times that. The loss has a curvature below 1 / lr, so the next gradient adds the parameters' difference.
    atol = lr * args.batch * args.context * axis.size * torch.finfo(torch.float64).eps * (2 ** len(batches) - 1)

    def local_loss(forward: Any, xy: Batch) -> torch.Tensor:
        return F.cross_entropy(forward(xy[0]).flatten(0, 1), xy[1].flatten())

    def loss_fn(params: Any, xy: Batch) -> torch.Tensor:
        loss = local_loss(partial(model.apply, params), xy)
        return fs.objective(loss, like=params) if mistake == "psum" else loss

    def train_step(state: fs.TrainState, xy: Batch) -> tuple[fs.TrainState, torch.Tensor]:
        loss, grads = fs.value_and_grad(loss_fn, reduce="sum" if mistake == "mean" else "mean")(state.params, xy)
        return fs.update(tx, state, grads), loss

    tx = fs.from_torch(torch.optim.SGD, lr=lambda count: lr / 2 if mistake == "rate" and count >= 2 else lr)
    tx = fs.freeze(tx, "blocks.0.up.weight") if mistake == "frozen" else tx
    state = fs.TrainState.create(model.init(STRATEGIES[args.strategy](mesh)), tx)
    ddp = {"module": module, "loss_fn": local_loss, "optimizer": partial(torch.optim.SGD, lr=lr)}
    against_ddp = partial(fs.testing.assert_matches_ddp, train_step, state, batches, **ddp, rtol=0, atol=atol)
    said = [f"\n{MISTAKES.get(mistake, 'The step as it should be')}; rounding may move a parameter by {atol:.1e}:"]
    without_ranks = partial(fs.testing.assert_step, train_step, state, batches[0], mesh={"shard": max(axis.size, 2)})
    for name, tool in {"assert_matches_ddp": against_ddp, "assert_step": without_ranks}.items():
        try:
            tool()
            said.append(f"  {name}: nothing wrong")
        except (AssertionError, ValueError) as error:
            # If fshard refuses a step, there is nothing to compare.
            end = "ends as fshard refuses the step" if isinstance(error, ValueError) else "finds the mistake"
            said.append(f"  {name} {end}:")
            lines = [f"    {line}" for line in str(error).splitlines()]
            said += [*lines[:4], f"      and {len(lines) - 5} more"] if len(lines) > 5 else lines
    if mesh.get_rank() == 0:
        print("\n".join(said))


def tree_bytes(tree: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in fs.tree_leaves(tree))


def report(
    args: argparse.Namespace,
    ranks: int,
    runs: tuple[Run, Run],
    stored: tuple[Bytes, Bytes],
    params: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]],
    held_out: float,
    record: Any,
    shards: Any,
) -> None:
    ours, theirs = runs
    padded = sum(math.prod(leaf.spec.padded_shape) * leaf.local.element_size() for leaf in shards.values())
    formula = 2 * padded * (ranks - 1) / ranks
    gap = max(abs(a - b) for a, b in zip(ours.losses, theirs.losses, strict=True))
    params_gap = max(float((params[0][name] - p).abs().max()) for name, p in params[1].items())
    print(f"{'per rank, MB':<28}{ours.name:>14}{theirs.name:>14}")
    for name, a, b in zip(Bytes._fields, *stored, strict=True):
        print(f"  {name:<26}{a / 1e6:>14.2f}{b / 1e6:>14.2f}")
    print(f"  {'stored between steps':<26}{sum(stored[0]) / 1e6:>14.2f}{sum(stored[1]) / 1e6:>14.2f}")
    if ours.transient:
        peaks = [(sum(kept) + run.transient) / 1e6 for kept, run in zip(stored, runs, strict=True)]
        print(f"  {'at peak, by malloc':<26}{peaks[0]:>14.2f}{peaks[1]:>14.2f}")
    print(f"  {'sent per step':<26}{record.bytes_sent() / 1e6:>14.2f}{formula / 1e6:>14.2f}  (formula: 2n(N-1)/N)")
    milliseconds = [run.milliseconds() for run in runs]
    ratio = milliseconds[0] / milliseconds[1]
    print(f"{'milliseconds a step':<28}{milliseconds[0]:>14.1f}{milliseconds[1]:>14.1f}  (ratio {ratio:.2f}, medians)")
    print(f"{'seconds, with the trace':<28}{sum(ours.seconds):>14.1f}{sum(theirs.seconds):>14.1f}")
    print(f"{'last loss, nats per byte':<28}{ours.losses[-1]:>14.6f}{theirs.losses[-1]:>14.6f}")
    print(f"{'held-out loss':<28}{held_out:>14.4f}")
    print(f"largest difference from DDP: {gap:.3g} in a loss, {params_gap:.3g} in a parameter, over {args.steps} steps")


def plot(args: argparse.Namespace, ranks: int, runs: tuple[Run, Run], stored: tuple[Bytes, Bytes]) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"No plot without matplotlib ({EXAMPLES})")
        return
    ours, theirs = runs
    figure = Figure(figsize=(13, 4), layout="constrained")
    curves, memory, times = figure.subplots(1, 3, width_ratios=(2, 1.2, 1))
    curves.plot(theirs.losses, color="0.6", linewidth=3, label=theirs.name)
    curves.plot(ours.losses, linewidth=1, label=ours.name)
    curves.set(xlabel="step", ylabel="loss (nats per byte)", title="The same steps, by fshard and by torch DDP")
    curves.locator_params("x", integer=True)
    curves.legend()
    names = [theirs.name, ours.name]
    for x, (run, kept) in enumerate(((theirs, stored[1]), (ours, stored[0]))):
        bottom = 0.0
        parts = (*zip(("C0", "C1", "C2"), kept, Bytes._fields, strict=True), ("0.85", run.transient, "taken in a step"))
        for color, size, name in parts:
            memory.bar(x, size / 1e6, bottom=bottom, color=color, width=0.6, label=name if x == 0 and size else None)
            bottom += size / 1e6
        memory.text(x, bottom, f"{bottom:.1f} MB", ha="center", va="bottom")
        times.bar(x, run.milliseconds(), color="0.6" if x == 0 else "C0", width=0.6)
        times.text(x, run.milliseconds(), f"{run.milliseconds():.0f} ms", ha="center", va="bottom")
    memory.set(ylabel="MB of each rank", title=f"Memory per rank, {ranks} ranks")
    memory.legend(loc="upper center", ncols=2, fontsize="small")
    times.set(ylabel="milliseconds", title="Time of a step, median")
    for axes in (memory, times):
        axes.set_xticks([0, 1], names)
        axes.margins(y=0.3)
    figure.savefig(args.plot, dpi=120)
    print(f"Curves, memory and time: {args.plot}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=STRATEGIES, default="zero3")
    parser.add_argument("--break", choices=MISTAKES, dest="mistake", help="; ".join(map(": ".join, MISTAKES.items())))
    for name, value in {"steps": 360, "width": 128, "layers": 4, "heads": 4, "context": 128, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--sample", type=int, default=300, help="bytes to write at the end")
    parser.add_argument("--plot", type=Path, default=Path("ddp_parity.png"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
