"""Compute the largest eigenvalues of a loss's Hessian during sharded training, by Lanczos's method.

    torchrun --standalone --nproc_per_node 2 examples/hessian.py
    python examples/hessian.py --rate 0.5

Gradient descent on scikit-learn's digits keeps the largest eigenvalue at about 2 / rate (Cohen et al., 2021, "the edge
of stability"). A Hessian-vector product is a jvp of a gradient through sharded parameters, so no rank holds the Hessian
or a full vector. FSDP2 cannot do this: its hooks reduce gradients outside autograd, so it has no second derivatives. At
the end, plain torch computes the full Hessian in one process, and the program compares the eigenvalues.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from installed import EXAMPLES, installed_by
from progress_bar import progress
from torch import nn
from torch.func import functional_call, grad, jacrev, jvp

import fshard as fs

with installed_by(EXAMPLES):
    from matplotlib.figure import Figure
    from sklearn.datasets import load_digits

DEFAULTS = {
    "steps": 200,
    "every": 5,
    "images": 500,
    "rate": 1.0,
    "plot": Path("hessian.png"),
}

Params = dict[str, Any]


def inner_products(vectors: Sequence[Params], w: Params, axis: fs.Axis) -> torch.Tensor:
    """Multiply sharded trees with w: every element counts once, however many ranks hold it, and no padding does."""
    sums = []
    for v in vectors:
        total = torch.zeros((), dtype=torch.float64)
        for name in w:
            total += local_product(v[name], w[name], axis)
        sums.append(total)
    return fs.psum(torch.stack(sums), axis)


def local_product(a: fs.Sharded, b: fs.Sharded, axis: fs.Axis) -> torch.Tensor:
    """The part of an inner product that this rank adds."""
    rows_before = fs.comm.rank(axis) * a.spec.local_shape[0]
    # Of a leaf that every rank holds whole, this is 0 on all ranks but the first.
    rows = max(0, a.spec.shape[0] - rows_before)
    product = a.local[:rows] * b.local[:rows]
    return product.sum()


def lanczos(
    product: Callable[[Params], Params],
    v: Params,
    iterations: int,
    axis: fs.Axis,
) -> torch.Tensor:
    """Eigenvalues of a symmetric map on sharded trees, largest first; the outer ones are the first to converge."""
    basis: list[Params] = []
    matrix = torch.zeros(iterations, iterations, dtype=torch.float64)
    for i in range(iterations):
        (square,) = inner_products([v], v, axis)
        basis.append(divide(v, square.sqrt()))
        v = product(basis[-1])
        # Made orthogonal to all before, and twice, because else rounding finds large eigenvalues again and again.
        for _ in range(2):
            parts = inner_products(basis, v, axis)
            v = subtract_parts(v, basis, parts)
            matrix[i, : i + 1] += parts
    # eigvalsh reads the lower triangle alone, and returns the smallest first.
    return torch.linalg.eigvalsh(matrix).flip(0)


def divide(v: Params, norm: torch.Tensor) -> Params:
    return fs.tree_map(lambda leaf: leaf / norm, v)


def subtract_parts(v: Params, basis: Sequence[Params], parts: torch.Tensor) -> Params:
    """Subtract the parts of a tree that lie along those of a basis."""

    def subtract(leaf: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(leaf)
        for part, other in zip(parts, others):
            total += part * other
        return leaf - total

    return fs.tree_map(subtract, v, *basis)


def whole_spectrum(module: nn.Module, full: Params, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """All eigenvalues by plain torch."""
    sizes = [leaf.numel() for leaf in full.values()]

    def loss(flat: torch.Tensor) -> torch.Tensor:
        params = {}
        pieces = flat.split(sizes)
        for (name, leaf), piece in zip(full.items(), pieces):
            params[name] = piece.view(leaf.shape)
        outputs = functional_call(module, params, (x,))
        return (outputs - y).square().sum() / (2 * len(x))

    flat = nn.utils.parameters_to_vector(full.values())
    hessian = jacrev(grad(loss), chunk_size=128)(flat)
    return torch.linalg.eigvalsh(hessian).flip(0)


def load_data(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (count, 64) of mean 0, and what the model is to return for each: 1 for its digit, and 0 for others."""
    images, digits = load_digits(return_X_y=True)
    images = torch.from_numpy(images)[:count]
    digits = torch.from_numpy(digits)[:count]
    x = (images - images.mean(0)) / 16
    y = torch.eye(10, dtype=torch.float64)[digits]
    return x, y


