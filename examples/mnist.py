"""Train the ConvNet of PyTorch's FSDP tutorial on scikit-learn's digits, under each strategy, with one train step.

    python examples/mnist.py
    torchrun --standalone --nproc_per_node 2 examples/mnist.py
    torchrun --standalone --nproc_per_node 2 examples/mnist.py --strategy zero3 --data MNIST/raw --epochs 1

By default the data is not MNIST: it is the 1797 handwritten digits of 8 x 8 pixels that come with scikit-learn, so that
nothing is downloaded. With --data, the program reads a directory with the four IDX files of MNIST, gzipped or not. It
keeps the tutorial's Dropout, Adadelta, StepLR, DistributedSampler and evaluation, which sums counts over ranks. It also
keeps units by size: each submodule of at least --unit-size parameters is a unit. All strategies must end with the same
parameters. The program reads them back from the checkpoints and compares them.

The table shows two figures of memory. One is the bytes that a rank keeps between steps (parameters and Adadelta's
state). The other is the peak within a step, as torch's profiler counts tensors in one step after the training. These
figures exclude Python, torch, the images and gloo's own memory. In this network, one layer has nearly all parameters
and is full while it computes. ZeRO-2 and ZeRO-3 therefore save nothing beyond ZeRO-1, and may take more memory, because
they reduce gradients while activations are still alive. Milliseconds are medians over all steps except the first, which
is traced. They mean little if ranks share cores with other programs. On several ranks ZeRO-3 is the slowest here,
because it gathers and reduces each unit by messages of its own, and layers as small as these compute for less time than
a message takes. Large layers hide their messages behind their arithmetic.
"""

import argparse
import gzip
import os
import statistics
import struct
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from installed import EXAMPLES, installed_by
from progress_bar import progress
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fshard as fs

with installed_by(EXAMPLES):
    from matplotlib.figure import Figure
    from sklearn.datasets import load_digits

Batch = tuple[torch.Tensor, torch.Tensor]
# The tutorial's model is so small that ZeRO-3 would gather it all at once; 0 keeps its units apart.
STRATEGIES = {"ddp": fs.ddp, "zero1": fs.zero1, "zero2": fs.zero2, "zero3": partial(fs.zero3, bucket_bytes=0)}


