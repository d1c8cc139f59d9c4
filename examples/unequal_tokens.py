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
    adamw = fs.from_torch(torch.optim.AdamW, lr=args.lr)
    tx = fs.chain(fs.clip_by_global_norm(1.0), adamw)
    strategy = STRATEGIES[args.strategy](mesh)
    state = fs.TrainState.create(model.init(strategy), tx)

    def token_sum(params: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the losses of this microbatch's tokens and their number, for "weighted"."""
        x, y = batch
        logits = model.apply(params, x).flatten(0, 1)
        total = F.cross_entropy(logits, y.flatten(), ignore_index=IGNORED, reduction="sum")
        return total, tokens(batch)

    def token_mean(params: Any, batch: Batch) -> torch.Tensor:
        total, count = token_sum(params, batch)
        return total / count

    batches = deal(lines, ranks, args, step=0)
    everything = padded([line for row in batches for group in row for line in group])
    mine = [padded(group) for group in batches[rank]]
    expected = torch.func.grad(token_mean)(fs.gather(state.params), everything)
    _, means = fs.accumulate(token_mean, reduce="mean")(state.params, mine)
    _, weighted = fs.accumulate(token_sum, reduce="weighted")(state.params, mine)
    distance_of_means = distance(fs.unshard(means), expected)
    distance_of_weighted = distance(fs.unshard(weighted), expected)
    if rank == 0:
        print(f"distance from the gradient of the mean over all {int(tokens(everything))} tokens, relative to its norm")
        print(f"  mean of means {distance_of_means:.1e}")
        print(f"  weighted      {distance_of_weighted:.1e}\n")
        titles = [f"tokens of rank {number}" for number in range(ranks)]
        print("step  " + "  ".join(f"{title:>16}" for title in titles) + "    loss")

    for step in range(args.steps):
        batches = deal(lines, ranks, args, step)
        mine = [padded(group) for group in batches[rank]]
        loss, grads = fs.accumulate(token_sum, reduce="weighted")(state.params, mine)
        state = fs.update(tx, state, grads, donate=True)
        if rank == 0:
            # Every rank deals the lines of all of them, and so knows their tokens.
            counts = [sum(int(tokens(padded(group))) for group in row) for row in batches]
            print(f"{step:>4}  " + "  ".join(f"{count:>16}" for count in counts) + f"  {loss.item():6.3f}")


def lines_of_library() -> list[bytes]:
    """The lines of the standard library that have two bytes, or more, between their spaces."""
    text, _ = standard_library()
    lines = [line.strip() for line in text.numpy().tobytes().splitlines()]
    return [line for line in lines if len(line) > 1]


def deal(lines: list[bytes], ranks: int, args: argparse.Namespace, step: int) -> list[list[list[bytes]]]:
    """Random lines, the same on every rank, sorted by length: for each rank its microbatches."""
    groups = ranks * args.microbatches
    generator = torch.Generator().manual_seed(args.seed + step)
    chosen = torch.randint(len(lines), (groups * args.lines,), generator=generator).tolist()
    drawn = sorted((lines[i] for i in chosen), key=len)
    microbatches = [drawn[start : start + args.lines] for start in range(0, len(drawn), args.lines)]
    return [microbatches[start : start + args.microbatches] for start in range(0, groups, args.microbatches)]


def padded(lines: list[bytes]) -> Batch:
    """The bytes of lines and those that follow each, as two int64 tensors of shape (lines, longest line - 1)."""
    rows = [torch.tensor(list(line[: CONTEXT + 1])) for line in lines]
    x = pad_sequence([row[:-1] for row in rows], batch_first=True)
    y = pad_sequence([row[1:] for row in rows], batch_first=True, padding_value=IGNORED)
    return x, y


def tokens(batch: Batch) -> torch.Tensor:
    _, y = batch
    return (y != IGNORED).sum()


def distance(grads: Any, expected: Any) -> float:
    """The norm of a difference of two trees, as a part of the second one's."""
    gap = 0.0
    norm = 0.0
    for name, value in expected.items():
        gap += float((grads[name] - value).double().square().sum())
        norm += float(value.double().square().sum())
    return (gap / norm) ** 0.5


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
