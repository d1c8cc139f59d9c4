"""Train on lines of very unequal lengths, with the gradient of the mean over all tokens.

Run on two ranks, or on one without a launcher:

    torchrun --standalone --nproc_per_node 2 examples/unequal_tokens.py --strategy zero3
    python examples/unequal_tokens.py --steps 20

The lines of Python's standard library are sorted by length, so that batches have little padding. Some microbatches then
hold ten times as many tokens as others. The program computes the gradient of the first batch in two ways: as the mean
of the means of ranks and microbatches, and with `reduce="weighted"`. It compares both with the gradient of the mean
over all tokens. The training uses `reduce="weighted"`.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from gpt import GPT, Block, standard_library
from torch.nn.utils.rnn import pad_sequence

import fshard as fs

STRATEGIES = {"ddp": fs.ddp, "zero1": fs.zero1, "zero2": fs.zero2, "zero3": fs.zero3}
IGNORED = -100  # a target that cross_entropy passes over
CONTEXT = 120  # bytes kept of a line

Batch = tuple[torch.Tensor, torch.Tensor]


def main() -> None:
    args = parse_args()
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    rank = mesh.get_rank()
    ranks = mesh.size()
    lines = lines_of_library()
    torch.manual_seed(args.seed)
    module = GPT(args.width, args.layers, heads=4, context=CONTEXT)
    model = fs.functionalize(module, units=Block)
    clip = fs.clip_by_global_norm(1.0)
    adamw = fs.from_torch(torch.optim.AdamW, lr=args.lr)
    tx = fs.chain(clip, adamw)
    strategy = STRATEGIES[args.strategy](mesh)
    params = model.init(strategy)
    state = fs.TrainState.create(params, tx)

    def token_sum(params: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the losses of this microbatch's tokens and their number, for "weighted"."""
        x, y = batch
        logits = model.apply(params, x)
        total = F.cross_entropy(
            logits.flatten(0, 1),
            y.flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )
        return total, tokens(batch)

    def token_mean(params: Any, batch: Batch) -> torch.Tensor:
        total, count = token_sum(params, batch)
        return total / count

    groups_of_ranks = deal(lines, ranks, args, step=0)
    all_lines = []
    for groups in groups_of_ranks:
        for group in groups:
            all_lines += group
    everything = padded(all_lines)
    full = fs.gather(params)
    expected = torch.func.grad(token_mean)(full, everything)

    mine = [padded(group) for group in groups_of_ranks[rank]]
    mean_of_means = fs.accumulate(token_mean, reduce="mean")
    weighted = fs.accumulate(token_sum, reduce="weighted")
    _, grads = mean_of_means(params, mine)
    distance_of_means = distance(fs.unshard(grads), expected)
    _, grads = weighted(params, mine)
    distance_of_weighted = distance(fs.unshard(grads), expected)
    if rank == 0:
        print(f"distance from the gradient of the mean over all {int(tokens(everything))} tokens, relative to its norm")
        print(f"  mean of means {distance_of_means:.1e}")
        print(f"  weighted      {distance_of_weighted:.1e}\n")
        print_row("step", [f"tokens of rank {number}" for number in range(ranks)], "  loss")

    for step in range(args.steps):
        groups_of_ranks = deal(lines, ranks, args, step)
        mine = [padded(group) for group in groups_of_ranks[rank]]
        loss, grads = weighted(state.params, mine)
        state = fs.update(tx, state, grads, donate=True)
        if rank == 0:
            # Every rank deals the lines of all of them, and so knows their tokens.
            counts = [count_tokens(groups) for groups in groups_of_ranks]
            print_row(f"{step:>4}", counts, f"{loss.item():6.3f}")


def print_row(first: str, cells: Sequence[object], last: str) -> None:
    columns = [f"{cell:>16}" for cell in cells]
    print(first, *columns, last, sep="  ")


def lines_of_library() -> list[bytes]:
    """The lines of the standard library that have two bytes, or more, between their spaces."""
    text, _ = standard_library()
    lines = []
    for line in text.numpy().tobytes().splitlines():
        stripped = line.strip()
        if len(stripped) > 1:
            lines.append(stripped)
    return lines


def deal(
    lines: list[bytes],
    ranks: int,
    args: argparse.Namespace,
    step: int,
) -> list[list[list[bytes]]]:
    """Random lines, the same on every rank, sorted by length: for each rank the lines of its microbatches."""
    count = ranks * args.microbatches * args.lines
    generator = torch.Generator().manual_seed(args.seed + step)
    chosen = torch.randint(len(lines), (count,), generator=generator)
    drawn = [lines[i] for i in chosen.tolist()]
    groups = cut(sorted(drawn, key=len), args.lines)
    return cut(groups, args.microbatches)


def cut(items: list[Any], size: int) -> list[list[Any]]:
    """Cut a list into lists of a size."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def padded(lines: list[bytes]) -> Batch:
    """The bytes of lines and those that follow each, as two int64 tensors of shape (lines, longest line - 1)."""
    inputs = []
    targets = []
    for line in lines:
        row = torch.tensor(list(line[: CONTEXT + 1]))
        inputs.append(row[:-1])
        targets.append(row[1:])
    x = pad_sequence(inputs, batch_first=True)
    y = pad_sequence(targets, batch_first=True, padding_value=IGNORED)
    return x, y


def tokens(batch: Batch) -> torch.Tensor:
    _, y = batch
    return (y != IGNORED).sum()


def count_tokens(groups: list[list[bytes]]) -> int:
    return sum(int(tokens(padded(group))) for group in groups)


def distance(grads: Any, expected: Any) -> float:
    """The norm of a difference of two trees, as a part of the second one's."""
    gap = 0.0
    norm = 0.0
    for name, value in expected.items():
        difference = (grads[name] - value).double()
        gap += float(difference.square().sum())
        norm += float(value.double().square().sum())
    return (gap / norm) ** 0.5


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--strategy", choices=STRATEGIES, default="zero3")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--microbatches", type=int, default=3, help="microbatches of each rank in a step")
    parser.add_argument("--lines", type=int, default=8, help="lines of each microbatch")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
