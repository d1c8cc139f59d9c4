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

DEFAULTS = {
    "steps": 500,
    "tasks": 25,
    "points": 10,
    "inner": 1,
    "rate": 3e-3,
    "inner-rate": 0.02,
    "plot": Path("maml.png"),
}


class Points(NamedTuple):
    x: torch.Tensor  # (tasks, points, 1)
    y: torch.Tensor


# The sum of the squared errors at some points, and the number of points, for reduce="weighted".
Weighted = tuple[torch.Tensor, torch.Tensor]


def sinusoids(tasks: int, points: int, seed: int) -> tuple[Points, Points]:
    """Points to adapt to and others to be judged by, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(tasks, 2 * points + 2, 1, dtype=torch.float64, generator=generator)
    height = 0.1 + 4.9 * uniform[:, :1]
    shift = math.pi * uniform[:, 1:2]
    x = 10 * uniform[:, 2:] - 5
    y = height * torch.sin(x - shift)
    support = Points(x[:, :points], y[:, :points])
    query = Points(x[:, points:], y[:, points:])
    return support, query


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
        outputs = functional_call(module, params, (points.x,))
        return (outputs - points.y).square().mean()

    def descend(params: Any, points: Points) -> Any:
        loss = error(params, points)
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        stepped = {}
        for (name, weight), slope in zip(params.items(), grads):
            stepped[name] = weight - args.inner_rate * slope
        return stepped

    first = {}
    for name, leaf in full.items():
        first[name] = leaf.clone().requires_grad_()
    losses = []
    for task in range(len(support.x)):
        params = first
        for _ in range(args.inner):
            params = descend(params, select(support, task))
        losses.append(error(params, select(query, task)))
    loss = torch.stack(losses).mean()
    grads = torch.autograd.grad(loss, list(first.values()))
    return dict(zip(first, grads))


class Learner:
    """What inner and outer steps do with a model's parameters, at the points that this rank has."""

    def __init__(self, model: fs.Model, inner_rate: float) -> None:
        self.model = model
        self.inner_rate = inner_rate

    def error(self, params: Any, points: Points) -> Weighted:
        outputs = self.model.apply(params, points.x)
        squares = (outputs - points.y).square()
        return squares.sum(), torch.tensor(len(points.x))

    def adapt(self, params: Any, points: Points, steps: int) -> Any:
        """Take gradient steps on the points of one task."""
        value_and_grad = fs.value_and_grad(self.error, reduce="weighted")

        def descend(weight: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
            return weight - self.inner_rate * slope

        for _ in range(steps):
            _, grads = value_and_grad(params, points)
            params = fs.tree_map(descend, params, grads)
        return params

    def meta_loss(self, params: Any, support: Points, query: Points, steps: int) -> Weighted:
        """The error over all tasks, each after steps on its own points."""

        def error_of_task(support: Points, query: Points) -> Weighted:
            adapted = self.adapt(params, support, steps)
            return self.error(adapted, query)

        errors, counts = vmap(error_of_task)(support, query)
        return errors.sum(), counts.sum()


def main() -> None:
    args = parse_args()
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    rank = mesh.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(1, 40),
        nn.Tanh(),
        nn.Linear(40, 40),
        nn.Tanh(),
        nn.Linear(40, 1),
    )
    model = fs.functionalize(module.double(), units=nn.Linear)
    learner = Learner(model, args.inner_rate)
    tx = fs.adam(args.rate)
    value_and_grad = fs.value_and_grad(learner.meta_loss, reduce="weighted")

    @fs.jit(donate_argnums=0, static_argnums=3)
    def train_step(
        state: fs.TrainState,
        support: Points,
        query: Points,
        steps: int,
    ) -> fs.TrainState:
        _, grads = value_and_grad(state.params, support, query, steps)
        return fs.update(tx, state, grads)

    def draw_mine(tasks: int, seed: int) -> list[Points]:
        """This rank's points of some tasks."""
        rows = slice(rank, None, mesh.size())
        mine = []
        for points in sinusoids(tasks, args.points, seed):
            mine.append(select(points, (slice(None), rows)))
        return mine

    def train(name: str, steps: int) -> Any:
        """Learn weights from which so many steps fit a sinusoid."""
        params = model.init(fs.zero3(mesh))
        state = fs.TrainState.create(params, tx)
        for seed in progress(range(args.steps), name, shown=rank == 0):
            support, query = draw_mine(args.tasks, seed)
            state = train_step(state, support, query, steps)
        return state.params

    new_seed = 10**6
    my_support, my_query = draw_mine(100, new_seed)
    shown = select(my_support, SHOWN)
    grid = torch.linspace(-5, 5, 101, dtype=torch.float64)[:, None]
    lines = []
    curves: dict[str, list[torch.Tensor]] = {}
    for name, inner in {"without inner steps": 0, "MAML": args.inner}.items():
        params = train(name, inner)
        curves[name] = []
        line = f"{name:<20}"
        for steps in AFTER:
            error = learner.meta_loss(params, my_support, my_query, steps)
            loss = fs.objective(error, like=params, reduce="weighted")
            line += f"{loss.item():>8.3f}"
            adapted = learner.adapt(params, shown, steps)
            curves[name].append(model.apply(adapted, grid).detach())
        lines.append(line)
    _, grads = value_and_grad(params, my_support, my_query, args.inner)
    grads, full = fs.unshard((grads, params))
    if rank != 0:
        return
    print("squared error on 100 new sinusoids after 0, 1 and 5 gradient steps:", *lines, sep="\n")
    support, query = sinusoids(100, args.points, new_seed)
    expected = plain_gradient(module, full, support, query, args)
    print(
        f"largest difference of the gradient from one process: {largest_difference(grads, expected):.1e} "
        "of a leaf's largest element"
    )
    plot(args.plot, curves, grid, [select(support, SHOWN), select(query, SHOWN)])


def largest_difference(grads: dict[str, Any], expected: dict[str, Any]) -> float:
    """Of two gradients, as a part of the largest element of a leaf."""
    largest = 0.0
    for name, leaf in expected.items():
        gap = (grads[name] - leaf).abs().max() / leaf.abs().max()
        largest = max(largest, float(gap))
    return largest


def plot(
    path: Path,
    curves: dict[str, list[torch.Tensor]],
    grid: torch.Tensor,
    points: list[Points],
) -> None:
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    support, query = points
    for panel, (name, fits) in zip(panels, curves.items()):
        fitted = torch.cat(fits, 1)
        panel.plot(grid, fitted, "-", *support, "k.", *query, "k+")
        panel.set(title=name, xlabel="x", ylabel="y")
    labels = []
    for steps in AFTER:
        plural = "" if steps == 1 else "s"
        labels.append(f"after {steps} step{plural}")
    labels += ["points to adapt to", "other points"]
    figure.suptitle("Fits of a sinusoid that was never seen, after gradient steps on some of its points")
    figure.legend(
        panels[0].lines,
        labels,
        loc="outside lower center",
        ncols=5,
        frameon=False,
    )
    figure.savefig(path, dpi=120)
    print(f"Fits: {path}")


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
