"""Train a byte-level GPT on the sources of the Python standard library: sharded, jitted, and safe to kill.

    torchrun --standalone --nproc_per_node 2 --max-restarts 3 examples/train_gpt.py --preset small
    python examples/train_gpt.py --preset tiny --steps 50

The program trains with ZeRO-3 in one jitted step that donates the old state, and accumulates gradients over
microbatches. Mixed precision (--precision bfloat16) and recomputed activations (--remat) are options. Checkpoints are
written while steps run. Kill any rank at any time: torchrun starts all ranks again, and the run continues from its
checkpoint with the next batches and dropout masks. Its losses equal those of an uninterrupted run bit for bit. The run
also continues on another number of ranks. At the end the model writes a sample.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from gpt import GPT, Block, batch, standard_library
from tqdm import tqdm

import fshard as fs

Batch = tuple[torch.Tensor, torch.Tensor]


class Preset(NamedTuple):
    """The sizes of a model, and of the batch of all ranks together."""

    width: int
    layers: int
    heads: int
    context: int
    batch: int


PRESETS = {
    "tiny": Preset(width=64, layers=2, heads=2, context=64, batch=12),
    "small": Preset(width=128, layers=4, heads=4, context=128, batch=24),
    "medium": Preset(width=384, layers=6, heads=6, context=256, batch=48),
    "gpt2": Preset(width=768, layers=12, heads=12, context=1024, batch=480),
}


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    sizes, share = PRESETS[args.preset], Share(mesh.get_rank(), mesh.size(), args.microbatches)
    if sizes.batch % (share.ranks * share.microbatches):
        raise SystemExit(
            f"{sizes.batch} sequences cannot be dealt out to {share.ranks} ranks x {share.microbatches} parts"
        )

    strategy = (
        fs.zero3(mesh)
        if args.precision == "float32"
        else fs.zero3(mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    )
    module = GPT(*sizes[:4], args.dropout, args.remat)
    model, evaluated = fs.functionalize(module.train(), units=Block), fs.functionalize(module.eval(), units=Block)
    adamw = fs.from_torch(torch.optim.AdamW, lr=schedule(args), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tx = fs.chain(fs.clip_by_global_norm(1.0), adamw)

    def train_step(state: fs.TrainState, microbatches: list[Batch]) -> tuple[fs.TrainState, torch.Tensor]:
        # Other masks in each step, on each rank and in each microbatch, all drawn from one key.
        key = fs.fold_in(fs.fold_in(state.key, state.step), fs.axis_of(mesh))

        def loss_fn(params: Any, microbatch: tuple[int, Batch]) -> torch.Tensor:
            number, (x, y) = microbatch
            return cross_entropy(model.apply(params, x, key=fs.fold_in(key, number)), y)

        loss, grads = fs.accumulate(loss_fn)(state.params, list(enumerate(microbatches)))
        return fs.update(tx, state, grads), loss

    jitted_step = fs.jit(train_step, donate_argnums=0)
    state = fs.TrainState.create(model.init(strategy, seed=args.seed), tx, key=torch.tensor(args.seed))
    train_text, held_out = standard_library()
    with fs.checkpoint.Manager(args.directory / "checkpoints", keep=3, every=args.save_every) as manager:
        if manager.latest() is not None:
            state = manager.restore(like=state)
        log = Log(args.directory / "losses.txt", share.rank == 0, first=int(state.step))
        for step in log.steps(min(args.steps, args.stop_at or args.steps), sizes.batch * sizes.context):
            state, loss = jitted_step(state, batches(train_text, sizes, share, step))
            log.add(step, loss.item())
            manager.save(state)

    x, y = batch(held_out, 8, sizes.context, seed=share.rank)
    loss = fs.objective(cross_entropy(evaluated.apply(state.params, x), y), like=state.params).item()
    text = sample(evaluated, state.params, sizes.context, args.sample, args.seed)
    if share.rank == 0:
        print(f"\nheld-out loss {loss:.4f} nats per byte after {args.steps} steps; a sample:\n\n{text}\n")
        log.plot(args.directory / "losses.png")


class Share(NamedTuple):
    """Which part of each batch is this rank's, and in how many microbatches it takes it."""

    rank: int
    ranks: int
    microbatches: int


