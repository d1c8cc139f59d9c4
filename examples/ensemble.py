"""Train an ensemble of sharded models at once, and use the members' disagreement as uncertainty.

    torchrun --standalone --nproc_per_node 2 examples/ensemble.py
    python examples/ensemble.py --members 16

torch.func.vmap of a train step trains all members together. Each collective carries the weights of all members, so a
step has as many collectives as a step of one model. FSDP2 cannot do this, because torch.func.vmap does not see hooks.

The data are scikit-learn's digits, and no member sees a nine. The program prints how far the members are from models
that plain torch trains one by one, and how much they disagree. A PNG shows the digits on which they agree least and
most.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from installed import EXAMPLES, installed_by
from progress_bar import progress
from torch import nn
from torch.func import vmap

import fshard as fs

with installed_by(EXAMPLES):
    from matplotlib.figure import Figure
    from sklearn.datasets import load_digits

DEFAULTS = {
    "members": 8,
    "steps": 200,
    "batch": 64,
    "rate": 0.01,
    "plot": Path("ensemble.png"),
}

Batch = tuple[torch.Tensor, torch.Tensor]


def plain_torch(
    module: nn.Module,
    first: Any,
    batches: list[Batch],
    rate: float,
) -> dict[str, torch.Tensor]:
    """One member, trained alone."""
    module.load_state_dict(first)
    optimizer = torch.optim.Adam(module.parameters(), rate)
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(module(x), y)
        loss.backward()
        optimizer.step()
    return dict(module.named_parameters())


def disagreement(outputs: torch.Tensor) -> torch.Tensor:
    """The entropy of the members' mean less the mean of their entropies: zero where all say the same."""
    of_mean = torch.special.entr(outputs.mean(0)).sum(-1)
    of_members = torch.special.entr(outputs).sum(-1)
    return of_mean - of_members.mean(0)


