"""Train a byte-level GPT on the sources of the Python standard library, sharded, jitted, and safe to kill.

    python -m fshard.run --standalone --nproc_per_node 2 --max-restarts 3 examples/train_gpt.py --preset small
    torchrun --standalone --nproc_per_node 4 examples/train_gpt.py --reduction-order tree --stop-at 100
    torchrun --standalone --nproc_per_node 2 examples/train_gpt.py --reduction-order tree
    python examples/train_gpt.py --preset tiny --steps 50

The program trains with ZeRO-3 in one jitted step that donates the old state, and accumulates gradients over
microbatches. Mixed precision (--precision bfloat16) and recomputed activations (--remat) are options. Checkpoints are
written while steps run, and the memory of the host keeps the state of each step. Kill any rank at any time: the
launcher, torchrun too, starts all ranks again, and the run continues from the last step with the next batches and
dropout masks. Its losses equal those of an uninterrupted run bit for bit. The run also continues on another number of
ranks. With --reduction-order tree it then has the same bits, for the same number of microbatches. At the end, the model
writes a sample. --against plots the losses of another run beside those of this run.

The bar shows the loss, the norm of gradients before they are clipped, and the tokens a second of all ranks. The last
line has the number of parameters and the tokens a second. With --peak-tflops, the peak of one rank's device, it also
has the MFU.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from gpt import GPT, Block, standard_library
from installed import EXAMPLES
from progress_bar import progress
from throughput import Meter, count_parameters, flops_of_a_step, mfu
from torch.distributed.device_mesh import DeviceMesh

import fshard as fs

Batch = tuple[torch.Tensor, torch.Tensor]
Microbatch = tuple[torch.Tensor, Batch]  # with its number among those of all ranks
TrainStep = Callable[[fs.TrainState, list[Microbatch]], tuple[fs.TrainState, torch.Tensor]]

# So many windows of the held-out files are evaluated, in batches of this size.
EVALUATED, AT_ONCE = 256, 32


class Preset(NamedTuple):
    """The sizes of a model, and of the batch of all ranks together."""

    width: int
    layers: int
    heads: int
    context: int
    batch: int


PRESETS = {
    "tiny": Preset(width=64, layers=2, heads=2, context=64, batch=24),
    "small": Preset(width=128, layers=4, heads=4, context=128, batch=24),
    "medium": Preset(width=384, layers=6, heads=6, context=256, batch=48),
    "gpt2": Preset(width=768, layers=12, heads=12, context=1024, batch=480),
}


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_args(arguments)
    torch.set_num_threads(args.threads)
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    is_first = mesh.get_rank() == 0
    sizes = PRESETS[args.preset]
    number = args.microbatches or (8 if args.reduction_order else mesh.size())
    if sizes.batch % number:
        raise SystemExit(f"{sizes.batch} sequences cannot be split into {number} microbatches")

    model = make_model(sizes, args.dropout, args.remat)
    tx = make_optimizer(args)
    cache = fs.graph_cache(args.directory / "graphs")
    train_step = make_train_step(model, tx, args.reduction_order)
    jitted_step = fs.jit(train_step, donate_argnums=0, cache=cache)
    train_text, held_out = standard_library()

    def first_state() -> fs.TrainState:
        params = model.init(make_strategy(mesh, args.precision), seed=args.seed)
        return fs.TrainState.create(params, tx, key=torch.tensor(args.seed))

    def batch_of(step: int) -> list[Microbatch]:
        """This rank's microbatches of a step."""
        samples = len(train_text) // sizes.context - 1
        ids = fs.sample_ids(args.seed, step, dataset_size=samples, batch_size=sizes.batch)
        numbered = list(enumerate(ids.unflatten(0, (number, -1))))
        mine = fs.microbatches(numbered, like=state.params)
        # A file does not hold a graph that makes tensors of numbers, so the numbers are tensors.
        return [(torch.tensor(i), windows(train_text, ids, sizes.context)) for i, ids in mine]

    # Each step's state stays in the memory of the host until the run ends, for ranks that a launcher starts again.
    options = {"keep": 3, "every": args.save_every, "memory": mesh.size() > 1}
    with fs.checkpoint.Manager(args.directory / "checkpoints", **options) as manager:
        state = manager.restore_or(first_state)
        meter = Meter(tokens=sizes.batch * sizes.context)
        log = Log(args.directory / "losses.txt", is_first, mesh.size(), begin=int(state.step))
        for step in log.steps(min(args.steps, args.stop_at or args.steps), meter):
            state, loss = jitted_step(state, batch_of(step))
            norm, _ = state.opt_state
            log.add(step, loss.item(), norm.item())
            meter.end_step()
            manager.save(state)

    evaluated = model.eval()
    loss = held_out_loss(evaluated, state.params, held_out, sizes.context)
    text = sample(evaluated, state.params, sizes.context, args.sample, args.seed)
    if not is_first:
        return
    print(f"\nheld-out loss {loss:.4f} nats per byte after {args.steps} steps; a sample:\n\n{text}\n")
    log.plot(args.directory / "losses.png", args.against)
    line = f"{count_parameters(state.params):,} parameters, {meter.tokens_a_second():,.0f} tokens/s"
    if args.peak_tflops is not None:
        # The arithmetic of the model: what --remat computes a second time does not count.
        plain_model = make_model(sizes, args.dropout, remat=False)
        plain_step = make_train_step(plain_model, tx, args.reduction_order)
        flops = flops_of_a_step(plain_step, state, batch_of(0), mesh=mesh)
        share = mfu(flops, meter.seconds_a_step(), args.peak_tflops * 1e12)
        line += f", MFU {share:.2%} ({flops:.4g} FLOPs of a rank in a step)"
    print(line)


