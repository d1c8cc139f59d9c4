"""Fit the train step of a small GPT into less memory, and read what a budget changes.

    torchrun --standalone --nproc_per_node 2 examples/fit.py
    python examples/fit.py --layers 8 --parts 0.3 --picture memory.svg

The program predicts the memory of a step, and sets budgets between what the arguments take and the peak of the step
without a budget. For each it prints the report: what is held at the peak, and what is computed or gathered again, block
by block. Then it trains under each budget, and all losses and parameters have the same bits.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpt
import torch
import torch.nn.functional as F
from progress_bar import progress

import fshard as fs

SIZES = {
    "width": 128,
    "layers": 4,
    "heads": 4,
    "context": 128,
    "batch": 8,
    "steps": 4,
}


def make_step(model: fs.Model, tx: fs.Optimizer) -> Callable[..., Any]:
    """The train step, as one writes it without a budget."""

    def loss_fn(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = model.apply(params, x)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    def train_step(state: fs.TrainState, x: torch.Tensor, y: torch.Tensor) -> tuple[fs.TrainState, torch.Tensor]:
        value_and_grad = fs.value_and_grad(loss_fn)
        loss, grads = value_and_grad(state.params, x, y)
        return fs.update(tx, state, grads), loss

    return train_step


def train(
    step: Any,
    state: fs.TrainState,
    text: torch.Tensor,
    args: argparse.Namespace,
    mesh: Any,
) -> list[Any]:
    """Train from a state that is donated, and return the losses and the last parameters."""
    losses = []
    rank = mesh.get_rank()
    for number in progress(range(args.steps), "training", shown=rank == 0):
        seed = number * mesh.size() + rank
        x, y = gpt.batch(text, args.batch, args.context, seed)
        state, loss = step(state, x, y)
        losses.append(loss)
    full = fs.unshard(state.params)
    return [*losses, *fs.tree_leaves(full)]


def main() -> None:
    args = parse_args()
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    is_first = mesh.get_rank() == 0
    torch.set_num_threads(1)
    module = gpt.GPT(args.width, args.layers, args.heads, args.context)
    model = fs.functionalize(module, units=gpt.Block)
    tx = fs.from_torch(torch.optim.AdamW, lr=1e-3, fused=True)
    params = model.init(fs.zero3(mesh), seed=0)
    state = fs.TrainState.create(params, tx)
    text, _ = gpt.standard_library()
    x, y = gpt.batch(text, args.batch, args.context, seed=0)

    train_step = make_step(model, tx)
    jitted = fs.jit(train_step, donate_argnums=0)
    whole = jitted.memory(state, x, y).before
    copy = fs.tree_map(torch.clone, state)
    expected = train(jitted, copy, text, args, mesh)
    for part in args.parts:
        budget = int(whole.arguments + part * (whole.peak - whole.arguments))
        fitted = fs.jit(train_step, donate_argnums=0, passes=(fs.fit(budget),))
        report = fitted.memory(state, x, y)
        copy = fs.tree_map(torch.clone, state)
        results = train(fitted, copy, text, args, mesh)
        is_equal = all(map(torch.equal, results, expected))
        bits = "equal" if is_equal else "other"
        if is_first:
            print(f"{report}\n  losses and parameters after {args.steps} steps: {bits} bits\n")
    if is_first and args.picture:
        report.draw(args.picture)
        print(f"Picture: {args.picture}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument(
        "--parts",
        type=float,
        nargs="+",
        default=[0.8, 0.6, 0.4],
        help="budgets, as parts of the peak beyond the arguments",
    )
    parser.add_argument("--picture", type=Path, help="where to draw the last budget, as an SVG")
    return parser.parse_args()


if __name__ == "__main__":
    main()
