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

AFTER, SHOWN = (0, 1, 5), 5  # gradient steps, and which new sinusoid is drawn


class Points(NamedTuple):
    x: torch.Tensor  # (tasks, points, 1)
    y: torch.Tensor


def sinusoids(tasks: int, points: int, seed: int) -> list[Points]:
    """Points to adapt to and others to be judged by, the same on every rank."""
    uniform = torch.rand(tasks, 2 * points + 2, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    height, shift, x = 0.1 + 4.9 * uniform[:, :1], math.pi * uniform[:, 1:2], 10 * uniform[:, 2:] - 5
    return [Points(part, height * torch.sin(part - shift)) for part in x.split(points, dim=1)]


def plain_gradient(module: nn.Module, full: Any, batch: list[Points], args: argparse.Namespace) -> dict[str, Any]:
    """The gradient after inner steps by plain torch, one task after another."""
    first, losses = {name: leaf.clone().requires_grad_() for name, leaf in full.items()}, []
    for support, query in zip(zip(*batch[0]), zip(*batch[1])):
        params = first
        for _ in range(args.inner):
            loss = (functional_call(module, params, (support[0],)) - support[1]).square().mean()
            grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
            params = {name: w - args.inner_rate * g for (name, w), g in zip(params.items(), grads)}
        losses.append((functional_call(module, params, (query[0],)) - query[1]).square().mean())
    return dict(zip(first, torch.autograd.grad(torch.stack(losses).mean(), list(first.values()))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"steps": 500, "tasks": 25, "points": 10, "inner": 1, "rate": 3e-3, "inner-rate": 0.02}
    for name, value in {**sizes, "plot": Path("maml.png")}.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    args, mesh = parser.parse_args(), fs.init_mesh({"shard": -1}, device="cpu")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1)).double()
    model, tx = fs.functionalize(module, units=nn.Linear), fs.adam(args.rate)

    def mine(batch: list[Points]) -> list[Points]:
        return [Points(*(part[:, mesh.get_rank() :: mesh.size()] for part in points)) for points in batch]

    def error(params: Any, points: Points) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum over this rank's points of a task and their number, for reduce="weighted"."""
        return (model.apply(params, points.x) - points.y).square().sum(), torch.tensor(len(points.x))

    def adapted(params: Any, points: Points, steps: int) -> Any:
        for _ in range(steps):
            _, grads = fs.value_and_grad(error, reduce="weighted")(params, points)
            params = fs.tree_map(lambda w, g: w - args.inner_rate * g, params, grads)
        return params

    def meta_loss(params: Any, support: Points, query: Points, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same over all tasks, each after steps on its own points."""
        errors, counts = vmap(lambda s, q: error(adapted(params, s, steps), q))(support, query)
        return errors.sum(), counts.sum()

    gradient = fs.value_and_grad(meta_loss, reduce="weighted")

    @fs.jit(donate_argnums=0, static_argnums=3)
    def train_step(state: fs.TrainState, support: Points, query: Points, steps: int) -> fs.TrainState:
        return fs.update(tx, state, gradient(state.params, support, query, steps)[1])

    new, grid = sinusoids(100, args.points, seed=10**6), torch.linspace(-5, 5, 101, dtype=torch.float64)[:, None]
    rows, curves = [], {}
    for name, inner in {"without inner steps": 0, "MAML": args.inner}.items():
        state = fs.TrainState.create(model.init(fs.zero3(mesh)), tx)
        for seed in progress(range(args.steps), name, shown=mesh.get_rank() == 0):
            state = train_step(state, *mine(sinusoids(args.tasks, args.points, seed)), inner)
        params, first = state.params, Points(*(part[SHOWN] for part in mine(new)[0]))
        losses = [fs.objective(meta_loss(params, *mine(new), n), like=params, reduce="weighted") for n in AFTER]
        rows.append(f"{name:<20}" + "".join(f"{loss.item():>8.3f}" for loss in losses))
        curves[name] = [model.apply(adapted(params, first, n), grid).detach() for n in AFTER]
    grads, full = fs.unshard((gradient(params, *mine(new), args.inner)[1], params))
    if mesh.get_rank() == 0:
        print("squared error on 100 new sinusoids after 0, 1 and 5 gradient steps:", *rows, sep="\n")
        pairs = [(grads[name], value) for name, value in plain_gradient(module, full, new, args).items()]
        gap = max((found - value).abs().max() / value.abs().max() for found, value in pairs)
        print(f"largest difference of the gradient from one process: {gap:.1e} of a leaf's largest element")
        plot(args.plot, curves, grid, [Points(*(part[SHOWN] for part in points)) for points in new])


def plot(path: Path, curves: dict[str, Any], grid: torch.Tensor, points: list[Points]) -> None:
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    labels = [*(f"after {n} step{'s' * (n != 1)}" for n in AFTER), "points to adapt to", "other points"]
    for panel, (name, lines) in zip(figure.subplots(1, 2, sharey=True), curves.items()):
        panel.plot(grid, torch.cat(lines, 1), "-", *points[0], "k.", *points[1], "k+")
        panel.set(title=name, xlabel="x", ylabel="y")
    figure.suptitle("Fits of a sinusoid that was never seen, after gradient steps on some of its points")
    figure.legend(panel.lines, labels, loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path, dpi=120)
    print(f"Fits: {path}")


if __name__ == "__main__":
    main()
