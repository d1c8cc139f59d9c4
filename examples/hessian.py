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


def dots(vectors: Sequence[Any], w: Any, axis: fs.Axis) -> torch.Tensor:
    """Inner products of sharded trees with w: every element once, however many ranks hold it, and no padding."""

    def part(a: fs.Sharded, b: fs.Sharded) -> torch.Tensor:
        before = fs.comm.rank(axis) * a.spec.local_shape[0]
        rows = max(0, a.spec.shape[0] - before)  # of a copy, those of rank 0
        return (a.local[:rows] * b.local[:rows]).sum()

    parts = [sum(part(v[name], w[name]) for name in w) for v in vectors]
    return fs.psum(torch.stack(parts), axis)


def lanczos(product: Callable[[Any], Any], v: Any, iterations: int, axis: fs.Axis) -> torch.Tensor:
    """Eigenvalues of a symmetric map on sharded trees, largest first; the outer ones are the first to converge."""
    basis = []
    matrix = torch.zeros(iterations, iterations, dtype=torch.float64)
    for i in range(iterations):
        norm = dots([v], v, axis)[0].sqrt()
        basis.append(divided(v, norm))
        v = product(basis[-1])
        # Made orthogonal to all before, and twice, because else rounding finds large eigenvalues again and again.
        for _ in range(2):
            parts = dots(basis, v, axis)
            v = without(v, basis, parts)
            matrix[i, : i + 1] += parts
    return torch.linalg.eigvalsh(matrix).flip(0)  # reads the lower triangle alone


def divided(v: Any, norm: torch.Tensor) -> Any:
    return fs.tree_map(lambda leaf: leaf / norm, v)


def without(v: Any, basis: Sequence[Any], parts: torch.Tensor) -> Any:
    """Subtract the parts of a tree that lie along those of a basis."""

    def subtract(leaf: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return leaf - sum(part * other for part, other in zip(parts, others))

    return fs.tree_map(subtract, v, *basis)


def whole_spectrum(module: nn.Module, full: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """All eigenvalues by plain torch."""
    sizes = [leaf.numel() for leaf in full.values()]

    def loss(flat: torch.Tensor) -> torch.Tensor:
        params = {}
        for (name, leaf), piece in zip(full.items(), flat.split(sizes)):
            params[name] = piece.view(leaf.shape)
        return (functional_call(module, params, (x,)) - y).square().sum() / (2 * len(x))

    hessian = jacrev(grad(loss), chunk_size=128)(nn.utils.parameters_to_vector(full.values()))
    return torch.linalg.eigvalsh(hessian).flip(0)


def main() -> None:
    args = parse_args()
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    axis = fs.axis_of(mesh)
    rank = mesh.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10)).double()
    images, digits = map(torch.from_numpy, load_digits(return_X_y=True))
    images = images[: args.images]
    x = (images - images.mean(0)) / 16
    y = torch.eye(10).double()[digits[: args.images]]
    mine = slice(rank, None, axis.size)
    model = fs.functionalize(module, units=nn.Linear)
    strategy = fs.zero3(mesh)
    params = model.init(strategy)
    start = fs.shard({name: torch.randn_like(value) for name, value in module.named_parameters()}, strategy)

    def loss(params: Any) -> torch.Tensor:
        error = (model.apply(params, x[mine]) - y[mine]).square().sum() / 2
        return fs.objective((error, torch.tensor(len(x[mine]))), like=params, reduce="weighted")

    def product(v: Any) -> Any:
        """The Hessian times a vector."""
        return jvp(grad(loss), (params,), (v,))[1]

    edge = {}  # by step the three largest eigenvalues
    for step in progress(range(args.steps + 1), "gradient descent", shown=rank == 0):
        if step % args.every == 0:
            edge[step] = lanczos(product, start, 10, axis)[:3].tolist()
        params = fs.tree_map(lambda weight, slope: weight - args.rate * slope, params, grad(loss)(params))
    largest = lanczos(product, start, 60, axis)[:10]
    full = fs.unshard(params)
    if rank != 0:
        return
    for step in list(edge)[:: max(1, len(edge) // 6)]:
        print(f"step {step:>4}, largest eigenvalues:", *(f"{value:.3f}" for value in edge[step]))
    print(f"2 / rate: {2 / args.rate:.3f}")
    exact = whole_spectrum(module, full, x, y)
    gap = ((largest - exact[:10]).abs().max() / exact[0]).item()
    print(f"largest difference of the ten largest of {len(exact)} from the whole Hessian's, in one process: {gap:.1e}")
    plot(args, edge, largest, exact)


def plot(args: argparse.Namespace, edge: dict[int, list[float]], largest: torch.Tensor, exact: torch.Tensor) -> None:
    figure = Figure(figsize=(10, 4), layout="constrained")
    curves, spectrum = figure.subplots(1, 2)
    curves.axhline(2 / args.rate, color="0.6", linestyle="--", label="2 / rate")
    curves.plot(list(edge), list(edge.values()), label=["largest", "second", "third"])
    curves.set(xlabel="step", ylabel="eigenvalue of the Hessian", ylim=(0, None), title="The edge of stability")
    curves.legend(frameon=False)
    spectrum.plot(range(1, 41), exact[:40], "o", color="0.75", markersize=8, label="whole Hessian in one process")
    spectrum.plot(range(1, len(largest) + 1), largest, ".", color="C3", label="Lanczos's method, sharded")
    spectrum.set(xlabel="number", ylabel="eigenvalue after the last step", title=f"The largest of {len(exact)}")
    spectrum.legend(frameon=False)
    figure.savefig(args.plot, dpi=120)
    print(f"Eigenvalues: {args.plot}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"steps": 200, "every": 5, "images": 500, "rate": 1.0, "plot": Path("hessian.png")}.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    return parser.parse_args()


if __name__ == "__main__":
    main()
