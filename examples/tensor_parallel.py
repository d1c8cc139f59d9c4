"""Combine tensor parallelism with ZeRO-3, so that every large leaf is split over two axes of the mesh.

Run on four ranks, on two, or on one without a launcher:

    torchrun --standalone --nproc_per_node 4 examples/tensor_parallel.py
    torchrun --standalone --nproc_per_node 2 examples/tensor_parallel.py
    python examples/tensor_parallel.py

Ranks along "tp" read the same rows of text and split the heads and the hidden width, as in Megatron-LM. Ranks along
"shard" read different rows and gather the blocks one by one. The program prints the bytes sent over each axis in a
step, and how far the result is from the same training in one process. Both use float64, where rounding cannot hide a
mistake.
"""

import argparse
import os
from typing import Any

import torch
import torch.nn.functional as F
from gpt import batch, standard_library

import fshard as fs

HEAD_WIDTH = 16
# Matrices that are split by outputs, with their biases, and those that are split by inputs.
COLUMNS = ("*.q", "*.k", "*.v", "*.up.*")
ROWS = ("*.out", "*.down.weight")

SIZES = {
    "steps": 40,
    "width": 64,
    "layers": 2,
    "context": 64,
    "batch": 8,
    "seed": 0,
}


def initial(width: int, layers: int, context: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
        return 0.05 * numbers

    def affine(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "weight": weight,
            "bias": weight.new_zeros(len(weight)),
        }

    def norm() -> dict[str, torch.Tensor]:
        return affine(torch.ones(width, dtype=torch.float64))

    def block() -> Any:
        return {
            "attention": {
                "q": normal(width, width),
                "k": normal(width, width),
                "v": normal(width, width),
                "out": normal(width, width),
            },
            "up": affine(normal(4 * width, width)),
            "down": affine(normal(width, 4 * width)),
            "norm1": norm(),
            "norm2": norm(),
        }

    return {
        "embedding": {
            "tokens": normal(256, width),
            "positions": normal(context, width),
        },
        "blocks": [block() for _ in range(layers)],
        "head": normal(256, width),
    }


def layer_norm(p: Any, x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], p["weight"], p["bias"])


def attention(p: Any, x: torch.Tensor, tp: fs.Axis) -> torch.Tensor:
    """Map x (batch, time, width), the same on all ranks of "tp", to as much."""
    x = fs.pcast(x, tp, to="varying")  # Megatron's f: from here on each rank has heads of its own
    q = split_heads(F.linear(x, p["q"]))  # (batch, heads / tp, time, HEAD_WIDTH)
    k = split_heads(F.linear(x, p["k"]))
    v = split_heads(F.linear(x, p["v"]))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    joined = attended.transpose(1, 2).flatten(2)  # (batch, time, width / tp)
    part = F.linear(joined, p["out"])
    return fs.psum_invariant(part, tp)  # Megatron's g


def split_heads(x: torch.Tensor) -> torch.Tensor:
    heads = x.unflatten(-1, (-1, HEAD_WIDTH))  # (batch, time, heads / tp, HEAD_WIDTH)
    return heads.transpose(1, 2)


def mlp(p: Any, x: torch.Tensor, tp: fs.Axis) -> torch.Tensor:
    x = fs.pcast(x, tp, to="varying")
    up, down = p["up"], p["down"]
    hidden = F.linear(x, up["weight"], up["bias"])  # (batch, time, 4 width / tp)
    part = F.linear(F.gelu(hidden), down["weight"])
    # The bias is the same on all ranks of "tp", so it is added once, behind the sum.
    return fs.psum_invariant(part, tp) + down["bias"]


def loss_fn(
    params: Any,
    xy: tuple[torch.Tensor, torch.Tensor],
    tp: fs.Axis,
) -> torch.Tensor:
    x, y = xy
    time = x.shape[1]
    embedding = fs.gather(params["embedding"])
    h = embedding["tokens"][x] + embedding["positions"][:time]
    for block in params["blocks"]:
        p = fs.gather(block)  # over "shard" alone: a rank gets its own piece of the full matrices
        normed = layer_norm(p["norm1"], h)
        h = h + attention(p["attention"], normed, tp)
        normed = layer_norm(p["norm2"], h)
        h = h + mlp(p, normed, tp)
    head = fs.gather(params["head"])
    logits = F.linear(h, head)
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def train(
    params: Any,
    mine: slice,
    tp: fs.Axis,
    text: torch.Tensor,
    args: argparse.Namespace,
) -> tuple[list[float], Any]:
    """Losses and final parameters; `mine` is which sequences of a batch are this rank's."""
    clip = fs.clip_by_global_norm(1.0)
    tx = fs.chain(clip, fs.adamw(args.lr, weight_decay=0.1))
    value_and_grad = fs.value_and_grad(loss_fn)
    state = fs.TrainState.create(params, tx)
    losses = []
    for step in range(args.steps):
        x, y = batch(text, args.batch, args.context, seed=step)
        loss, grads = value_and_grad(state.params, (x[mine], y[mine]), tp)
        state = fs.update(tx, state, grads)
        losses.append(loss.item())
    return losses, state.params


def main() -> None:
    args = parse_args()
    mesh = fs.init_mesh({"shard": -1, "tp": args.tp}, device="cpu")
    shard = fs.axis_of(mesh, "shard")
    tp = fs.axis_of(mesh, "tp")
    by_inputs = fs.masked(fs.split_dim(tp, dim=1), ROWS)
    layout = fs.masked(fs.split_dim(tp, dim=0), COLUMNS, otherwise=by_inputs)
    strategy = fs.compose(fs.zero3(mesh), layout)
    full = initial(args.width, args.layers, args.context, args.seed)
    params = fs.shard(full, strategy)
    text, _ = standard_library()
    mine = slice(fs.comm.rank(shard), None, shard.size)
    with fs.comm.record() as record:
        losses, trained = train(params, mine, tp, text, args)
    trained = fs.unshard(trained)
    if mesh.get_rank() != 0:
        return
    everything = slice(None)
    one_rank = fs.Axis("tp", 1, "")
    expected_losses, expected = train(full, everything, one_rank, text, args)

    block = params["blocks"][0]
    print(block["attention"]["q"])
    print(block["attention"]["out"])
    print(block["up"]["bias"])
    print(block["norm1"]["bias"])
    report_bytes(record, args.steps)
    print(f"loss {losses[0]:.4f}, after {args.steps} steps {losses[-1]:.4f}")
    report_difference(losses, expected_losses, trained, expected)


def report_bytes(record: fs.comm.Record, steps: int) -> None:
    sent = []
    for axis in ("shard", "tp"):
        total = sum(entry.sent for entry in record if entry.axis == axis)
        megabytes = total / steps / 1e6
        sent.append(f"{megabytes:.2f} MB over {axis!r}")
    print("sent by each rank in a step:", ", ".join(sent))


def report_difference(
    losses: list[float],
    expected_losses: list[float],
    params: Any,
    expected: Any,
) -> None:
    loss_gaps = []
    for loss, expected_loss in zip(losses, expected_losses):
        loss_gaps.append(abs(loss - expected_loss))
    gaps = []
    for leaf, expected_leaf in zip(fs.tree_leaves(params), fs.tree_leaves(expected)):
        gap = (leaf - expected_leaf).abs().max()
        gaps.append(float(gap))
    print(f"largest difference from one process: {max(loss_gaps):.1e} in a loss, {max(gaps):.1e} in a parameter")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    parser.add_argument("--tp", type=int, default=min(2, ranks), help='size of the axis "tp"')
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=3e-3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