def main() -> None:
    args = parse_args()
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    rank = mesh.get_rank()
    ranks = mesh.size()
    torch.set_num_threads(1)
    images, digits = load_digits(return_X_y=True)
    x = torch.from_numpy(images) / 16
    y = torch.from_numpy(digits)
    is_nine = y == 9
    is_held_out = torch.arange(len(y)) % 5 == 0
    trained_on = (~is_nine & ~is_held_out).nonzero()[:, 0]
    module = nn.Sequential(
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    model = fs.functionalize(module.double(), units=nn.Linear)
    tx = fs.adam(args.rate)
    strategy = fs.zero3(mesh)
    members = [model.init(strategy, seed=seed) for seed in range(args.members)]

    def draw_batch(step: int) -> Batch:
        """For each member digits of its own, the same on every rank: (members, batch, 64) and (members, batch)."""
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(len(trained_on), (args.members, args.batch), generator=generator)
        drawn = trained_on[rows]
        return x[drawn], y[drawn]

    def draw_mine(step: int) -> Batch:
        """This rank's part of each member's digits."""
        images, labels = draw_batch(step)
        return images[:, rank::ranks], labels[:, rank::ranks]

    def loss_fn(params: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum over this rank's digits and their number, for reduce="weighted"."""
        logits = model.apply(params, x)
        total = F.cross_entropy(logits, y, reduction="sum")
        return total, torch.tensor(len(y))

    def train_step(params: Any, opt_state: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        """Of one model."""
        value_and_grad = fs.value_and_grad(loss_fn, reduce="weighted")
        _, grads = value_and_grad(params, x, y)
        return tx.update(grads, opt_state, params)

    step_of_all = vmap(train_step)
    lines = []
    first_images, first_labels = draw_mine(0)
    for count in (1, args.members):
        params = stack_members(members[:count])
        opt_state = vmap(tx.init)(params)
        with fs.comm.record() as record:
            step_of_all(params, opt_state, first_images[:count], first_labels[:count])
        kilobytes = record.bytes_sent() / 1e3
        lines.append(f"a step of {count}: {len(record)} collectives, {kilobytes:.0f} kB sent by a rank")
    jitted = fs.jit(step_of_all)
    for step in progress(range(args.steps), "all at once", shown=rank == 0):
        images, labels = draw_mine(step)
        params, opt_state = jitted(params, opt_state, images, labels)
    outputs = vmap(model.apply, (0, None))(params, x)
    outputs = outputs.softmax(-1)  # (members, digits, 10)
    firsts = fs.unshard(members)
    lasts = vmap(fs.gather)(params)
    if rank != 0:
        return
    batches = [draw_batch(step) for step in range(args.steps)]
    gaps = []
    for member, first in enumerate(progress(firsts, "plain torch, one by one", shown=True, unit="model")):
        of_member = [(images[member], labels[member]) for images, labels in batches]
        alone = plain_torch(module, first, of_member, args.rate)
        for name, value in alone.items():
            gap = (lasts[name][member] - value).abs().max()
            gaps.append(gap.item())
    print(*lines, sep="\n")
    print(f"largest difference from models trained one by one in one process: {max(gaps):.1e} in a parameter")
    is_known = ~is_nine & is_held_out
    is_right = outputs.mean(0).argmax(-1) == y
    kinds = {
        "held out, right": is_known & is_right,
        "held out, wrong": is_known & ~is_right,
        "never seen, nines": is_nine,
    }
    plot(args.plot, x, outputs, kinds)


def stack_members(members: list[Any]) -> Any:
    """Put the leaves of all members into one tree, along a first dim."""

    def stack(*leaves: torch.Tensor) -> torch.Tensor:
        return torch.stack(leaves)

    return fs.tree_map(stack, *members)


def plot(
    path: Path,
    x: torch.Tensor,
    outputs: torch.Tensor,
    kinds: dict[str, torch.Tensor],
) -> None:
    amounts = disagreement(outputs)
    figure = Figure(figsize=(12, 4), layout="constrained")
    left, right = figure.subfigures(1, 2)
    axes = left.subplots()
    for name, kind in kinds.items():
        median = amounts[kind].median()
        print(f"{name}: {kind.sum():>3} digits, median disagreement {median:.4f} nats")
        axes.ecdf(amounts[kind].clamp(min=1e-6), label=name)
    axes.set(
        title="How much members disagree on a digit",
        xlabel="disagreement of probabilities, not votes (nats)",
        xscale="log",
        ylabel="share of digits with less",
    )
    axes.legend(frameon=False)
    upper, lower = right.subfigures(2, 1)
    draw_digits(upper, "Least", x, outputs, amounts.topk(6, largest=False))
    draw_digits(lower, "Most", x, outputs, amounts.topk(6))
    figure.savefig(path, dpi=120)
    print(f"Picture: {path}")


def draw_digits(
    figure: Any,
    name: str,
    x: torch.Tensor,
    outputs: torch.Tensor,
    chosen: Any,
) -> None:
    """Draw some digits, each below the two numbers that most members say it is."""
    nats, digits = chosen
    figure.suptitle(f"{name} disputed, {nats.min():.2g} to {nats.max():.2g} nats, and members' votes")
    without_axes = {"frame_on": False, "xticks": [], "yticks": []}
    panels = figure.subplots(1, len(digits), subplot_kw=without_axes)
    for digit, panel in zip(digits, panels):
        votes = outputs[:, digit].argmax(-1)
        panel.imshow(x[digit].view(8, 8), cmap="gray_r")
        panel.set_title(describe_votes(votes), fontsize=9)


def describe_votes(votes: torch.Tensor) -> str:
    counts, numbers = votes.bincount().sort(descending=True)
    lines = []
    for count, number in zip(counts[:2], numbers):
        if count:
            lines.append(f"{count} say {number}")
    return "\n".join(lines)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, value in DEFAULTS.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    return parser.parse_args()


if __name__ == "__main__":
    main()
