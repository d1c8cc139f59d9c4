"""The example of handwritten digits: strategies agree to the last image, and files of MNIST are read."""

import gzip
import re
import runpy
import struct
import sys
from typing import NamedTuple

import pytest
import torch

import fshard as fs
from tests.test_processes import ROOT, TORCHRUN, run

EXAMPLE = ROOT / "examples/mnist.py"
LAUNCHERS = [((sys.executable,), 1), ((*TORCHRUN, 2), 2)]
NAMES = ("ddp", "zero1", "zero2", "zero3")


class Row(NamedTuple):
    loss: str
    right: int
    images: int
    kept: float
    most: float
    milliseconds: float


def rows_of(out):
    found = re.findall(r"^(\w+) +(\S+) +(\d+) of (\d+) +(\S+) +(\S+) +(\S+)$", out, re.MULTILINE)
    return {name: Row(loss, int(right), int(images), *map(float, rest)) for name, loss, right, images, *rest in found}


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(EXAMPLE))


def write_idx(path, values, is_gzipped):
    data = bytes([0, 0, 8, values.dim()]) + struct.pack(f">{values.dim()}I", *values.shape) + values.numpy().tobytes()
    path.write_bytes(gzip.compress(data) if is_gzipped else data)


def write_mnist(directory, side, train, test, is_gzipped):
    """Images of vertical bars, which stand where their label says, in noise."""
    generator = torch.Generator().manual_seed(0)
    written = {}
    for part, count in (("train", train), ("t10k", test)):
        labels = torch.randint(10, (count,), generator=generator, dtype=torch.uint8)
        images = torch.randint(100, (count, side, side), generator=generator, dtype=torch.uint8)
        images[torch.arange(count), :, 1 + labels.long()] = 255
        suffix = ".gz" if is_gzipped else ""
        write_idx(directory / f"{part}-images-idx3-ubyte{suffix}", images, is_gzipped)
        write_idx(directory / f"{part}-labels-idx1-ubyte{suffix}", labels, is_gzipped)
        written |= {f"{part}-images": images, f"{part}-labels": labels}
    return written


@pytest.mark.parametrize("is_gzipped", [True, False], ids=["gz", "plain"])
def test_reads_idx_files(example, tmp_path, is_gzipped):
    written = write_mnist(tmp_path, 12, 7, 5, is_gzipped)
    for name, values in written.items():
        assert torch.equal(example["read_idx"](tmp_path, name), values)
    (train_images, train_labels), (test_images, test_labels) = example["load"](tmp_path)
    assert train_images.shape == (7, 1, 12, 12)
    assert test_images.shape == (5, 1, 12, 12)
    assert torch.equal(train_labels, written["train-labels"].long())
    assert torch.equal(test_labels, written["t10k-labels"].long())
    eps = torch.finfo(torch.float32).eps
    assert abs(train_images.double().mean()) < eps
    assert abs(train_images.double().std() - 1) < eps
    # What is held out is scaled as what is trained on is.
    raw = written["train-images"].double()
    scaled = (written["t10k-images"].double() - raw.mean()) / raw.std()
    assert torch.equal(test_images[:, 0], scaled.float())


def test_refuses_what_is_no_idx_file(example, tmp_path):
    with pytest.raises(SystemExit, match=r"has no train-images-idx\*-ubyte or train-images-idx\*-ubyte.gz"):
        example["read_idx"](tmp_path, "train-images")
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"\0\0\x0d\1\0\0\0\1\0\0\0\0")
    with pytest.raises(SystemExit, match="is no IDX file of unsigned bytes"):
        example["read_idx"](tmp_path, "train-images")


@pytest.mark.parametrize("images", [1, 7, 2001, 4000])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_test_image_is_counted_once(example, images, ranks):
    """And all ranks come with equally many parts, because each is a round of collectives."""
    test = torch.arange(images), torch.arange(images)
    parts = [example["parts_of"](test, rank, ranks) for rank in range(ranks)]
    assert len({len(of_rank) for of_rank in parts}) == 1
    for i in range(2):
        assert torch.cat([part[i] for of_rank in parts for part in of_rank]).sort().values.equal(test[i])
    assert max(len(part[0]) for of_rank in parts for part in of_rank) <= 1000


@pytest.mark.slow
@pytest.mark.parametrize("launcher, ranks", LAUNCHERS, ids=["alone", "torchrun"])
def test_strategies_agree_to_the_last_image(tmp_path, launcher, ranks):
    options = ("--epochs", 2, "--hidden", 256, "--batch", 32 // ranks, "--directory", tmp_path)
    out = run(*launcher, EXAMPLE, *options, timeout=200)
    rows = rows_of(out)
    assert tuple(rows) == NAMES
    assert len({(row.loss, row.right, row.images) for row in rows.values()}) == 1
    assert "Largest difference of a parameter between checkpoints: 0\n" in out
    # The digits that come with scikit-learn; one of ten is right by chance.
    assert rows["ddp"].images == 360
    assert rows["ddp"].right > 0.7 * 360
    for name, row in rows.items():
        assert 0 < row.kept < row.most
        assert row.milliseconds > 0
        if ranks == 1 or name == "ddp":
            assert row.kept == rows["ddp"].kept
        else:
            # Biases and the first convolution stay whole.
            assert 0.5 < row.kept / rows["ddp"].kept < 0.52
            assert row.most < rows["ddp"].most
        assert fs.checkpoint.latest(tmp_path / name) == 2 * (1437 // 32)
    assert (tmp_path / "mnist.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_one_strategy_on_files_of_mnist(tmp_path):
    """On three ranks, whose parts of 161 images differ, and whose checkpoints lie over those of a run before."""
    write_mnist(tmp_path, 12, 300, 161, is_gzipped=True)
    options = ("--strategy", "zero3", "--data", tmp_path, "--hidden", 32, "--batch", 10, "--directory", tmp_path)
    for epochs in (2, 1):
        out = run(*TORCHRUN, 3, EXAMPLE, *options, "--epochs", epochs)
        rows = rows_of(out)
        assert list(rows) == ["zero3"]
        assert rows["zero3"].images == 161
        assert fs.checkpoint.latest(tmp_path / "zero3") == epochs * 10
        assert "Largest difference of a parameter between checkpoints: 0\n" in out
