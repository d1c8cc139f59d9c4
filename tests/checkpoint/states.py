"""What the tests of checkpoints share: layouts, trees, and runs that save and restore them."""

import math
import os
import random
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import fshard as fs
from fshard import checkpoint
from fshard.testing import spmd
from fshard.tree import flatten, is_sharded
from tests.trees import STRATEGIES, TREES, as_bytes, exotic_dtypes, meshes, normal, one_axis

LAYOUTS = STRATEGIES | {
    "zero3": lambda on: fs.zero3(on.line, min_shard_elements=0),
    "zero3 with small leaves whole": lambda on: fs.zero3(on.line, min_shard_elements=16),
    "hsdp of every leaf": lambda on: fs.hsdp(on.grid, min_shard_elements=0),
    "masked": lambda on: fs.masked(
        fs.fully_shard(on.line), ("w", "cube"), otherwise=fs.fully_shard(on.line, dim=-1, min_shard_elements=4)
    ),
    "split for good": lambda on: fs.compose(
        fs.fully_shard(on.grid["shard"], min_shard_elements=0), fs.split_dim(on.grid["replicate"], dim=-1)
    ),
    "owned": lambda on: fs.compose(
        fs.fully_shard(on.grid["shard"], min_shard_elements=0), fs.own_dim(on.grid["replicate"], -1)
    ),
    "on one axis of two": lambda on: fs.fully_shard(on.grid["shard"]),
}


def divisible():
    """A tree whose last dims are multiples of 2, which split_dim needs."""
    draw = normal(20)
    return {"w": draw(5, 4), "v": draw(6), "cube": draw(3, 5, 2), "flat": draw(1, 8)}


def python_values():
    numbers = {"nan": math.nan, "inf": -math.inf, "zero": -0.0, "tiny": 5e-324, "third": 1 / 3, "huge": 1.7e308}
    whole = {"big": -(2**1999), "one": 1, "true": True, "false": False, "none": None}
    texts = {"": "", "text": 'a "b" \\ \n\x00 é 😀', "null": "null"}
    return {**numbers, **whole, "texts": texts, "w": normal(21)(3)}


def named_oddly():
    """Keys that are hard to spell."""
    draw = normal(22)
    keys = ("", " ", "a.b", "['w']", "é😀", '"', "\\", "\n", "__metadata__", "../../x", "/etc/passwd", "x" * 300)
    return {key: draw(2) for key in keys} | {"w": OrderedDict([(2, draw(1)), ((1, "a"), draw(2))])}


def tied():
    draw = normal(23)
    shared = draw(5, 3)
    return {"w": shared, "again": shared, "frozen": nn.Parameter(draw(3), requires_grad=False)}


SECONDS = 30
# Layouts that not every tree fits.
CHOOSY = ("split for good", "owned", "masked")
ALL_TREES = TREES | {f.__name__: f for f in (exotic_dtypes, divisible, named_oddly, tied)}


def zeros_like(state):
    """A tree of the same structure, specs, shapes and dtypes that shares no value."""

    def blank(leaf):
        return torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else leaf

    return fs.tree_map(blank, state)


def assert_same(actual, expected):
    """Assert that two states agree in structure, specs, types and every bit, padding included."""
    flat, expected_flat = flatten(actual), flatten(expected)
    assert flat.treedef == expected_flat.treedef
    for path, leaf, like in zip(flat.paths, flat.leaves, expected_flat.leaves):
        if is_sharded(like):
            assert leaf.spec == like.spec, path
            leaf, like = leaf.local, like.local
        if isinstance(like, torch.Tensor):
            assert (path, leaf.dtype, leaf.shape, leaf.device) == (path, like.dtype, like.shape, like.device)
            leaf, like = (tensor.resolve_conj().resolve_neg() for tensor in (leaf, like))
            assert as_bytes(leaf).equal(as_bytes(like)), path
        else:
            assert (type(leaf), repr(leaf)) == (type(like), repr(like)), path


def split(step):
    """A leaf that each rank writes a part of."""
    return fs.shard({"w": torch.arange(6.0) + step}, fs.zero2(one_axis(), min_shard_elements=0))


def full(step):
    return {"w": torch.full((64, 8), float(step)), "step": step}


def step_of(directory, **chosen):
    return checkpoint.restore(directory, full(0), **chosen)["step"]


def names(directory):
    return sorted(path.name for path in directory.iterdir() if path.name != ".lock")


def fail_writes(monkeypatch, start=""):
    """Let files whose names have a start fail to be on the disk."""
    fsync = os.fsync

    def failing_fsync(descriptor):
        if os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")).startswith(start):
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failing_fsync)


def wait_for_threads():
    """Wait for the threads of saves, as nothing else tells when one is over that nobody waits for."""
    for thread in threading.enumerate():
        # One without a number is just being started by another rank, which waits for it itself.
        if thread.name.startswith("checkpoint.save") and thread.ident is not None:
            thread.join(SECONDS)


def save(directory, make, world_size, step=1):
    """Save what `make` makes of the meshes of each rank."""
    spmd(lambda: checkpoint.save(directory, make(meshes()), step), world_size)


def at_once(programs):
    """What programs return that threads run at once, without ranks; raises the error of one that fails."""
    barrier = threading.Barrier(len(programs))

    def run(program):
        barrier.wait()
        return program()

    with ThreadPoolExecutor(len(programs)) as pool:
        return list(pool.map(run, programs))


def sampler(seed):
    """A seeded source of choices."""
    return random.Random(seed)


def refused(call, kind=ValueError):
    """The text of the error that a call raises, which is of this kind and no other."""
    with pytest.raises(kind) as error:
        call()
    assert type(error.value) is kind
    return str(error.value)


def refused_everywhere(program, ranks=2, kind=ValueError):
    """The text of an error that each rank raises, which must be one."""
    (text,) = set(spmd(lambda: refused(program, kind), ranks))
    return text