def make_module() -> nn.Module:
    module = nn.Sequential(
        nn.Linear(64, 16),
        nn.Tanh(),
        nn.Linear(16, 10),
    )
    return module.double()


def draw_like(module: nn.Module) -> dict[str, torch.Tensor]:
    """A random tree: Lanczos's method starts from any."""
    drawn = {}
    for name, parameter in module.named_parameters():
        drawn[name] = torch.randn_like(parameter)
    return drawn


def main() -> None:
    args = parse_args()
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    axis = fs.axis_of(mesh)
    rank = mesh.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = make_module()
    x, y = load_data(args.images)
    my_x = x[rank :: axis.size]
    my_y = y[rank :: axis.size]
    model = fs.functionalize(module, units=nn.Linear)
    strategy = fs.zero3(mesh)
    params = model.init(strategy)

    start = fs.shard(draw_like(module), strategy)

    def loss(params: Params) -> torch.Tensor:
        error = (model.apply(params, my_x) - my_y).square().sum() / 2
        count = torch.tensor(len(my_x))
        return fs.objective((error, count), like=params, reduce="weighted")

    def product(v: Params) -> Params:
        """The Hessian times a vector."""
        _, derivative = jvp(grad(loss), (params,), (v,))
        return derivative

    def descend(weight: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        return weight - args.rate * slope

    edge = {}  # by step the three largest eigenvalues
    for step in progress(range(args.steps + 1), "gradient descent", shown=rank == 0):
        if step % args.every == 0:
            values = lanczos(product, start, 10, axis)
            edge[step] = values[:3].tolist()
        params = fs.tree_map(descend, params, grad(loss)(params))
    largest = lanczos(product, start, 60, axis)[:10]
    full = fs.unshard(params)
    if rank != 0:
        return
    exact = whole_spectrum(module, full, x, y)
    report(args, edge, largest, exact)
    plot(args, edge, largest, exact)


def report(
    args: argparse.Namespace,
    edge: dict[int, list[float]],
    largest: torch.Tensor,
    exact: torch.Tensor,
) -> None:
    stride = max(1, len(edge) // 6)
    for step in list(edge)[::stride]:
        values = [f"{value:.3f}" for value in edge[step]]
        print(f"step {step:>4}, largest eigenvalues:", *values)
    print(f"2 / rate: {2 / args.rate:.3f}")
    differences = (largest - exact[:10]).abs()
    gap = (differences.max() / exact[0]).item()
    print(f"largest difference of the ten largest of {len(exact)} from the whole Hessian's, in one process: {gap:.1e}")


def plot(
    args: argparse.Namespace,
    edge: dict[int, list[float]],
    largest: torch.Tensor,
    exact: torch.Tensor,
) -> None:
    figure = Figure(figsize=(10, 4), layout="constrained")
    curves, spectrum = figure.subplots(1, 2)
    curves.axhline(2 / args.rate, color="0.6", linestyle="--", label="2 / rate")
    curves.plot(list(edge), list(edge.values()), label=["largest", "second", "third"])
    curves.set(
        xlabel="step",
        ylabel="eigenvalue of the Hessian",
        ylim=(0, None),
        title="The edge of stability",
    )
    curves.legend(frameon=False)
    spectrum.plot(
        range(1, 41),
        exact[:40],
        "o",
        color="0.75",
        markersize=8,
        label="whole Hessian in one process",
    )
    spectrum.plot(
        range(1, len(largest) + 1),
        largest,
        ".",
        color="C3",
        label="Lanczos's method, sharded",
    )
    spectrum.set(
        xlabel="number",
        ylabel="eigenvalue after the last step",
        title=f"The largest of {len(exact)}",
    )
    spectrum.legend(frameon=False)
    figure.savefig(args.plot, dpi=120)
    print(f"Eigenvalues: {args.plot}")


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
