"""Prove that a train step equals torch DDP's, or find the first step and leaf that differ.

    torchrun --standalone --nproc_per_node 2 examples/ddp_parity.py --strategy zero2
    torchrun --standalone --nproc_per_node 2 examples/ddp_parity.py --break frozen
    python examples/ddp_parity.py --steps 100

The first command trains a byte-level GPT on the sources of the Python standard library with fshard and with DDP. It
prints the bytes that each rank stores and sends, a sample of the model's text, and the largest difference between the
two runs. The difference is 0 on one and two ranks, where sums have the same order. The second command puts a mistake
into a correct step, and prints the reports of fs.testing on both steps. These comparisons use float64, where rounding
is small, a tolerance derived from the dtype and the steps, and plain SGD, because Adam and clipping cancel a wrong
factor of the gradients.
"""

import argparse
import math
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPT, batch, standard_library
from tqdm import tqdm
from train_gpt import sample

import fshard as fs

STRATEGIES = {"ddp": fs.ddp, "zero1": fs.zero1, "zero2": fs.zero2}
ADAMW = {"betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
MAX_NORM = 1.0
Batch = tuple[torch.Tensor, torch.Tensor]
MISTAKES = {
    "mean": "gradients are summed over ranks, where DDP takes the mean",
    "rate": "the learning rate is halved from the third update on",
    "psum": "the loss is averaged over ranks by hand, and then once more",
    "frozen": "one leaf is left out of the update",
}


class Bytes(NamedTuple):
    """Bytes that one rank stores."""

    parameters: int
    gradients: int
    optimizer: int


class Run(NamedTuple):
    """Results of a training run: losses by step, final parameters, bytes stored and seconds taken."""

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

    if args.mistake:
        for mistake in ("", args.mistake):
            check(mistake, args, mesh, module.double(), list(batches(train_text, 0, 4)))
        return

    def schedule(count: Any) -> float:
        """Linear warm-up over 5% of the steps, then a cosine down to a tenth."""
        warm_up = max(1, args.steps // 20)
        progress = max(0.0, (float(count) - warm_up) / max(1, args.steps - warm_up))
        return args.lr * min((float(count) + 1) / warm_up, 0.55 + 0.45 * math.cos(math.pi * min(1.0, progress)))

    model = fs.functionalize(module)
    tx = fs.chain(fs.clip_by_global_norm(MAX_NORM), fs.from_torch(torch.optim.AdamW, lr=schedule, **ADAMW))
    params = model.init(STRATEGIES[args.strategy](mesh))

    def loss_fn(params: Any, xy: Batch) -> torch.Tensor:
        return F.cross_entropy(model.apply(params, xy[0]).flatten(0, 1), xy[1].flatten())

    def train_step(state: fs.TrainState, xy: Batch) -> tuple[fs.TrainState, torch.Tensor, Any]:
        loss, grads = fs.value_and_grad(loss_fn)(state.params, xy)
        return fs.update(tx, state, grads), loss, grads

    state, record = fs.TrainState.create(params, tx), None
    losses: list[float] = []
    start = time.perf_counter()
    for xy in progress_bar(batches(train_text, 0, args.steps), args, f"fshard {args.strategy}", losses, ranks):
        with fs.comm.record() if record is None else nullcontext(record) as record:
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
        print(f"\nA sample, {args.sample} bytes after {args.steps} steps:\n{indent(text, '    ')}\n")
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
    for x, y in progress_bar(batches, args, "torch DDP", losses, ranks):
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
        return fs.psum_invariant(loss, axis) / axis.size if mistake == "psum" else loss

    def train_step(state: fs.TrainState, xy: Batch) -> tuple[fs.TrainState, torch.Tensor]:
        loss, grads = fs.value_and_grad(loss_fn, reduce="sum" if mistake == "mean" else "mean")(state.params, xy)
        return fs.update(tx, state, grads), loss

    tx = fs.from_torch(torch.optim.SGD, lr=lambda count: lr / 2 if mistake == "rate" and count >= 2 else lr)
    tx = fs.freeze(tx, "blocks.0.up.weight") if mistake == "frozen" else tx
    state = fs.TrainState.create(model.init(STRATEGIES[args.strategy](mesh)), tx)
    ddp = {"module": module, "loss_fn": local_loss, "optimizer": partial(torch.optim.SGD, lr=lr)}
    against_ddp = partial(fs.testing.assert_matches_ddp, train_step, state, batches, **ddp, rtol=0, atol=atol)
    said = [f"\n{MISTAKES.get(mistake, 'The step as it should be')}; rounding may move a parameter by {atol:.1e}:"]
    check_varying = partial(fs.testing.check_varying, loss_fn, state.params, batches[0])
    for name, tool in {"assert_matches_ddp": against_ddp, "check_varying": check_varying}.items():
        try:
            found = f"largest difference {match.params:.2g} in a parameter" if (match := tool()) else "nothing wrong"
            said.append(f"  {name}: {found}")
        except (AssertionError, ValueError) as error:
            # If fshard refuses a step, there is nothing to compare.
            said.append(f"  {name} finds the mistake{', as fshard refuses the step' * isinstance(error, ValueError)}:")
            lines = [f"    {line}" for line in str(error).splitlines()]
            said += [*lines[:4], f"      and {len(lines) - 5} more"] if len(lines) > 5 else lines
    if mesh.get_rank() == 0:
        print("\n".join(said))


def tree_bytes(tree: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in fs.tree_leaves(tree))


def progress_bar(batches: Any, args: argparse.Namespace, name: str, losses: list[float], ranks: int) -> Any:
    """Batches behind a bar that shows loss, tokens per second and the time left."""
    tokens = args.batch * args.context * ranks
    bar = tqdm(batches, name, args.steps, disable=dist.get_rank() != 0, unit="step", mininterval=0.5)
    for xy in bar:
        yield xy
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
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    curves, memory = figure.subplots(1, 2)
    curves.plot(theirs.losses, color="0.6", linewidth=3, label="torch DDP")
    curves.plot(ours.losses, linewidth=1, label=f"fshard {args.strategy}")
    curves.set(xlabel="step", ylabel="loss (nats per byte)", title="The same steps, by fshard and by torch DDP")
    curves.locator_params("x", integer=True)
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
    parser.add_argument("--break", choices=MISTAKES, dest="mistake", help="; ".join(map(": ".join, MISTAKES.items())))
    for name, value in {"steps": 700, "width": 128, "layers": 4, "heads": 4, "context": 128, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--sample", type=int, default=300, help="bytes to write at the end")
    parser.add_argument("--plot", type=Path, default=Path("ddp_parity.png"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