class ConvNet(nn.Module):
    def __init__(self, side: int, hidden: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(64 * ((side - 4) // 2) ** 2, hidden)
        self.fc2 = nn.Linear(hidden, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, 1, side, side) to (batch, 10)
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))  # (batch, 64, side - 4, side - 4)
        x = self.dropout1(F.max_pool2d(x, 2)).flatten(1)
        x = F.relu(self.fc1(x))
        return self.fc2(self.dropout2(x))


class Run(NamedTuple):
    """Results of a training: test loss, correct images, bytes kept, peak bytes, milliseconds per step."""

    loss: float
    right: int
    kept: int
    peak: int
    milliseconds: float


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    data, test = load(args.data)
    runs = {}
    for name in [args.strategy] if args.strategy else STRATEGIES:
        runs[name] = train(args, name, mesh, data, test)

    # Into one layout, whichever they were saved from.
    module = ConvNet(data[0].shape[-1], args.hidden)
    like = fs.functionalize(module).init(fs.ddp(mesh), seed=args.seed)
    saved = [fs.checkpoint.restore(args.directory / name, like=like, subtree=".params") for name in runs]
    difference = 0.0
    for params in saved:
        for name, leaf in saved[0].items():
            gap = (params[name].local - leaf.local).abs().max()
            difference = max(difference, gap.item())
    if mesh.get_rank() == 0:
        images = len(test[1])
        print("Data:", args.data or "the digits of scikit-learn, of 8 x 8 pixels (MNIST itself: --data)")
        report(runs, images, mesh.size())
        plot(runs, images, mesh.size(), args.directory / "mnist.png")
        print(f"Checkpoints and plot: {args.directory}")
        print(f"Largest difference of a parameter between checkpoints: {difference:g}")
    assert len({run.right for run in runs.values()}) == 1, "strategies differ in their accuracy"
    assert difference == 0, "strategies differ in a parameter"


def train(args: argparse.Namespace, name: str, mesh: Any, data: Batch, test: Batch) -> Run:
    rank = mesh.get_rank()
    ranks = mesh.size()
    torch.manual_seed(args.seed)
    module = ConvNet(data[0].shape[-1], args.hidden)
    model = fs.functionalize(module, units=args.unit_size)
    evaluated = model.eval()
    sampler = DistributedSampler(TensorDataset(*data), ranks, rank, seed=args.seed)
    loader = DataLoader(sampler.dataset, args.batch, sampler=sampler, drop_last=True)
    if not len(loader):
        raise SystemExit(f"{len(data[1])} images are too few for batches of {args.batch} on {ranks} ranks")
    steps = args.epochs * len(loader)
    rate = fs.from_torch_scheduler(
        torch.optim.lr_scheduler.StepLR,
        lr=args.lr,
        steps=steps,
        step_size=len(loader),
        gamma=args.gamma,
    )
    tx = fs.from_torch(torch.optim.Adadelta, lr=rate)

    def train_step(state: fs.TrainState, batch: Batch) -> tuple[fs.TrainState, torch.Tensor]:
        # Other dropout masks in each step and on each rank, all drawn from one key.
        key = fs.fold_in(fs.fold_in(state.key, state.step), fs.axis_of(mesh))

        def loss_fn(params: Any) -> torch.Tensor:
            images, labels = batch
            return F.cross_entropy(model.apply(params, images, key=key), labels)

        loss, grads = fs.value_and_grad(loss_fn)(state.params)
        return fs.update(tx, state, grads), loss

    train_step = fs.jit(train_step, donate_argnums=0)

    @fs.jit
    def scores(params: Any, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The sum of losses and the number of images right, of all ranks' images together."""
        logits = evaluated.apply(params, images)
        loss = F.cross_entropy(logits, labels, reduction="sum")
        right = (logits.argmax(1) == labels).sum()
        return fs.psum(torch.stack([loss.double(), right.double()]), fs.axis_of(mesh))

    params = model.init(STRATEGIES[name](mesh))
    state = fs.TrainState.create(params, tx, key=torch.tensor(args.seed))
    times = []
    with progress(None, f"{name:<5}", shown=rank == 0, total=steps) as bar:
        for epoch in range(args.epochs):
            sampler.set_epoch(epoch)
            for batch in loader:
                start = time.perf_counter()
                state, loss = train_step(state, batch)
                times.append(time.perf_counter() - start)
                bar.update()
            total = sum(scores(state.params, *part) for part in parts_of(test, rank, ranks))
            accuracy = total[1] / len(test[1])
            bar.set_postfix_str(f"loss {loss.item():.3f}, test accuracy {accuracy:.2%}", refresh=False)
    fs.checkpoint.save(args.directory / name, state)
    return Run(
        loss=float(total[0]) / len(test[1]),
        right=int(total[1]),
        kept=sum(leaf.nbytes for leaf in fs.tree_leaves(state)),
        # Torch warns if a step frees tensors that were not allocated under the profiler: hence a copy.
        peak=peak_bytes(lambda: train_step(fs.tree_map(torch.clone, state), batch)),
        milliseconds=1e3 * statistics.median(times[1:] or times),
    )


def peak_bytes(step: Callable[[], Any]) -> int:
    """The most bytes of tensors, allocated in a step, that it holds at a time."""
    # The profiler writes to standard error when it starts and stops, in the midst of the progress bars.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
        step()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events))


