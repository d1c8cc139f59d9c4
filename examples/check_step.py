"""Check the train step of a small GPT for more ranks than this machine has, as a test in CI does.

    python examples/check_step.py --ranks 64
    python examples/check_step.py --break metric
    torchrun --standalone --nproc_per_node 2 examples/check_step.py --break gather

The step is traced on tensors without values, for a mesh of --ranks ranks. The first command prints the report of
fs.check, with what one rank holds and sends, and the snapshot that fs.testing.assert_step writes of a right step. The
others put a mistake into the step, and print how the test fails.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpt
import torch
import torch.nn.functional as F

import fshard as fs

MISTAKES = {
    "mean": "the loss is averaged over ranks by hand, and then a second time",
    "metric": "the accuracy is that of this rank's rows, and returned as if it were that of all ranks",
    "gather": "all parameters are gathered a second time, for a norm that shards are enough for",
}


def make_step(model: fs.Model, tx: fs.Optimizer, mistake: str) -> Callable[..., Any]:
    """The train step, right or with a mistake."""

    def loss_fn(params: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model.apply(params, x)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        if mistake == "mean":
            loss = fs.objective(loss, like=params)
        accuracy = (logits.detach().argmax(-1) == y).float().mean()
        return loss, accuracy

    def train_step(state: fs.TrainState, x: torch.Tensor, y: torch.Tensor) -> tuple[fs.TrainState, Any]:
        value_and_grad = fs.value_and_grad(loss_fn, has_aux=True)
        (loss, accuracy), grads = value_and_grad(state.params, x, y)
        if mistake != "metric":
            accuracy = fs.objective(accuracy, like=state.params)
        norm = fs.global_norm(state.params)
        if mistake == "gather":
            norm = fs.global_norm(fs.gather(state.params))
        metrics = {"loss": loss, "accuracy": accuracy, "norm": norm}
        return fs.update(tx, state, grads), metrics

    return train_step


def main() -> None:
    args = parse_args()
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    module = gpt.GPT(args.width, args.layers, args.heads, args.context)
    model = fs.functionalize(module, units=gpt.Block)
    tx = fs.from_torch(torch.optim.AdamW, lr=1e-3)
    state = fs.TrainState.create(model.init(fs.zero3(mesh), seed=0), tx)
    tokens = torch.zeros(args.batch, args.context, dtype=torch.int64)
    if mesh.get_rank() != 0:
        return

    with tempfile.TemporaryDirectory() as directory:
        snapshot = Path(directory, "step.txt")
        options = {"mesh": {"shard": args.ranks}, "snapshot": snapshot}
        right_step = make_step(model, tx, mistake="")
        report = fs.testing.assert_step(right_step, state, tokens, tokens, update=True, **options)
        if not args.mistake:
            print(f"{report}\n\n{snapshot.name}:\n{snapshot.read_text()}")
            return
        print(f"{MISTAKES[args.mistake]}:\n")
        wrong_step = make_step(model, tx, args.mistake)
        try:
            fs.testing.assert_step(wrong_step, state, tokens, tokens, **options)
        except AssertionError as error:
            print(error)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--context", type=int, default=32)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--break", choices=MISTAKES, dest="mistake", default="", help=f"{MISTAKES}")
    return parser.parse_args()


if __name__ == "__main__":
    main()
