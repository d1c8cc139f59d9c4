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

Batch = tuple[torch.Tensor, torch.Tensor]


def plain_torch(module: nn.Module, first: Any, batches: list[Batch], rate: float) -> dict[str, torch.Tensor]:
    """One member, trained alone."""
    module.load_state_dict(first)
    optimizer = torch.optim.Adam(module.parameters(), rate)
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
    return dict(module.named_parameters())


def disagreement(outputs: torch.Tensor) -> torch.Tensor:
    """The entropy of the members' mean less the mean of their entropies: zero where all say the same."""
    of_mean = torch.special.entr(outputs.mean(0)).sum(-1)
    return of_mean - torch.special.entr(outputs).sum(-1).mean(0)


def main() -> None:
    args = parse_args()
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    is_first = mesh.get_rank() == 0
    torch.set_num_threads(1)
    x, y = map(torch.from_numpy, load_digits(return_X_y=True))
    x = x / 16
    is_nine = y == 9
    is_held_out = torch.arange(len(y)) % 5 == 0
    trained_on = (~is_nine & ~is_held_out).nonzero()
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).double()
    model = fs.functionalize(module, units=nn.Linear)
    tx = fs.adam(args.rate)
    members = [model.init(fs.zero3(mesh), seed=seed) for seed in range(args.members)]

    def batch(step: int) -> Batch:
        """For each member digits of its own, the same on every rank: (members, batch, 64) and (members, batch)."""
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(len(trained_on), (args.members, args.batch), generator=generator)
        drawn = trained_on[rows, 0]
        return x[drawn], y[drawn]

    def mine(step: int) -> list[torch.Tensor]:
        return [part[:, mesh.get_rank() :: mesh.size()] for part in batch(step)]

    def loss_fn(params: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum over this rank's digits and their number, for reduce="weighted"."""
        return F.cross_entropy(model.apply(params, x), y, reduction="sum"), torch.tensor(len(y))

    def train_step(params: Any, opt_state: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        """Of one model."""
        _, grads = fs.value_and_grad(loss_fn, reduce="weighted")(params, x, y)
        return tx.update(grads, opt_state, params)

    step_of_all = vmap(train_step)
    lines = []
    for count in (1, args.members):
        params = fs.tree_map(lambda *leaves: torch.stack(leaves), *members[:count])
        opt_state = vmap(tx.init)(params)
        with fs.comm.record() as record:
            step_of_all(params, opt_state, *(part[:count] for part in mine(0)))
        kilobytes = record.bytes_sent() / 1e3
        lines.append(f"a step of {count}: {len(record)} collectives, {kilobytes:.0f} kB sent by a rank")
    jitted = fs.jit(step_of_all)
    for step in progress(range(args.steps), "all at once", shown=is_first):
        params, opt_state = jitted(params, opt_state, *mine(step))
    outputs = vmap(model.apply, (0, None))(params, x).softmax(-1)  # (members, digits, 10)
    firsts = fs.unshard(members)
    lasts = vmap(fs.gather)(params)
    if not is_first:
        return
    batches = [batch(step) for step in range(args.steps)]
    gaps = []
    for member, first in enumerate(progress(firsts, "plain torch, one by one", shown=True, unit="model")):
        of_member = [(x[member], y[member]) for x, y in batches]
        for name, value in plain_torch(module, first, of_member, args.rate).items():
            gaps.append((lasts[name][member] - value).abs().max().item())
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


def plot(path: Path, x: torch.Tensor, outputs: torch.Tensor, kinds: dict[str, torch.Tensor]) -> None:
    amounts = disagreement(outputs)
    figure = Figure(figsize=(12, 4), layout="constrained")
    left, right = figure.subfigures(1, 2)
    axes = left.subplots(subplot_kw={"title": "How much members disagree on a digit"})
    for name, kind in kinds.items():
        print(f"{name}: {kind.sum():>3} digits, median disagreement {amounts[kind].median():.4f} nats")
        axes.ecdf(amounts[kind].clamp(min=1e-6), label=name)
    axes.set(xlabel="disagreement of probabilities, not votes (nats)", xscale="log", ylabel="share of digits with less")
    axes.legend(frameon=False)
    for half, name in zip(right.subfigures(2, 1), ("Least", "Most")):
        nats, chosen = amounts.topk(6, largest=name == "Most")
        half.suptitle(f"{name} disputed, {nats.min():.2g} to {nats.max():.2g} nats, and members' votes")
        panels = half.subplots(1, 6, subplot_kw={"frame_on": False, "xticks": [], "yticks": []})
        for digit, panel in zip(chosen, panels):
            draw_votes(panel, x[digit], outputs[:, digit].argmax(-1))
    figure.savefig(path, dpi=120)
    print(f"Picture: {path}")


def draw_votes(panel: Any, image: torch.Tensor, votes: torch.Tensor) -> None:
    """Draw a digit below the two numbers that most members say it is."""
    counts, digits = votes.bincount().sort(descending=True)
    lines = [f"{count} say {digit}" for count, digit in zip(counts[:2], digits) if count]
    panel.imshow(image.view(8, 8), cmap="gray_r")
    panel.set_title("\n".join(lines), fontsize=9)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"members": 8, "steps": 200, "batch": 64, "rate": 0.01, "plot": Path("ensemble.png")}.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    return parser.parse_args()


if __name__ == "__main__":
    main()
