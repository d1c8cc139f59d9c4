"""Meta-learn with MAML: find weights from which one or a few gradient steps fit an unseen sinusoid.

    torchrun --standalone --nproc_per_node 2 examples/maml.py
    python examples/maml.py --inner 2

The loss of a task is the error on some points of a sinusoid after gradient steps on other points (Finn et al., 2017).
Inner and outer gradients go through sharded parameters, and each rank holds a part of the points. torch.func.vmap runs
the inner steps of all tasks at once. FSDP2 cannot do this, because autograd ends at the hooks that reduce gradients.
"""

import argparse
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from installed import EXAMPLES, installed_by
from progress_bar import progress
from torch import nn
from torch.func import functional_call, vmap

import fshard as fs

with installed_by(EXAMPLES):
    from matplotlib.figure import Figure

# After so many gradient steps new sinusoids are fitted; the number of the one that is drawn.
AFTER = (0, 1, 5)
SHOWN = 5


class Points(NamedTuple):
    x: torch.Tensor  # (tasks, points, 1)
    y: torch.Tensor


def sinusoids(tasks: int, points: int, seed: int) -> tuple[Points, Points]:
    """Points to adapt to and others to be judged by, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(tasks, 2 * points + 2, 1, dtype=torch.float64, generator=generator)
    height = 0.1 + 4.9 * uniform[:, :1]
    shift = math.pi * uniform[:, 1:2]
    first, second = (10 * uniform[:, 2:] - 5).split(points, dim=1)
    support = Points(first, height * torch.sin(first - shift))
    return support, Points(second, height * torch.sin(second - shift))


def select(points: Points, index: Any) -> Points:
    return Points(points.x[index], points.y[index])


def plain_gradient(
    module: nn.Module,
    full: Any,
    support: Points,
    query: Points,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """The gradient after inner steps by plain torch, one task after another."""

    def error(params: Any, points: Points) -> torch.Tensor:
        return (functional_call(module, params, (points.x,)) - points.y).square().mean()

    first = {name: leaf.clone().requires_grad_() for name, leaf in full.items()}
    losses = []
    for task in range(len(support.x)):
        params = first
        for _ in range(args.inner):
            loss = error(params, select(support, task))
            grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
            stepped = [weight - args.inner_rate * slope for weight, slope in zip(params.values(), grads)]
            params = dict(zip(params, stepped))
        losses.append(error(params, select(query, task)))
    grads = torch.autograd.grad(torch.stack(losses).mean(), list(first.values()))
    return dict(zip(first, grads))


def main() -> None:
    args = parse_args()
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    rank = mesh.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1)).double()
    model = fs.functionalize(module, units=nn.Linear)
    tx = fs.adam(args.rate)

    def mine(batch: tuple[Points, Points]) -> list[Points]:
        return [select(points, (slice(None), slice(rank, None, mesh.size()))) for points in batch]

    def error(params: Any, points: Points) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum over this rank's points of a task and their number, for reduce="weighted"."""
        squares = (model.apply(params, points.x) - points.y).square()
        return squares.sum(), torch.tensor(len(points.x))

    def adapted(params: Any, points: Points, steps: int) -> Any:
        for _ in range(steps):
            _, grads = fs.value_and_grad(error, reduce="weighted")(params, points)
            params = fs.tree_map(lambda weight, slope: weight - args.inner_rate * slope, params, grads)
        return params

    def meta_loss(params: Any, support: Points, query: Points, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same over all tasks, each after steps on its own points."""

        def loss_of_task(support: Points, query: Points) -> tuple[torch.Tensor, torch.Tensor]:
            return error(adapted(params, support, steps), query)

        errors, counts = vmap(loss_of_task)(support, query)
        return errors.sum(), counts.sum()

    gradient = fs.value_and_grad(meta_loss, reduce="weighted")

    @fs.jit(donate_argnums=0, static_argnums=3)
    def train_step(state: fs.TrainState, support: Points, query: Points, steps: int) -> fs.TrainState:
        _, grads = gradient(state.params, support, query, steps)
        return fs.update(tx, state, grads)

    new = sinusoids(100, args.points, seed=10**6)
    grid = torch.linspace(-5, 5, 101, dtype=torch.float64)[:, None]
    lines = []
    curves = {}
    for name, inner in {"without inner steps": 0, "MAML": args.inner}.items():
        state = fs.TrainState.create(model.init(fs.zero3(mesh)), tx)
        for seed in progress(range(args.steps), name, shown=rank == 0):
            batch = mine(sinusoids(args.tasks, args.points, seed))
            state = train_step(state, *batch, inner)
        params = state.params
        shown = select(mine(new)[0], SHOWN)
        curves[name] = []
        line = f"{name:<20}"
        for steps in AFTER:
            loss = fs.objective(meta_loss(params, *mine(new), steps), like=params, reduce="weighted")
            line += f"{loss.item():>8.3f}"
            curves[name].append(model.apply(adapted(params, shown, steps), grid).detach())
        lines.append(line)
    _, grads = gradient(params, *mine(new), args.inner)
    grads, full = fs.unshard((grads, params))
    if rank != 0:
        return
    print("squared error on 100 new sinusoids after 0, 1 and 5 gradient steps:", *lines, sep="\n")
    gap = 0.0
    for name, expected in plain_gradient(module, full, *new, args).items():
        gap = max(gap, float((grads[name] - expected).abs().max() / expected.abs().max()))
    print(f"largest difference of the gradient from one process: {gap:.1e} of a leaf's largest element")
    plot(args.plot, curves, grid, [select(points, SHOWN) for points in new])


def plot(path: Path, curves: dict[str, Any], grid: torch.Tensor, points: list[Points]) -> None:
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    labels = [f"after {steps} step{'s' * (steps != 1)}" for steps in AFTER]
    labels += ["points to adapt to", "other points"]
    for panel, (name, fits) in zip(figure.subplots(1, 2, sharey=True), curves.items()):
        panel.plot(grid, torch.cat(fits, 1), "-", *points[0], "k.", *points[1], "k+")
        panel.set(title=name, xlabel="x", ylabel="y")
    figure.suptitle("Fits of a sinusoid that was never seen, after gradient steps on some of its points")
    figure.legend(panel.lines, labels, loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path, dpi=120)
    print(f"Fits: {path}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"steps": 500, "tasks": 25, "points": 10, "inner": 1, "rate": 3e-3, "inner-rate": 0.02}
    for name, value in {**sizes, "plot": Path("maml.png")}.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    return parser.parse_args()


if __name__ == "__main__":
    main()
