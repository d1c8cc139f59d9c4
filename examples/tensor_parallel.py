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


def initial(width: int, layers: int, context: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * 0.05

    def affine(matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"weight": matrix, "bias": matrix.new_zeros(len(matrix))}

    def block() -> Any:
        return {
            "attention": {name: normal(width, width) for name in ("q", "k", "v", "out")},
            "up": affine(normal(4 * width, width)),
            "down": affine(normal(width, 4 * width)),
            "norm1": affine(torch.ones(width, dtype=torch.float64)),
            "norm2": affine(torch.ones(width, dtype=torch.float64)),
        }

    return {
        "embedding": {"tokens": normal(256, width), "positions": normal(context, width)},
        "blocks": [block() for _ in range(layers)],
        "head": normal(256, width),
    }


def layer_norm(p: Any, x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], p["weight"], p["bias"])


def attention(p: Any, x: torch.Tensor, tp: fs.Axis) -> torch.Tensor:  # (batch, time, width), the same on all of tp
    x = fs.pcast(x, tp, to="varying")  # Megatron's f: from here on each rank has heads of its own
    q = split_heads(F.linear(x, p["q"]))
    k = split_heads(F.linear(x, p["k"]))
    v = split_heads(F.linear(x, p["v"]))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    joined = attended.transpose(1, 2).flatten(2)  # (batch, time, width / tp)
    return fs.psum_invariant(F.linear(joined, p["out"]), tp)  # Megatron's g


def split_heads(x: torch.Tensor) -> torch.Tensor:  # (batch, time, width / tp) to (batch, heads / tp, time, HEAD_WIDTH)
    return x.unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2)


def mlp(p: Any, x: torch.Tensor, tp: fs.Axis) -> torch.Tensor:
    x = fs.pcast(x, tp, to="varying")
    hidden = F.gelu(F.linear(x, p["up"]["weight"], p["up"]["bias"]))  # (batch, time, 4 width / tp)
    return fs.psum_invariant(F.linear(hidden, p["down"]["weight"]), tp) + p["down"]["bias"]


def loss_fn(params: Any, xy: tuple[torch.Tensor, torch.Tensor], tp: fs.Axis) -> torch.Tensor:
    x, y = xy
    embedding = fs.gather(params["embedding"])
    h = embedding["tokens"][x] + embedding["positions"][: x.shape[1]]
    for block in params["blocks"]:
        p = fs.gather(block)  # over "shard" alone: a rank gets its own piece of the full matrices
        h = h + attention(p["attention"], layer_norm(p["norm1"], h), tp)
        h = h + mlp(p, layer_norm(p["norm2"], h), tp)
    logits = F.linear(h, fs.gather(params["head"]))
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def train(params: Any, mine: slice, tp: fs.Axis, text: torch.Tensor, args: argparse.Namespace) -> Any:
    """Losses and final parameters; `mine` is which sequences of a batch are this rank's."""
    tx = fs.chain(fs.clip_by_global_norm(1.0), fs.adamw(args.lr, weight_decay=0.1))
    state = fs.TrainState.create(params, tx)
    losses = []
    for step in range(args.steps):
        x, y = batch(text, args.batch, args.context, seed=step)
        loss, grads = fs.value_and_grad(loss_fn)(state.params, (x[mine], y[mine]), tp)
        state = fs.update(tx, state, grads)
        losses.append(loss.item())
    return losses, state.params


def main() -> None:
    args = parse_args()
    mesh = fs.init_mesh({"shard": -1, "tp": args.tp}, device="cpu")
    shard = fs.axis_of(mesh, "shard")
    tp = fs.axis_of(mesh, "tp")
    layout = fs.masked(fs.split_dim(tp, dim=1), ROWS)
    layout = fs.masked(fs.split_dim(tp, dim=0), COLUMNS, otherwise=layout)
    full = initial(args.width, args.layers, args.context, args.seed)
    params = fs.shard(full, fs.compose(fs.zero3(mesh), layout))
    text, _ = standard_library()
    mine = slice(fs.comm.rank(shard), None, shard.size)
    with fs.comm.record() as record:
        losses, trained = train(params, mine, tp, text, args)
    trained = fs.unshard(trained)
    if mesh.get_rank() != 0:
        return
    block = params["blocks"][0]
    print(block["attention"]["q"])
    print(block["attention"]["out"])
    print(block["up"]["bias"])
    print(block["norm1"]["bias"])
    expected_losses, expected = train(full, slice(None), fs.Axis("tp", 1, ""), text, args)
    sent = []
    for axis in ("shard", "tp"):
        megabytes = sum(entry.sent for entry in record if entry.axis == axis) / args.steps / 1e6
        sent.append(f"{megabytes:.2f} MB over {axis!r}")
    print("sent by each rank in a step:", ", ".join(sent))
    print(f"loss {losses[0]:.4f}, after {args.steps} steps {losses[-1]:.4f}")
    loss_gap = max(abs(loss - alone) for loss, alone in zip(losses, expected_losses))
    pairs = zip(fs.tree_leaves(trained), fs.tree_leaves(expected))
    gap = max(float((leaf - alone).abs().max()) for leaf, alone in pairs)
    print(f"largest difference from one process: {loss_gap:.1e} in a loss, {gap:.1e} in a parameter")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    parser.add_argument("--tp", type=int, default=min(2, ranks), help='size of the axis "tp"')
    for name, value in {"steps": 40, "width": 64, "layers": 2, "context": 64, "batch": 8, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=3e-3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
