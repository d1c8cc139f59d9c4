"""Train a GPT on a mesh of four axes: ZeRO-3, long sequences, a pipeline and tensor parallelism in one loss function.

Run on four ranks, which are two stages of two tensor-parallel ranks, or name the sizes yourself:

    torchrun --standalone --nproc_per_node 4 examples/four_dimensions.py
    torchrun --standalone --nproc_per_node 4 examples/four_dimensions.py --shard 2 --cp 2 --pipe 1 --tp 1
    python examples/four_dimensions.py --plan 8 16 4 8 --width 512 --layers 8 --context 512 --batch 256

A large leaf is split over all axes:

- "shard" splits the batch by sequences.
- "cp" splits the batch by time.
- "pipe" splits the layers.
- "tp" splits heads, hidden width and vocabulary. Between its matrices it splits time, as in Megatron-LM's sequence
  parallelism.

The program prints the bytes that a rank sends over each axis in a step, and how far the result is from the same
training in one process, in float64. The last command plans the program for 4,096 ranks, and prints the memory and
traffic of one.
"""

import argparse
import os
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gpt import batch, standard_library

import fshard as fs

HEAD_WIDTH = 16
VOCABULARY = 256
# The outermost axis first: ranks of "tp" are next to each other.
AXES = ("pipe", "shard", "cp", "tp")
# Matrices that are split by outputs, and by inputs.
COLUMNS = ("*.qkv", "*.up")
ROWS = ("*.out", "*.down")

SIZES = {
    "shard": 1,
    "cp": 1,
    "microbatches": 4,
    "steps": 20,
    "width": 64,
    "layers": 4,
    "context": 64,
    "batch": 8,
    "seed": 0,
}

Axes = dict[str, fs.Axis]