def batches(text: torch.Tensor, sizes: Preset, share: Share, step: int) -> list[Batch]:
    """This rank's microbatches of a step: a sequence is known by its step and number, however many ranks there are."""
    each = sizes.batch // share.ranks
    first = step * sizes.batch + share.rank * each
    pairs = [batch(text, 1, sizes.context, seed=first + i) for i in range(each)]
    x, y = (torch.cat(tensors).chunk(share.microbatches) for tensors in zip(*pairs, strict=True))
    return list(zip(x, y, strict=True))


def cross_entropy(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), y.flatten())


def schedule(args: argparse.Namespace) -> Callable[[Any], torch.Tensor]:
    """Linear warm-up over 5% of the steps, then a cosine down to a tenth; of tensors, so that it can be jitted."""
    warm_up = max(1, args.steps // 20)

    def rate(count: Any) -> torch.Tensor:
        count = torch.as_tensor(count, dtype=torch.float64)
        progress = ((count - warm_up) / max(1, args.steps - warm_up)).clamp(0, 1)
        return args.lr * torch.minimum((count + 1) / warm_up, 0.55 + 0.45 * torch.cos(math.pi * progress))

    return rate


def sample(model: fs.Model, params: Any, context: int, length: int, seed: int) -> str:
    """Let the model write, one byte after another; every rank takes part, because each holds a part of the weights."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.tensor([list(b"def ")])  # (1, time)
    with torch.no_grad():
        for _ in range(length):
            logits = model.apply(params, text[:, -context:])[0, -1]  # (256,)
            chosen = torch.multinomial(torch.softmax(logits / 0.8, dim=-1), 1, generator=generator)
            text = torch.cat([text, chosen[None]], dim=1)
    return bytes(text[0].tolist()).decode(errors="replace")


class Log:
    """Losses by step, in a file that outlives the process, and a progress bar."""

    def __init__(self, path: Path, written: bool, first: int) -> None:
        """Keep lines of steps before the first: a killed run may have written lines of steps after its checkpoint."""
        self.path, self.written, self.first = path, written, first
        if written:
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = path.read_text().splitlines(keepends=True) if path.exists() else []
            path.write_text("".join(line for line in lines if line.endswith("\n") and int(line.split()[0]) < first))

    def steps(self, count: int, tokens: int) -> Iterator[int]:
        """The steps that are left, behind a bar that shows loss, tokens per second and the time left."""
        self.bar = tqdm(range(self.first, count), "training", count, initial=self.first, disable=not self.written)
        for step in self.bar:
            yield step
            rate = tokens * (self.bar.format_dict["rate"] or 0.0)
            self.bar.set_postfix_str(f"loss {self.last:.3f}, {rate:,.0f} tokens/s", refresh=False)

    def add(self, step: int, loss: float) -> None:
        self.last = loss
        if self.written:
            with self.path.open("a") as file:
                file.write(f"{step} {loss!r}\n")

    def plot(self, path: Path) -> None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        rows = [line.split() for line in self.path.read_text().splitlines()]
        figure, axes = pyplot.subplots(figsize=(7, 4), constrained_layout=True)
        axes.plot([int(step) for step, _ in rows], [float(loss) for _, loss in rows], linewidth=1)
        axes.set(xlabel="step", ylabel="loss (nats per byte)", title="Losses, kills and restarts included")
        figure.savefig(path, dpi=120)
        print(f"Losses: {self.path}, drawn in {path}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--stop-at", type=int, help="end after so many of the steps, to go on another time")
    parser.add_argument("--microbatches", type=int, default=1, help="parts that a rank's share of a batch is taken in")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32", help="of gathered weights")
    parser.add_argument("--remat", action="store_true", help="compute activations again in the backward")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, default=Path("runs/gpt"), help="checkpoints, losses and their plot")
    parser.add_argument("--save-every", type=int, default=20, help="steps from one checkpoint to the next")
    parser.add_argument("--sample", type=int, default=200, help="bytes to write at the end")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    return parser.parse_args()


if __name__ == "__main__":
    main()