def parts_of(test: Batch, rank: int, ranks: int, size: int = 1000) -> list[Batch]:
    """This rank's images in as many parts as other ranks have, each image once, as a padding sampler would not."""
    images, labels = test
    count = -(-len(labels) // (ranks * size))
    image_parts = images[rank::ranks].tensor_split(count)
    label_parts = labels[rank::ranks].tensor_split(count)
    return list(zip(image_parts, label_parts, strict=True))


def load(directory: Path | None) -> tuple[Batch, Batch]:
    """Images of mean 0 and deviation 1, of shape (n, 1, side, side), and labels: for training, and held out."""
    if directory is None:
        digits = load_digits()
        images = torch.from_numpy(digits.images)
        labels = torch.from_numpy(digits.target)
        train = images[:1437], labels[:1437]
        test = images[1437:], labels[1437:]
    else:
        train = read_idx(directory, "train-images"), read_idx(directory, "train-labels")
        test = read_idx(directory, "t10k-images"), read_idx(directory, "t10k-labels")
    values = train[0].double()
    mean = values.mean()
    deviation = values.std()

    def normalized(pair: Batch) -> Batch:
        images, labels = pair
        return ((images - mean) / deviation).float()[:, None], labels.long()

    return normalized(train), normalized(test)


def read_idx(directory: Path, name: str) -> torch.Tensor:
    """The bytes of an IDX file: two zeros, 8 for unsigned bytes, the number of dims, their sizes, the values."""
    paths = sorted(directory.glob(f"{name}*idx[13]-ubyte*"))
    if not paths:
        raise SystemExit(f"{directory} has no {name}-idx*-ubyte or {name}-idx*-ubyte.gz, as MNIST's files are called")
    data = paths[0].read_bytes()
    if data.startswith(b"\x1f\x8b"):
        data = gzip.decompress(data)
    if not data.startswith(b"\0\0\x08"):
        raise SystemExit(f"{paths[0]} is no IDX file of unsigned bytes")
    sizes = struct.unpack_from(f">{data[3]}I", data, 4)
    values = torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=4 + 4 * len(sizes))
    return values.reshape(sizes)


def report(runs: Mapping[str, Run], images: int, ranks: int) -> None:
    def print_row(*cells: str) -> None:
        print(f"{cells[0]:<14}" + "".join(f"{cell:>16}" for cell in cells[1:]))

    print_row("of each rank", "test loss", "images right", "MB kept", "MB at most", "ms a step")
    for name, run in runs.items():
        print_row(
            name,
            f"{run.loss:.4f}",
            f"{run.right} of {images}",
            f"{run.kept / 1e6:.2f}",
            f"{run.peak / 1e6:.2f}",
            f"{run.milliseconds:.1f}",
        )
    if "zero3" in runs and ranks > 1:
        print("zero3 is slower here: each layer is gathered and reduced by messages of its own, and layers as small")
        print("as these compute for less time than a message takes. Large layers hide their messages.")


def plot(runs: Mapping[str, Run], images: int, ranks: int, path: Path) -> None:
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    memory, speed = figure.subplots(1, 2, sharey=True)
    names = list(runs)
    kept = [run.kept / 1e6 for run in runs.values()]
    peaks = [run.peak / 1e6 for run in runs.values()]
    more = [peak - bytes_kept for peak, bytes_kept in zip(peaks, kept)]
    memory.barh(names, kept, label="kept between steps")
    bars = memory.barh(names, more, left=kept, label="at most in a step", color="C0", alpha=0.4)
    memory.bar_label(bars, [f"{peak:.2f}" for peak in peaks], padding=3)
    memory.set(xlabel="MB of tensors on a rank", ylim=(len(runs) + 0.3, -0.6))
    memory.legend(loc="lower left", ncols=2, frameon=False)
    bars = speed.barh(names, [run.milliseconds for run in runs.values()], color="0.7")
    speed.bar_label(bars, fmt="%.1f", padding=3)
    speed.set(xlabel="milliseconds a step")
    for panel in (memory, speed):
        panel.margins(x=0.12)
    right = runs[names[0]].right
    figure.suptitle(f"{right} of {images} test images right under each strategy, on {ranks} rank{'s' * (ranks > 1)}")
    figure.savefig(path, dpi=120)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--strategy", choices=STRATEGIES, help="one strategy; by default the program compares all")
    parser.add_argument("--data", type=Path, help="directory of MNIST's IDX files; by default scikit-learn's digits")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32, help="images of each rank in a step")
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7, help="factor of the learning rate after each epoch")
    parser.add_argument("--hidden", type=int, default=1024, help="width of the hidden layer; the tutorial has 128")
    parser.add_argument("--unit-size", type=int, default=1000, help="parameters that a submodule needs to be a unit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, default=Path("runs/mnist"), help="checkpoints and the plot")
    parser.add_argument("--threads", type=int, default=1, help="threads of each rank")
    return parser.parse_args()


if __name__ == "__main__":
    main()