def initial(width: int, layers: int, context: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
        return 0.05 * numbers

    def ones(*shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.float64)

    return {
        "embedding": {
            "tokens": draw(VOCABULARY, width),
            "positions": draw(context, width),
        },
        "layers": {
            "qkv": draw(layers, 3 * width, width),
            "out": draw(layers, width, width),
            "up": draw(layers, 4 * width, width),
            "down": draw(layers, width, 4 * width),
            "norm1": ones(layers, width),
            "norm2": ones(layers, width),
        },
        "head": {
            "norm": ones(width),
            "weight": draw(VOCABULARY, width),
        },
    }


def strategy(mesh: Any, axes: Axes) -> fs.ShardTransform:
    """Split layers over "pipe", matrices over "tp", and the last dim of every leaf over "shard" and "cp"."""
    shard = fs.fully_shard(axes["shard"], dim=-1)
    cp = fs.fully_shard(axes["cp"], dim=-1)
    pipe = fs.split_dim(axes["pipe"], dim=0)

    def tp(dim: int) -> fs.ShardTransform:
        return fs.split_dim(axes["tp"], dim=dim)

    layers = fs.compose(shard, cp, pipe)
    layers = fs.masked(fs.compose(shard, cp, pipe, tp(dim=2)), ROWS, otherwise=layers)
    layers = fs.masked(fs.compose(shard, cp, pipe, tp(dim=1)), COLUMNS, otherwise=layers)
    rest = fs.masked(
        fs.compose(shard, cp, tp(dim=0)),
        ("embedding.tokens", "head.weight"),
        otherwise=fs.compose(shard, cp),
    )
    return fs.zero3(mesh, layout=fs.masked(layers, "layers.*", otherwise=rest))


def rms_norm(weight: torch.Tensor, h: torch.Tensor, axes: Axes) -> torch.Tensor:
    # Ranks of "tp" have other parts of h.
    weight = fs.pcast(weight, axes["tp"], to="varying")
    return F.rms_norm(h, h.shape[-1:]) * weight


def layer(p: Any, h: torch.Tensor, axes: Axes) -> torch.Tensor:
    """Map h (batch, time / (cp tp), width) to as much."""
    tp = axes["tp"]
    normed = rms_norm(p["norm1"], h, axes)
    x = fs.all_gather(normed, tp, dim=1)  # (batch, time / cp, width)
    attended = attention(p["qkv"], x, axes["cp"])  # (batch, time / cp, width / tp)
    part = F.linear(attended, p["out"])  # (batch, time / cp, width)
    h = h + fs.reduce_scatter(part, tp, dim=1)

    normed = rms_norm(p["norm2"], h, axes)
    x = fs.all_gather(normed, tp, dim=1)
    hidden = F.gelu(F.linear(x, p["up"]))  # (batch, time / cp, 4 width / tp)
    part = F.linear(hidden, p["down"])
    return h + fs.reduce_scatter(part, tp, dim=1)


def attention(qkv: torch.Tensor, x: torch.Tensor, cp: fs.Axis) -> torch.Tensor:
    joined = F.linear(x, qkv)
    heads = joined.unflatten(-1, (-1, 3, HEAD_WIDTH))  # (batch, time / cp, heads / tp, 3, HEAD_WIDTH)
    q, k, v = heads.permute(3, 0, 2, 1, 4)  # each (batch, heads / tp, time / cp, HEAD_WIDTH)
    attended = fs.ring_attention(q, k, v, cp, is_causal=True)
    return attended.transpose(1, 2).flatten(2)


def stage(params: Any, h: torch.Tensor, axes: Axes) -> torch.Tensor:
    layers = params["layers"]
    for i in range(len(layers["qkv"])):
        p = {name: leaf[i] for name, leaf in layers.items()}
        h = layer(p, h, axes)
    return h


def embed(params: Any, x: torch.Tensor, axes: Axes) -> torch.Tensor:
    p = params["embedding"]
    tp = axes["tp"]
    h = fs.vocab_parallel_embedding(x, p["tokens"], tp, scatter_dim=1)  # (batch, time / (cp tp), width)
    positions = fs.pcast(p["positions"], tp, to="varying")
    start_of_cp = fs.axis_index(axes["cp"]) * x.shape[1]
    start = start_of_cp + fs.axis_index(tp) * h.shape[1]
    return h + positions[start : start + h.shape[1]]


def cross_entropy(params: Any, h: torch.Tensor, y: torch.Tensor, axes: Axes) -> torch.Tensor:
    p = params["head"]
    tp = axes["tp"]
    normed = rms_norm(p["norm"], h, axes)
    h = fs.all_gather(normed, tp, dim=1)
    return fs.vocab_parallel_cross_entropy(h, p["weight"], y, tp)


def optimizer(args: argparse.Namespace) -> fs.GradientTransformation:
    clip = fs.clip_by_global_norm(0.5)
    return fs.chain(clip, fs.adamw(args.lr, weight_decay=0.1))


def train_step(state: Any, axes: Axes, x: torch.Tensor, y: torch.Tensor, args: argparse.Namespace) -> tuple[Any, Any]:
    loss_fn = fs.pipeline(
        partial(stage, axes=axes),
        axes["pipe"],
        first=partial(embed, axes=axes),
        last=partial(cross_entropy, axes=axes),
        microbatches=args.microbatches,
        schedule=args.schedule,
    )
    value_and_grad = fs.value_and_grad(loss_fn)
    loss, grads = value_and_grad(state.params, x, y)
    return fs.update(optimizer(args), state, grads), loss


def train(params: Any, axes: Axes, args: argparse.Namespace) -> tuple[list[float], Any]:
    """Losses and final parameters."""
    step = partial(train_step, axes=axes, args=args)
    if args.jit:
        step = fs.jit(step)
    state = fs.TrainState.create(params, optimizer(args))
    text, _ = standard_library()
    losses = []
    for number in range(args.steps):
        x, y = batch(text, args.batch, args.context, seed=number)
        my_x = local_part(x, axes)
        my_y = local_part(y, axes)
        state, loss = step(state, x=my_x, y=my_y)
        losses.append(loss.item())
    return losses, state.params


def local_part(tokens: torch.Tensor, axes: Axes) -> torch.Tensor:
    """This rank's sequences, and its part of their time."""
    shard = axes["shard"]
    cp = axes["cp"]
    sequences = tokens.chunk(shard.size)[fs.axis_index(shard)]
    return sequences.chunk(cp.size, dim=1)[fs.axis_index(cp)]


def make_plan(params: Any, axes: Axes, args: argparse.Namespace) -> Any:
    """What a step does on a mesh of other sizes."""
    mesh = dict(zip(AXES, args.plan, strict=True))
    state = fs.TrainState.create(params, optimizer(args))
    sequences = args.batch // mesh["shard"]
    time = args.context // mesh["cp"]
    x = torch.zeros(sequences, time, dtype=torch.int64)
    return fs.plan(partial(train_step, args=args), state, axes, x, x, mesh=mesh)


def main() -> None:
    args = parse_args()
    sizes = {name: getattr(args, name) for name in AXES}
    mesh = fs.init_mesh(sizes, device="cpu")
    axes = {name: fs.axis_of(mesh, name) for name in AXES}
    full = initial(args.width, args.layers, args.context, args.seed)
    params = fs.shard(full, strategy(mesh, axes))
    if args.plan:
        print(make_plan(params, axes, args))
        return
    with fs.comm.record() as record:
        losses, trained = train(params, axes, args)
    trained = fs.unshard(trained)
    if mesh.get_rank() != 0:
        return
    print(params["layers"]["qkv"])
    report_bytes(record, args.steps)
    args.schedule = "gpipe"
    one_rank = {name: fs.Axis(name, 1, "") for name in AXES}
    expected_losses, expected = train(full, one_rank, args)
    print(f"loss {losses[0]:.4f}, after {args.steps} steps {losses[-1]:.4f}")
    report_difference(losses, expected_losses, trained, expected)


def report_bytes(record: fs.comm.Record, steps: int) -> None:
    sent = []
    for name in AXES:
        total = sum(entry.sent for entry in record if entry.axis == name)
        megabytes = total / steps / 1e6
        sent.append(f"{megabytes:.2f} MB over {name!r}")
    print("sent by this rank in a step:", ", ".join(sent))


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
    parser.add_argument("--tp", type=int, default=min(2, ranks))
    parser.add_argument("--pipe", type=int, default=max(1, ranks // 2))
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--schedule", default="1f1b", choices=("gpipe", "1f1b"))
    parser.add_argument("--jit", action="store_true")
    parser.add_argument(
        "--plan",
        type=int,
        nargs=4,
        metavar=AXES,
        help="print the plan of a step on such a mesh",
    )
    parser.add_argument("--lr", type=float, default=3e-3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