def make_model(sizes: Preset, dropout: float, remat: bool) -> fs.Model:
    module = GPT(sizes.width, sizes.layers, sizes.heads, sizes.context, dropout, remat)
    return fs.functionalize(module, units=Block)


def make_strategy(mesh: DeviceMesh, precision: str) -> fs.ShardTransform:
    if precision == "float32":
        return fs.zero3(mesh)
    return fs.zero3(mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def make_optimizer(args: argparse.Namespace) -> fs.GradientTransformation:
    adamw = fs.from_torch(
        torch.optim.AdamW,
        reduction_order=args.reduction_order,
        lr=schedule(args),
        betas=(0.9, 0.95),
        weight_decay=0.1,
        # Fused kernels round an element by where it stands in its shard.
        fused=args.reduction_order is None,
    )
    return fs.chain(clip_and_keep_norm(1.0, args.reduction_order), adamw)


def clip_and_keep_norm(max_norm: float, reduction_order: str | None) -> fs.GradientTransformation:
    """`fs.clip_by_global_norm`, whose state is the norm before clipping."""

    def init(params: Any) -> torch.Tensor:
        return torch.zeros(())

    def update(grads: Any, _: Any, params: Any) -> tuple[Any, torch.Tensor]:
        norm = fs.global_norm(grads, reduction_order=reduction_order)
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        clipped = fs.tree_map(lambda grad: grad * scale.to(grad.dtype), grads)
        return clipped, norm

    return fs.GradientTransformation(init, update)


def make_train_step(model: fs.Model, tx: fs.GradientTransformation, reduction_order: str | None) -> TrainStep:
    def train_step(state: fs.TrainState, microbatches: list[Microbatch]) -> tuple[fs.TrainState, torch.Tensor]:
        # Other masks in each step and in each microbatch of the job, all drawn from one key.
        key = fs.fold_in(state.key, state.step)

        def loss_fn(params: Any, microbatch: Microbatch) -> torch.Tensor:
            index, (x, y) = microbatch
            logits = model.apply(params, x, key=fs.fold_in(key, index))
            return cross_entropy(logits, y)

        value_and_grad = fs.accumulate(loss_fn, reduction_order=reduction_order)
        loss, grads = value_and_grad(state.params, microbatches)
        return fs.update(tx, state, grads), loss

    return train_step


@torch.no_grad()
def held_out_loss(model: fs.Model, params: Any, text: torch.Tensor, context: int) -> float:
    """The mean loss of windows that are spread evenly over a text; every rank takes part, as in `sample`."""
    # The first windows of a text would all be of one file.
    last = (len(text) - 1) // context - 1
    ids = torch.linspace(0, last, EVALUATED).long()
    losses = []
    for part in ids.split(AT_ONCE):
        x, y = windows(text, part, context)
        losses.append(cross_entropy(model.apply(params, x), y))
    return torch.stack(losses).mean().item()


def windows(text: torch.Tensor, ids: torch.Tensor, context: int) -> Batch:
    """The samples of some numbers, which are consecutive parts of a text, and the bytes that follow each."""
    samples = [text[i * context : (i + 1) * context + 1] for i in ids.tolist()]
    rows = torch.stack(samples).long()
    return rows[:, :-1], rows[:, 1:]  # each (size, context)


def cross_entropy(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), y.flatten())


