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

Axes = dict[str, fs.Axis]


def initial(width: int, layers: int, context: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return 0.05 * torch.randn(shape, generator=generator, dtype=torch.float64)

    def ones(*shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.float64)

    embedding = {"tokens": draw(VOCABULARY, width), "positions": draw(context, width)}
    stacked = {
        "qkv": draw(layers, 3 * width, width),
        "out": draw(layers, width, width),
        "up": draw(layers, 4 * width, width),
        "down": draw(layers, width, 4 * width),
        "norm1": ones(layers, width),
        "norm2": ones(layers, width),
    }
    head = {"norm": ones(width), "weight": draw(VOCABULARY, width)}
    return {"embedding": embedding, "layers": stacked, "head": head}


def strategy(mesh: Any, axes: Axes) -> fs.ShardTransform:
    """Split layers over "pipe", matrices over "tp", and the last dim of every leaf over "shard" and "cp"."""
    data = [fs.fully_shard(axes[name], dim=-1) for name in ("shard", "cp")]
    pipe = fs.split_dim(axes["pipe"], dim=0)
    tp = partial(fs.split_dim, axes["tp"])
    layers = fs.masked(fs.compose(*data, pipe, tp(dim=2)), ROWS, otherwise=fs.compose(*data, pipe))
    layers = fs.masked(fs.compose(*data, pipe, tp(dim=1)), COLUMNS, otherwise=layers)
    vocabulary = ("embedding.tokens", "head.weight")
    rest = fs.masked(fs.compose(*data, tp(dim=0)), vocabulary, otherwise=fs.compose(*data))
    return fs.zero3(mesh, layout=fs.masked(layers, "layers.*", otherwise=rest))


def rms_norm(weight: torch.Tensor, h: torch.Tensor, axes: Axes) -> torch.Tensor:
    # Ranks of "tp" have other parts of h.
    weight = fs.pcast(weight, axes["tp"], to="varying")
    return F.rms_norm(h, h.shape[-1:]) * weight


def layer(p: Any, h: torch.Tensor, axes: Axes) -> torch.Tensor:  # (batch, time / (cp tp), width)
    tp = axes["tp"]
    x = fs.all_gather(rms_norm(p["norm1"], h, axes), tp, dim=1)  # (batch, time / cp, width)
    attended = attention(p["qkv"], x, axes["cp"])
    h = h + fs.reduce_scatter(F.linear(attended, p["out"]), tp, dim=1)
    x = fs.all_gather(rms_norm(p["norm2"], h, axes), tp, dim=1)
    hidden = F.gelu(F.linear(x, p["up"]))
    return h + fs.reduce_scatter(F.linear(hidden, p["down"]), tp, dim=1)


def attention(qkv: torch.Tensor, x: torch.Tensor, cp: fs.Axis) -> torch.Tensor:
    heads = F.linear(x, qkv).unflatten(-1, (-1, 3, HEAD_WIDTH))  # (batch, time / cp, heads / tp, 3, HEAD_WIDTH)
    q, k, v = heads.permute(3, 0, 2, 1, 4)  # each (batch, heads / tp, time / cp, HEAD_WIDTH)
    attended = fs.ring_attention(q, k, v, cp, is_causal=True)
    return attended.transpose(1, 2).flatten(2)


def stage(params: Any, h: torch.Tensor, axes: Axes) -> torch.Tensor:
    layers = params["layers"]
    for i in range(len(layers["qkv"])):
        h = layer({name: leaf[i] for name, leaf in layers.items()}, h, axes)
    return h


def embed(params: Any, x: torch.Tensor, axes: Axes) -> torch.Tensor:
    p = params["embedding"]
    tp = axes["tp"]
    h = fs.vocab_parallel_embedding(x, p["tokens"], tp, scatter_dim=1)
    positions = fs.pcast(p["positions"], tp, to="varying")
    start = fs.axis_index(axes["cp"]) * x.shape[1] + fs.axis_index(tp) * h.shape[1]
    return h + positions[start : start + h.shape[1]]


def cross_entropy(params: Any, h: torch.Tensor, y: torch.Tensor, axes: Axes) -> torch.Tensor:
    p = params["head"]
    tp = axes["tp"]
    h = fs.all_gather(rms_norm(p["norm"], h, axes), tp, dim=1)
    return fs.vocab_parallel_cross_entropy(h, p["weight"], y, tp)


def optimizer(args: argparse.Namespace) -> fs.GradientTransformation:
    return fs.chain(fs.clip_by_global_norm(0.5), fs.adamw(args.lr, weight_decay=0.1))


def train_step(state: Any, axes: Axes, x: torch.Tensor, y: torch.Tensor, args: argparse.Namespace) -> tuple[Any, Any]:
    loss_fn = fs.pipeline(
        partial(stage, axes=axes),
        axes["pipe"],
        first=partial(embed, axes=axes),
        last=partial(cross_entropy, axes=axes),
        microbatches=args.microbatches,
        schedule=args.schedule,
    )
    loss, grads = fs.value_and_grad(loss_fn)(state.params, x, y)
    return fs.update(optimizer(args), state, grads), loss


def train(params: Any, axes: Axes, args: argparse.Namespace) -> tuple[list[float], Any]:
    """Losses and final parameters."""
    step = partial(train_step, axes=axes, args=args)
    if args.jit:
        step = fs.jit(step)

    def local(tokens: torch.Tensor) -> torch.Tensor:
        """This rank's sequences, and its part of their time."""
        shard = axes["shard"]
        cp = axes["cp"]
        sequences = tokens.chunk(shard.size)[fs.axis_index(shard)]
        return sequences.chunk(cp.size, dim=1)[fs.axis_index(cp)]

    state = fs.TrainState.create(params, optimizer(args))
    text, _ = standard_library()
    losses = []
    for number in range(args.steps):
        x, y = batch(text, args.batch, args.context, seed=number)
        state, loss = step(state, x=local(x), y=local(y))
        losses.append(loss.item())
    return losses, state.params


def planned(params: Any, axes: Axes, args: argparse.Namespace) -> Any:
    """What a step does on a mesh of other sizes."""
    mesh = dict(zip(AXES, args.plan, strict=True))
    state = fs.TrainState.create(params, optimizer(args))
    x = torch.zeros(args.batch // mesh["shard"], args.context // mesh["cp"], dtype=torch.int64)
    return fs.plan(partial(train_step, args=args), state, axes, x, x, mesh=mesh)


def main() -> None:
    args = parse_args()
    sizes = {name: getattr(args, name) for name in AXES}
    mesh = fs.init_mesh(sizes, device="cpu")
    axes = {name: fs.axis_of(mesh, name) for name in AXES}
    full = initial(args.width, args.layers, args.context, args.seed)
    params = fs.shard(full, strategy(mesh, axes))
    if args.plan:
        print(planned(params, axes, args))
        return
    with fs.comm.record() as record:
        losses, trained = train(params, axes, args)
    trained = fs.unshard(trained)
    if mesh.get_rank() != 0:
        return
    print(params["layers"]["qkv"])
    args.schedule = "gpipe"
    one_rank = {name: fs.Axis(name, 1, "") for name in AXES}
    expected_losses, expected = train(full, one_rank, args)
    sent = []
    for name in AXES:
        megabytes = sum(entry.sent for entry in record if entry.axis == name) / args.steps / 1e6
        sent.append(f"{megabytes:.2f} MB over {name!r}")
    print("sent by this rank in a step:", ", ".join(sent))
    print(f"loss {losses[0]:.4f}, after {args.steps} steps {losses[-1]:.4f}")
    loss_gap = max(abs(loss - alone) for loss, alone in zip(losses, expected_losses))
    pairs = zip(fs.tree_leaves(trained), fs.tree_leaves(expected))
    gap = max(float((leaf - alone).abs().max()) for leaf, alone in pairs)
    print(f"largest difference from one process: {loss_gap:.1e} in a loss, {gap:.1e} in a parameter")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    parser.add_argument("--tp", type=int, default=min(2, ranks))
    parser.add_argument("--pipe", type=int, default=max(1, ranks // 2))
    for name, value in {"shard": 1, "cp": 1, "microbatches": 4, "steps": 20, "width": 64, "layers": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in {"context": 64, "batch": 8, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--schedule", default="1f1b", choices=("gpipe", "1f1b"))
    parser.add_argument("--jit", action="store_true")
    parser.add_argument("--plan", type=int, nargs=4, metavar=AXES, help="print the plan of a step on such a mesh")
    parser.add_argument("--lr", type=float, default=3e-3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
