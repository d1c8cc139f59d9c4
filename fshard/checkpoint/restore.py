"""restore: read a checkpoint into a state of any layout, and refuse a damaged one."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from os import PathLike
from typing import Any

import torch

from fshard.checkpoint import files
from fshard.checkpoint.boxes import Box, Entry
from fshard.checkpoint.directory import find_checkpoint, list_checkpoints
from fshard.checkpoint.errors import CheckpointError, expect_file
from fshard.checkpoint.exchange import Exchange
from fshard.errors import expect
from fshard.mesh import Mesh
from fshard.shard import choose_leaves
from fshard.tree import Mask, Tree
from fshard.tree.checks import describe

LABEL = "checkpoint.restore"

# Reads the elements of a leaf, by its path, that a chunk has.
ReadChunk = Callable[[str, files.Chunk, torch.Tensor], None]


def latest_step(directory: str | PathLike[str]) -> int | None:
    """Return the step of the checkpoint that was saved last.

    Each rank looks by itself and nothing is sent, so while a save is under way, one rank may see the checkpoint and
    another may not yet. `restore` has one rank choose for all.

    Args:
        directory: Where checkpoints are kept.

    Returns:
        Its step, or None where there is no checkpoint.

    Raises:
        CheckpointError: if the directory cannot be read, such as a file in its place.

    >>> import tempfile, torch, fshard as fs
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     before = fs.checkpoint.latest_step(directory)
    ...     path = fs.checkpoint.save(directory, {"w": torch.ones(3)}, step=10).wait()
    ...     before, fs.checkpoint.latest_step(directory)
    (None, 10)
    """
    exchange = Exchange("checkpoint.latest_step")
    root = exchange.path("directory", directory)
    with exchange.raise_on_this_rank(root):
        checkpoints = list_checkpoints(root)
    return checkpoints[-1].step if checkpoints else None


def restore(
    directory: str | PathLike[str],
    like: Tree,
    *,
    step: int | None = None,
    subtree: str = "",
    only: Mask | None = None,
    mesh: Mesh | None = None,
) -> Tree:
    """Read a checkpoint, bitwise, into any layout, mesh and number of ranks. Every rank must call this.

    Each chunk that has elements for this rank is read as a whole and compared with its checksum.

    Args:
        directory: Where checkpoints are kept.
        like: A tree as it shall be: leaves say which dtype, shape, layout and device; their values are not used and
            may be on the meta device, which takes no memory. Such leaves are read to the device of their mesh or
            their transform, and plain tensors to torch's default device.
        step: Which checkpoint; None takes the one saved last. The first rank chooses it for all.
        subtree: The path under which `like` lies in what was saved, such as ".params" of a TrainState.
        only: Which leaves of `like` to read, by a pattern of their names such as "head.*", several, or a function of
            (name, leaf); others stay as they are. None reads all, and refuses a checkpoint that has more.
        mesh: The mesh of one axis over the ranks that read; None where all ranks of this run do.

    Returns:
        A tree of the structure, specs, dtypes and devices of `like`.

    Raises:
        ValueError: on every rank, with every leaf that the checkpoint lacks or has otherwise; dtypes are never
            changed silently.
        CheckpointError: on every rank, if there is no such checkpoint or a file is damaged, by its name.

    >>> import tempfile, torch, fshard as fs
    >>> state = {"params": {"w": torch.tensor([1.0, 2.0])}, "epoch": torch.tensor(3)}
    >>> like = fs.shard({"w": torch.zeros(2)}, fs.fully_shard(fs.init_mesh({"shard": -1}, device="cpu")))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = fs.checkpoint.save(directory, state, step=1).wait()
    ...     params = fs.checkpoint.restore(directory, like, subtree="['params']")
    >>> params, params["w"].local
    ({'w': Sharded(float32[2], P('shard'), local [2])}, tensor([1., 2.]))
    """
    exchange = Exchange(LABEL, mesh=mesh)
    choice = None
    with exchange.raise_on_all_ranks(directory):
        root = exchange.path("directory", directory)
        expect(step is None or type(step) is int, LABEL, "step to be a whole number or None", describe(step))
        fill = select(exchange, like, subtree, only)
        # One rank chooses, because a save may complete another checkpoint while ranks look.
        if exchange.rank == 0:
            checkpoint = find_checkpoint(root, step)
            choice = checkpoint.step, checkpoint.path.name
    chosen_step, name = exchange.take_first(choice)
    with exchange.raise_on_all_ranks(directory):
        reader = files.CheckpointReader(root / name)
        got_step = reader.manifest.step
        is_step = got_step == chosen_step
        expect_file(is_step, f"{root / name}", f"step {chosen_step} as its name says", f"step {got_step}")
    identity = {"(checkpoint)": f"{name} of digest {reader.digest}"}
    exchange.check_agreement(identity, "ranks read different checkpoints", "use a directory that all ranks share")
    return fill(reader.manifest, reader.read_chunk)


def select(
    exchange: Exchange, like: Tree, subtree: str = "", only: Mask | None = None
) -> Callable[[files.Manifest, ReadChunk], Tree]:
    """Check the arguments of `restore`, and return a function that reads the leaves that they select.

    The function takes a manifest, in which chunks that this rank does not need may be missing, and what reads a chunk
    of the leaf of a path into memory. Every rank calls it.
    """
    expect(isinstance(subtree, str), LABEL, "subtree to be a path such as '.params'", describe(subtree))
    flat = exchange.flat(like, needs_values=False)
    # The path of a tree that is one leaf is that of the subtree.
    paths = [subtree if subtree and path == "(root)" else subtree + path for path in flat.paths]
    # By their paths in the checkpoint.
    leaves = dict(zip(paths, flat.leaves, strict=True))
    if only is not None:
        leaves = dict(compress(leaves.items(), choose_leaves(LABEL, "only", only, flat)))

    def fill(manifest: files.Manifest, read_chunk: ReadChunk) -> Tree:
        stored: dict[str, Any] = {}
        for path, leaf in manifest.tensors.items():
            stored[path] = Entry(getattr(torch, leaf.dtype), leaf.shape, partial(read_box, path, leaf, read_chunk))
        stored |= manifest.values
        entries = {}
        for path, entry in stored.items():
            if path in leaves or (only is None and _is_under(path, subtree)):
                entries[path] = [entry]
        remedy = "restore into a state built as the one that was saved; only= and subtree= read parts of it"
        results = exchange.read(leaves, entries, remedy)
        return flat.unflatten([results.get(path, leaf) for path, leaf in zip(paths, flat.leaves, strict=True)])

    return fill


def _is_under(path: str, subtree: str) -> bool:
    return not subtree or path == subtree or path.startswith((f"{subtree}.", f"{subtree}["))


def read_box(path: str, leaf: files.StoredLeaf, read_chunk: ReadChunk, slices: Sequence[slice]) -> torch.Tensor:
    """Read a box of a leaf from the chunks that have elements of it."""
    dtype = getattr(torch, leaf.dtype)
    offsets = tuple(side.start for side in slices)
    result = torch.empty([side.stop - side.start for side in slices], dtype=dtype, device="cpu")
    box = Box(offsets, tuple(result.shape))
    missing = result.numel()
    for chunk in leaf.chunks:
        overlap = box.intersect(chunk.box)
        if any(size <= 0 for size in overlap.shape):
            continue
        missing -= math.prod(overlap.shape)
        target = result[overlap.inside(box).slices]
        if overlap == chunk.box and target.is_contiguous():
            read_chunk(path, chunk, target)
            continue
        # The checksum is that of the whole chunk.
        elements = torch.empty(chunk.shape, dtype=dtype, device="cpu")
        read_chunk(path, chunk, elements)
        target.copy_(elements[overlap.inside(chunk.box).slices])
    if missing:
        raise CheckpointError(f"{path}: {missing} of its elements are on no rank that is left")
    return result
