"""Train a byte-level GPT on the Python standard library's sources, and hold every step against torch DDP.

Run on two ranks, or on one without a launcher:

    torchrun --standalone --nproc_per_node 2 examples/ddp_parity.py --strategy zero2
    python examples/ddp_parity.py --steps 100

It prints what each rank stores and sends next to DDP, a sample of what the model writes, and how far the run is from
torch DDP's on the same batches; the curves go to a PNG.
"""

import argparse
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPT, batch, standard_library
from tqdm import tqdm

import fshard as fs

STRATEGIES = {"ddp": fs.ddp, "zero1": fs.zero1, "zero2": fs.zero2}
ADAMW = {"betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
MAX_NORM = 1.0


class Bytes(NamedTuple):
    """Bytes that one rank stores."""

    parameters: int
    gradients: int
    optimizer: int


class Run(NamedTuple):
    """What a training run leaves: losses by step, final parameters, bytes stored and seconds taken."""

    losses: list[float]
    params: dict[str, torch.Tensor]
    stored: Bytes
    seconds: float


def main() -> None:
    args = parse_args()
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    rank, ranks = mesh.get_rank(), mesh.size()
    train_text, held_out = standard_library()
    torch.manual_seed(args.seed)
    module = GPT(args.width, args.layers, args.heads, args.context)

    def batches(text: torch.Tensor, first: int, count: int) -> Any:
        return (batch(text, args.batch, args.context, seed=(first + i) * ranks + rank) for i in range(count))

    def schedule(count: Any) -> float:
        """Linear warm-up over 5% of the steps, then a cosine down to a tenth."""
        warm_up = max(1, args.steps // 20)
        progress = max(0.0, (float(count) - warm_up) / max(1, args.steps - warm_up))
        return args.lr * min((float(count) + 1) / warm_up, 0.55 + 0.45 * math.cos(math.pi * min(1.0, progress)))

    model = fs.functionalize(module)
    tx = fs.chain(fs.clip_by_global_norm(MAX_NORM), fs.from_torch(torch.optim.AdamW, lr=schedule, **ADAMW))
    params = model.init(STRATEGIES[args.strategy](mesh))

    def loss_fn(params: Any, xy: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = xy
        return F.cross_entropy(model.apply(params, x).flatten(0, 1), y.flatten())

    def train_step(
        state: fs.TrainState, xy: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[fs.TrainState, torch.Tensor, Any]:
        loss, grads = fs.value_and_grad(loss_fn)(state.params, xy)
        return fs.update(tx, state, grads), loss, grads

    state = fs.TrainState.create(params, tx)
    losses: list[float] = []
    start = time.perf_counter()
    for step, xy in progress_bar(batches(train_text, 0, args.steps), args, f"fshard {args.strategy}", losses, ranks):
        if step == 0:
            with fs.comm.record() as record:
                state, loss, grads = train_step(state, xy)
        else:
            state, loss, grads = train_step(state, xy)
        losses.append(loss.item())
    seconds = time.perf_counter() - start
    stored = Bytes(*(tree_bytes(tree) for tree in (state.params, grads, state.opt_state)))
    ours = Run(losses, fs.unshard(state.params), stored, seconds)

    full = fs.gather(state.params)
    with torch.no_grad():
        evaluated = [loss_fn(full, xy) for xy in batches(held_out, 10**6, 20)]
        held_out_loss = fs.objective(torch.stack(evaluated).mean(), like=state.params).item()
        text = sample(model, full, args.context, args.sample, args.seed) if rank == 0 else ""
    theirs = train_ddp(module, batches(train_text, 0, args.steps), schedule, args, ranks)
    if rank == 0:
        print(f"\nA sample, {args.sample} bytes after {args.steps} steps:\n{indented(text)}\n")
        report(args, ranks, ours, theirs, held_out_loss, record, params)
        plot(args, ranks, ours, theirs)
        print(f"Curves and memory: {args.plot}")


def train_ddp(module: torch.nn.Module, batches: Any, schedule: Any, args: argparse.Namespace, ranks: int) -> Run:
    """The same steps by torch alone: DDP, its clipping and the stateful AdamW."""
    ddp = torch.nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1.0, **ADAMW)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    losses: list[float] = []
    start = time.perf_counter()
    for _, (x, y) in progress_bar(batches, args, "torch DDP", losses, ranks):
        optimizer.zero_grad()
        loss = F.cross_entropy(ddp(x).flatten(0, 1), y.flatten())
        loss.backward()
        # clip_grad_norm_ in two steps, with the norm in float64: in float32 it depends on how gradients are split.
        norm = torch.nn.utils.get_total_norm([parameter.grad.double() for parameter in module.parameters()])
        torch.nn.utils.clip_grads_with_norm_(module.parameters(), MAX_NORM, norm.float())
        optimizer.step()
        scheduler.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / ranks)
    seconds = time.perf_counter() - start
    state = [value for slots in optimizer.state.values() for value in slots.values()]
    grads = [parameter.grad for parameter in module.parameters()]
    stored = Bytes(*(tree_bytes(tree) for tree in (list(module.parameters()), grads, state)))
    return Run(losses, {name: p.detach() for name, p in module.named_parameters()}, stored, seconds)


def sample(model: fs.Model, full: Any, context: int, length: int, seed: int) -> str:
    """Let the model write, one byte after another."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.tensor([list(b"def ")])  # (1, time)
    for _ in range(length):
        logits = model.apply(full, text[:, -context:])[0, -1]  # (256,)
        chosen = torch.multinomial(torch.softmax(logits / 0.8, dim=-1), 1, generator=generator)
        text = torch.cat([text, chosen[None]], dim=1)
    return bytes(text[0].tolist()).decode(errors="replace")


def tree_bytes(tree: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in fs.tree_leaves(tree))


def indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def progress_bar(batches: Any, args: argparse.Namespace, name: str, losses: list[float], ranks: int) -> Any:
    """Enumerate batches behind a bar that shows loss, tokens per second and the time left."""
    tokens = args.batch * args.context * ranks
    bar = tqdm(batches, name, args.steps, disable=dist.get_rank() != 0, unit="step", mininterval=0.5)
    for step, xy in enumerate(bar):
        yield step, xy
        rate = bar.format_dict["rate"] or 0.0
        bar.set_postfix_str(f"loss {losses[-1]:.3f}, {tokens * rate:,.0f} tokens/s", refresh=False)


def report(
    args: argparse.Namespace, ranks: int, ours: Run, theirs: Run, held_out: float, record: Any, params: Any
) -> None:
    padded = sum(math.prod(leaf.spec.padded_shape) * leaf.local.element_size() for leaf in params.values())
    formula = 2 * padded * (ranks - 1) / ranks
    gap = max(abs(a - b) for a, b in zip(ours.losses, theirs.losses, strict=True))
    params_gap = max(float((ours.params[name] - p).abs().max()) for name, p in theirs.params.items())
    print(f"{'per rank, MB':<28}{'fshard ' + args.strategy:>14}{'torch DDP':>14}")
    for name, a, b in zip(Bytes._fields, ours.stored, theirs.stored, strict=True):
        print(f"  {name:<26}{a / 1e6:>14.2f}{b / 1e6:>14.2f}")
    print(f"  {'together':<26}{sum(ours.stored) / 1e6:>14.2f}{sum(theirs.stored) / 1e6:>14.2f}")
    print(f"  {'sent per step':<26}{record.bytes_sent() / 1e6:>14.2f}{formula / 1e6:>14.2f}  (formula: 2n(N-1)/N)")
    print(f"{'seconds':<28}{ours.seconds:>14.1f}{theirs.seconds:>14.1f}")
    print(f"{'last loss, nats per byte':<28}{ours.losses[-1]:>14.6f}{theirs.losses[-1]:>14.6f}")
    print(f"{'held-out loss':<28}{held_out:>14.4f}")
    print(f"largest difference from DDP: {gap:.3g} in a loss, {params_gap:.3g} in a parameter, over {args.steps} steps")


def plot(args: argparse.Namespace, ranks: int, ours: Run, theirs: Run) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, memory) = pyplot.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    curves.plot(theirs.losses, color="0.6", linewidth=3, label="torch DDP")
    curves.plot(ours.losses, linewidth=1, label=f"fshard {args.strategy}")
    curves.set(xlabel="step", ylabel="loss (nats per byte)", title="The same steps, by fshard and by torch DDP")
    curves.legend()
    for x, run in enumerate((theirs, ours)):
        bottom = 0.0
        for color, size, name in zip(("C0", "C1", "C2"), run.stored, Bytes._fields, strict=True):
            memory.bar(x, size / 1e6, bottom=bottom, color=color, width=0.6, label=name if x == 0 else None)
            bottom += size / 1e6
        memory.text(x, bottom, f"{bottom:.1f} MB", ha="center", va="bottom")
    memory.set_xticks([0, 1], ["torch DDP", f"fshard {args.strategy}"])
    memory.set(ylabel="MB stored by each rank", title=f"Memory per rank, {ranks} ranks")
    memory.margins(y=0.15)
    memory.legend()
    figure.savefig(args.plot, dpi=120)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=STRATEGIES, default="zero2")
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample", type=int, default=300, help="bytes to write at the end")
    parser.add_argument("--plot", type=Path, default=Path("ddp_parity.png"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
