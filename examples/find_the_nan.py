"""Find the operation that made a loss NaN, and train on with it mended.

    torchrun --standalone --nproc_per_node 2 examples/find_the_nan.py
    python examples/find_the_nan.py --steps 20

A small GPT learns sums, such as "12+7=19", from records of which one has lost its answer. The loss is the mean over the
digits of the answer, and so 0 / 0 for that record. Without a look at the data this shows as a NaN on every rank, in the
step that one rank reads the record in.

A step is a pure function: the state and the batch of the step that went wrong are still there. `fs.replay` runs the
step once more on them, operator by operator, and names the line, the rank and what the operator was given. Then the
program goes on from the same state with a loss that leaves out records without an answer.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from gpt import GPT, Block

import fshard as fs

BROKEN = 61  # the record that has lost its answer
LENGTH = 8  # bytes of a record with its padding

Batch = tuple[torch.Tensor, torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def main() -> None:
    args = parse_args()
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    rank = mesh.get_rank()
    ranks = mesh.size()
    torch.manual_seed(0)
    module = GPT(args.width, args.layers, heads=2, context=LENGTH)
    model = fs.functionalize(module, units=Block)
    clip = fs.clip_by_global_norm(1.0)
    tx = fs.chain(clip, fs.adamw(args.lr))
    params = model.init(fs.zero3(mesh))
    state = fs.TrainState.create(params, tx)

    def make_step(mean_of_records: Loss) -> Callable[[Any, Batch], Any]:
        def loss_fn(params: Any, batch: Batch) -> torch.Tensor:
            text, is_answer = batch
            logits = model.apply(params, text[:, :-1])
            losses = F.cross_entropy(logits.mT, text[:, 1:], reduction="none")
            return mean_of_records(losses, is_answer[:, 1:].float())

        def train_step(state: Any, batch: Batch) -> Any:
            loss, grads = fs.value_and_grad(loss_fn)(state.params, batch)
            return fs.update(tx, state, grads), loss

        return train_step

    def say(number: int, loss: torch.Tensor, more: str = "") -> None:
        if rank == 0:
            print(f"{number:>4}  {loss.item():.3f}{more}")

    train_step = make_step(mean_of_answers)
    for number in range(args.steps):
        first = args.records * (ranks * number + rank)
        batch = read_records(first, args.records)
        new_state, loss = train_step(state, batch)
        # Every rank has the same loss, so that all of them replay, or none.
        if loss.isnan():
            report = fs.replay(train_step, state, batch)
            say(number, loss, f"\n\n{report}\n")
            train_step = make_step(mean_of_answers_that_are_there)
            new_state, loss = train_step(state, batch)
        state = new_state
        say(number, loss)


def mean_of_answers(losses: torch.Tensor, is_answer: torch.Tensor) -> torch.Tensor:
    """The mean over records of the mean over the digits of an answer."""
    digits = is_answer.sum(-1)
    return ((losses * is_answer).sum(-1) / digits).mean()


def mean_of_answers_that_are_there(losses: torch.Tensor, is_answer: torch.Tensor) -> torch.Tensor:
    """The same, where a record without an answer counts as 0."""
    digits = is_answer.sum(-1).clamp(min=1)
    return ((losses * is_answer).sum(-1) / digits).mean()


def read_records(first: int, count: int) -> Batch:
    """Some records as bytes, and which of the bytes are digits of an answer."""
    rows = []
    for number in range(first, first + count):
        record = write_record(number).ljust(LENGTH)
        rows.append(list(record.encode()))
    text = torch.tensor(rows)
    is_equals_sign = text == ord("=")
    is_after = is_equals_sign.cumsum(-1) > 0
    is_digit = (text >= ord("0")) & (text <= ord("9"))
    return text, is_after & is_digit


def write_record(number: int) -> str:
    a = 7 * number % 50
    b = 11 * number % 50
    answer = "" if number == BROKEN else a + b
    return f"{a}+{b}={answer}"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--records", type=int, default=4, help="records of a rank in a step")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
