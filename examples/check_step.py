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
        return loss, (logits.detach().argmax(-1) == y).float().mean()

    def train_step(state: fs.TrainState, x: torch.Tensor, y: torch.Tensor) -> tuple[fs.TrainState, Any]:
        (loss, accuracy), grads = fs.value_and_grad(loss_fn, has_aux=True)(state.params, x, y)
        if mistake != "metric":
            accuracy = fs.objective(accuracy, like=state.params)
        norm = fs.global_norm(state.params)
        if mistake == "gather":
            norm = fs.global_norm(fs.gather(state.params))
        return fs.update(tx, state, grads), {"loss": loss, "accuracy": accuracy, "norm": norm}

    return train_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"ranks": 8, "width": 64, "layers": 2, "heads": 2, "context": 32, "batch": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--break", choices=MISTAKES, dest="mistake", default="", help=f"{MISTAKES}")
    args, mesh = parser.parse_args(), fs.init_mesh({"shard": -1}, device="cpu")
    model = fs.functionalize(gpt.GPT(args.width, args.layers, args.heads, args.context), units=gpt.Block)
    tx = fs.from_torch(torch.optim.AdamW, lr=1e-3)
    state = fs.TrainState.create(model.init(fs.zero3(mesh), seed=0), tx)
    tokens = torch.zeros(args.batch, args.context, dtype=torch.int64)
    case, planned = (state, tokens, tokens), {"shard": args.ranks}
    if mesh.get_rank() != 0:
        return

    right = make_step(model, tx, mistake="")
    with tempfile.TemporaryDirectory() as directory:
        snapshot = Path(directory, "step.txt")
        report = fs.testing.assert_step(right, *case, mesh=planned, snapshot=snapshot, update=True)
        if not args.mistake:
            print(f"{report}\n\n{snapshot.name}:\n{snapshot.read_text()}")
            return
        print(f"{MISTAKES[args.mistake]}:\n")
        try:
            fs.testing.assert_step(make_step(model, tx, args.mistake), *case, mesh=planned, snapshot=snapshot)
        except AssertionError as error:
            print(error)


if __name__ == "__main__":
    main()