def schedule(args: argparse.Namespace) -> Callable[[Any], torch.Tensor]:
    """Linear warm-up over 5% of the steps, then a cosine down to a tenth; of tensors, so that it can be jitted."""
    warm_up = max(1, args.steps // 20)

    def rate(count: Any) -> torch.Tensor:
        count = torch.as_tensor(count, dtype=torch.float64)
        progress = ((count - warm_up) / max(1, args.steps - warm_up)).clamp(0, 1)
        falling = 0.55 + 0.45 * torch.cos(math.pi * progress)
        return args.lr * torch.minimum((count + 1) / warm_up, falling)

    return rate


@torch.no_grad()
def sample(model: fs.Model, params: Any, context: int, length: int, seed: int) -> str:
    """Let the model write, one byte after another; every rank takes part, because each holds a part of the weights."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.tensor([list(b"def ")])  # (1, time)
    for _ in range(length):
        logits = model.apply(params, text[:, -context:])[0, -1]  # (256,)
        probabilities = torch.softmax(logits / 0.8, dim=-1)
        chosen = torch.multinomial(probabilities, 1, generator=generator)
        text = torch.cat([text, chosen[None]], dim=1)
    return bytes(text[0].tolist()).decode(errors="replace")


class Log:
    """Losses by step, in a file that outlives the process, and a progress bar."""

    def __init__(self, path: Path, is_written: bool, ranks: int, begin: int) -> None:
        """Keep lines of steps before the first: a killed run may have written lines of steps after its checkpoint."""
        self.path = path
        self.is_written = is_written
        self.ranks = ranks
        self.begin = begin
        # Of the last step.
        self.loss = math.nan
        self.norm = math.nan
        if not is_written:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if path.exists():
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n") and int(line.split()[0]) < begin:
                    kept.append(line)
        path.write_text("".join(kept))

    def steps(self, count: int, meter: Meter) -> Iterator[int]:
        """The steps that are left, behind a bar that shows loss, norm, tokens a second and the time left."""
        steps = range(self.begin, count)
        bar = progress(steps, "training", shown=self.is_written, total=count, first=self.begin)
        for step in bar:
            yield step
            rate = meter.tokens_a_second()
            bar.set_postfix_str(f"loss {self.loss:.3f}, norm {self.norm:.3f}, {rate:,.0f} tokens/s", refresh=False)

    def add(self, step: int, loss: float, norm: float) -> None:
        self.loss = loss
        self.norm = norm
        if self.is_written:
            with self.path.open("a") as file:
                file.write(f"{step} {loss!r} {self.ranks}\n")

    def plot(self, path: Path, against: Path | None) -> None:
        """Draw the losses in a color for each number of ranks, and below how far they are from those of another run."""
        try:
            import matplotlib
        except ImportError:
            print(f"Losses: {self.path}; no plot without matplotlib ({EXAMPLES})")
            return
        matplotlib.use("Agg")
        from matplotlib import pyplot

        entries = read(self.path)
        panels = 2 if against else 1
        figure, column = pyplot.subplots(
            panels,
            figsize=(7, 2 + 2 * panels),
            sharex=True,
            squeeze=False,
            constrained_layout=True,
        )
        top = column[0, 0]
        if against:
            others = {entry.step: entry.loss for entry in read(against / self.path.name)}
            top.plot(others.keys(), others.values(), color="lightgrey", linewidth=4)
            plot_gaps(column[1, 0], entries, others, against)
        plot_losses(top, entries)
        column[-1, 0].set(xlabel="step")
        figure.savefig(path, dpi=120)
        print(f"Losses: {self.path}, plotted in {path}")


class Entry(NamedTuple):
    """A line of a log."""

    step: int
    loss: float
    ranks: int


def read(path: Path) -> list[Entry]:
    """The lines of a log."""
    entries = []
    for line in path.read_text().splitlines():
        step, loss, ranks = line.split()
        entries.append(Entry(int(step), float(loss), int(ranks)))
    return entries


def plot_losses(axes: Any, entries: list[Entry]) -> None:
    steps = [entry.step for entry in entries]
    for ranks in sorted({entry.ranks for entry in entries}):
        losses = [entry.loss if entry.ranks == ranks else math.nan for entry in entries]
        axes.plot(steps, losses, linewidth=1, label=f"{ranks} rank{'s' * (ranks > 1)}")
    axes.set(ylabel="loss (nats per byte)", title="Losses, including kills and restarts")
    axes.legend()


def plot_gaps(axes: Any, entries: list[Entry], others: dict[int, float], against: Path) -> None:
    gaps = {}
    for entry in entries:
        if entry.step in others:
            gaps[entry.step] = abs(entry.loss - others[entry.step])
    axes.plot(gaps.keys(), gaps.values(), linewidth=1)
    axes.set(ylabel=f"distance from {against}")
    differing = [step for step, gap in gaps.items() if gap]
    result = "are equal in every bit"
    if differing:
        result = f"differ in {len(differing)}, first in step {differing[0]}"
    print(f"Of {len(gaps)} losses that {against} also has, {result}")


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--stop-at", type=int, help="stop after this many steps, to continue in another run")
    parser.add_argument(
        "--reduction-order",
        choices=("tree",),
        help="sum in an order that does not depend on the number of ranks",
    )
    parser.add_argument(
        "--microbatches",
        type=int,
        help="microbatches of all ranks; by default one for each rank, or 8 with --reduction-order tree",
    )
    parser.add_argument(
        "--precision",
        choices=("float32", "bfloat16"),
        default="float32",
        help="dtype of gathered weights",
    )
    parser.add_argument("--remat", action="store_true", help="compute activations again in the backward")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, default=Path("runs/gpt"), help="checkpoints, losses and their plot")
    parser.add_argument("--against", type=Path, help="directory of another run, whose losses are plotted beside")
    parser.add_argument("--save-every", type=int, default=20, help="steps from one checkpoint to the next")
    parser.add_argument("--sample", type=int, default=200, help="bytes to write at the end")
    parser.add_argument("--threads", type=int, default=1, help="threads of each rank")
    parser.add_argument(
        "--peak-tflops",
        type=float,
        help="10^12 FLOPs a second that one rank's device can do; prints the MFU",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
