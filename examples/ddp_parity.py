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
from collections.abc import Callable, Iterator, Sequence
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
        self.name = name
        self.step = step
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
    rank = mesh.get_rank()
    ranks = mesh.size()
    train_text, held_out = standard_library()
    torch.manual_seed(args.seed)
    module = GPT(args.width, args.layers, args.heads, args.context)

    def batches(text: torch.Tensor, first: int, count: int) -> Iterator[Batch]:
        for number in range(first, first + count):
            yield batch(text, args.batch, args.context, seed=number * ranks + rank)

    if args.mistake:
        four_batches = list(batches(train_text, 0, 4))
        for mistake in ("", args.mistake):
            check(mistake, args, mesh, module.double(), four_batches)
        return

    def schedule(count: int) -> float:
        """Linear warm-up over 5% of the steps, then a cosine down to a tenth."""
        warm_up = max(1, args.steps // 20)
        progress = max(0.0, (count - warm_up) / max(1, args.steps - warm_up))
        falling = 0.55 + 0.45 * math.cos(math.pi * min(1.0, progress))
        return args.lr * min((count + 1) / warm_up, falling)

    model = fs.functionalize(module, units=Block)
    rate = fs.from_torch_scheduler(torch.optim.lr_scheduler.LambdaLR, lr=1.0, steps=args.steps, lr_lambda=schedule)
    adamw = fs.from_torch(torch.optim.AdamW, lr=rate, **ADAMW)
    tx = fs.chain(fs.clip_by_global_norm(MAX_NORM), adamw)
    strategy = STRATEGIES[args.strategy](mesh)
    state = fs.TrainState.create(model.init(strategy), tx)

    def loss_fn(params: Any, xy: Batch) -> torch.Tensor:
        return cross_entropy(partial(model.apply, params), xy)

    @partial(fs.jit, donate_argnums=0)
    def train_step(state: fs.TrainState, xy: Batch) -> tuple[fs.TrainState, torch.Tensor]:
        loss, grads = fs.value_and_grad(loss_fn)(state.params, xy)
        return fs.update(tx, state, grads), loss

    def sharded_step(xy: Batch) -> float:
        nonlocal state
        state, loss = train_step(state, xy)
        return loss.item()

    ours = Run(f"fshard {args.strategy}", sharded_step)
    trainer = DdpTrainer(copy.deepcopy(module), schedule, ranks)
    theirs = Run("torch DDP", trainer.step)
    record = train((ours, theirs), batches(train_text, 0, args.steps), args)

    full = fs.gather(state.params)
    with torch.no_grad():
        losses = [loss_fn(full, xy) for xy in batches(held_out, 10**6, 20)]
        held_out_loss = fs.objective(torch.stack(losses).mean(), like=state.params).item()
        text = sample(model, full, args.context, args.sample, args.seed) if rank == 0 else ""
    # Gradients of a jitted step are there inside it alone.
    stored = Bytes(tree_bytes(state.params), 0, tree_bytes(state.opt_state))
    params = fs.unshard(state.params)
    if rank != 0:
        return
    print(f"\nA sample, {args.sample} bytes after {args.steps} steps:\n{indent(text, '    ')}\n")
    both_stored = (stored, trainer.stored())
    report_memory(ranks, (ours, theirs), both_stored, record.bytes_sent(), state.params)
    report_training((ours, theirs), held_out_loss)
    params_gap = largest_difference(params, trainer.parameters())
    loss_gap = max(abs(a - b) for a, b in zip(ours.losses, theirs.losses, strict=True))
    print(
        f"largest difference from DDP: {loss_gap:.3g} in a loss, {params_gap:.3g} in a parameter, "
        f"over {args.steps} steps"
    )
    plot(args, ranks, (ours, theirs), both_stored)


def cross_entropy(forward: Callable[[torch.Tensor], torch.Tensor], xy: Batch) -> torch.Tensor:
    x, y = xy
    return F.cross_entropy(forward(x).flatten(0, 1), y.flatten())


def train(runs: Sequence[Run], batches: Iterator[Batch], args: argparse.Namespace) -> Any:
    """Train all systems side by side, step by step; returns what the first one sent in a step."""
    counter = malloc_counter()
    record = None
    names = " and ".join(run.name for run in runs)
    bar = progress(batches, names, shown=dist.get_rank() == 0, total=args.steps)
    for number, xy in enumerate(bar):
        for run in runs:
            # The first step traces.
            if run is runs[0] and number == min(1, args.steps - 1):
                with fs.comm.record() as record:
                    run.take_step(xy, counter)
            else:
                run.take_step(xy, counter)
    return record


def malloc_counter() -> Any:
    """What counts the C library's allocations, if the process was started with it: see benchmarks/meter.py."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "malloc_counter_peak"):
        return None
    for function in (library.malloc_counter_current, library.malloc_counter_peak):
        function.restype = ctypes.c_long
    return library


class DdpTrainer:
    """The same step by torch alone: DDP, its clipping and the stateful AdamW."""

    def __init__(self, module: torch.nn.Module, schedule: Callable[[int], float], ranks: int) -> None:
        self.module = module
        self.ranks = ranks
        self.model = torch.nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=1.0, **ADAMW)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, schedule)

    def step(self, xy: Batch) -> float:
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model, xy)
        loss.backward()
        # clip_grad_norm_ in two steps, with the norm in float64: in float32 it depends on how gradients are split.
        grads = [parameter.grad.double() for parameter in self.module.parameters()]
        norm = torch.nn.utils.get_total_norm(grads)
        torch.nn.utils.clip_grads_with_norm_(self.module.parameters(), MAX_NORM, norm.float())
        self.optimizer.step()
        self.scheduler.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean.item() / self.ranks

    def stored(self) -> Bytes:
        parameters = list(self.module.parameters())
        grads = [parameter.grad for parameter in parameters]
        slots = [list(state.values()) for state in self.optimizer.state.values()]
        return Bytes(tree_bytes(parameters), tree_bytes(grads), tree_bytes(slots))

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self.module.named_parameters()}


def check(mistake: str, args: argparse.Namespace, mesh: Any, module: torch.nn.Module, batches: list[Batch]) -> None:
    """Compare a step, with a mistake in it or with none, with DDP, and print the reports of the tools."""
    model = fs.functionalize(module)
    axis = fs.axis_of(mesh)
    lr = 0.1
    # A gradient adds up a term for each token, below 1, in another order, so it is off by as many eps, and a parameter
    # by lr times that. The loss has a curvature below 1 / lr, so the next gradient adds the parameters' difference.
    terms = args.batch * args.context * axis.size
    atol = lr * terms * torch.finfo(torch.float64).eps * (2 ** len(batches) - 1)

    def loss_fn(params: Any, xy: Batch) -> torch.Tensor:
        loss = cross_entropy(partial(model.apply, params), xy)
        if mistake == "psum":
            return fs.objective(loss, like=params)
        return loss

    def train_step(state: fs.TrainState, xy: Batch) -> tuple[fs.TrainState, torch.Tensor]:
        reduce = "sum" if mistake == "mean" else "mean"
        loss, grads = fs.value_and_grad(loss_fn, reduce=reduce)(state.params, xy)
        return fs.update(tx, state, grads), loss

    def rate(count: int) -> float:
        return lr / 2 if mistake == "rate" and count >= 2 else lr

    tx = fs.from_torch(torch.optim.SGD, lr=rate)
    if mistake == "frozen":
        tx = fs.freeze(tx, "blocks.0.up.weight")
    strategy = STRATEGIES[args.strategy](mesh)
    state = fs.TrainState.create(model.init(strategy), tx)

    def assert_matches_ddp() -> None:
        fs.testing.assert_matches_ddp(
            train_step,
            state,
            batches,
            module=module,
            loss_fn=cross_entropy,
            optimizer=partial(torch.optim.SGD, lr=lr),
            rtol=0,
            atol=atol,
        )

    def assert_step() -> None:
        fs.testing.assert_step(train_step, state, batches[0], mesh={"shard": max(axis.size, 2)})

    lines = [f"\n{MISTAKES.get(mistake, 'The step as it should be')}; rounding may move a parameter by {atol:.1e}:"]
    for tool in (assert_matches_ddp, assert_step):
        lines += findings_of(tool)
    if mesh.get_rank() == 0:
        print("\n".join(lines))


def findings_of(tool: Callable[[], None]) -> list[str]:
    """The first lines of what a tool says of a step."""
    try:
        tool()
    except (AssertionError, ValueError) as error:
        # If fshard refuses a step, there is nothing to compare.
        end = "ends as fshard refuses the step" if isinstance(error, ValueError) else "finds the mistake"
        lines = [f"    {line}" for line in str(error).splitlines()]
        if len(lines) > 5:
            lines[4:] = [f"      and {len(lines) - 5} more"]
        return [f"  {tool.__name__} {end}:", *lines]
    return [f"  {tool.__name__}: nothing wrong"]


def tree_bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in fs.tree_leaves(tree))


def largest_difference(params: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    return max(float((params[name] - other).abs().max()) for name, other in others.items())


def report_memory(
    ranks: int,
    runs: tuple[Run, Run],
    stored: tuple[Bytes, Bytes],
    sent: float,
    shards: Any,
) -> None:
    def print_row(name: str, *numbers: float, note: str = "") -> None:
        print(f"  {name:<26}" + "".join(f"{number / 1e6:>14.2f}" for number in numbers) + note)

    padded = 0
    for leaf in shards.values():
        padded += math.prod(leaf.spec.padded_shape) * leaf.local.element_size()
    formula = 2 * padded * (ranks - 1) / ranks
    print(f"{'per rank, MB':<28}" + "".join(f"{run.name:>14}" for run in runs))
    for name, *sizes in zip(Bytes._fields, *stored, strict=True):
        print_row(name, *sizes)
    print_row("stored between steps", *map(sum, stored))
    if runs[0].transient:
        peaks = [sum(sizes) + run.transient for sizes, run in zip(stored, runs, strict=True)]
        print_row("at peak, by malloc", *peaks)
    print_row("sent per step", sent, formula, note="  (formula: 2n(N-1)/N)")


def report_training(runs: tuple[Run, Run], held_out_loss: float) -> None:
    def print_row(name: str, numbers: Sequence[float], digits: int, note: str = "") -> None:
        print(f"{name:<28}" + "".join(f"{number:>14.{digits}f}" for number in numbers) + note)

    milliseconds = [run.milliseconds() for run in runs]
    ratio = milliseconds[0] / milliseconds[1]
    print_row("milliseconds a step", milliseconds, 1, note=f"  (ratio {ratio:.2f}, medians)")
    print_row("seconds, with the trace", [sum(run.seconds) for run in runs], 1)
    print_row("last loss, nats per byte", [run.losses[-1] for run in runs], 6)
    print_row("held-out loss", [held_out_loss], 4)


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
    for x, (run, sizes) in enumerate(zip((theirs, ours), reversed(stored))):
        draw_memory(memory, x, sizes, run.transient)
        milliseconds = run.milliseconds()
        times.bar(x, milliseconds, color="0.6" if x == 0 else "C0", width=0.6)
        times.text(x, milliseconds, f"{milliseconds:.0f} ms", ha="center", va="bottom")
    memory.set(ylabel="MB of each rank", title=f"Memory per rank, {ranks} ranks")
    memory.legend(loc="upper center", ncols=2, fontsize="small")
    times.set(ylabel="milliseconds", title="Time of a step, median")
    for axes in (memory, times):
        axes.set_xticks([0, 1], [theirs.name, ours.name])
        axes.margins(y=0.3)
    figure.savefig(args.plot, dpi=120)
    print(f"Curves, memory and time: {args.plot}")


def draw_memory(axes: Any, x: int, sizes: Bytes, transient: int) -> None:
    """Draw a column of parts, of which the first column names those that are there."""
    names = (*Bytes._fields, "taken in a step")
    colors = ("C0", "C1", "C2", "0.85")
    bottom = 0.0
    for color, size, name in zip(colors, (*sizes, transient), names, strict=True):
        megabytes = size / 1e6
        label = name if x == 0 and size else None
        axes.bar(x, megabytes, bottom=bottom, color=color, width=0.6, label=label)
        bottom += megabytes
    axes.text(x, bottom, f"{bottom:.1f} MB", ha="center", va="bottom")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--strategy", choices=STRATEGIES, default="zero3")
    texts = [f"{name}: {text}" for name, text in MISTAKES.items()]
    parser.add_argument("--break", choices=MISTAKES, dest="mistake", help="; ".join(texts))
    parser.add_argument("--steps", type=int, default=360)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--sample", type=int, default=300, help="bytes to write at the end")
    parser.add_argument("--plot", type=Path, default=Path("ddp_parity.png"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
