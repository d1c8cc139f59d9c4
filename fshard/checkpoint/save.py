"""save: write a state so that a kill at any moment leaves the last checkpoint whole."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from fshard.checkpoint import files
from fshard.checkpoint.boxes import LocalBox, has_elements, local_box
from fshard.checkpoint.directory import choose_name, lock, remove_directory
from fshard.checkpoint.exchange import Exchange
from fshard.checkpoint.host_copies import copy_to_host
from fshard.checkpoint.saving import Saving
from fshard.checkpoint.unfinished import Unfinished, complete_leftovers
from fshard.errors import expect, refuse
from fshard.mesh import Mesh
from fshard.tree import Tree, flatten, tensor_of
from fshard.tree.checks import NUMBER, check_arguments, check_flags, describe, refuse_donated

LABEL = "checkpoint.save"
# Python reads whole numbers below it, unless a program asks for more.
INT_LIMIT = 10**4300


def save(
    directory: str | PathLike[str],
    state: Tree,
    step: int | None = None,
    *,
    keep: int | None = None,
    asynchronous: bool = False,
    mesh: Mesh | None = None,
) -> Saving:
    """Write a checkpoint of a state: each rank its shards, replicated leaves once. Every rank must call this.

    A kill at any moment leaves the checkpoints that were complete; FORMAT.md in this package describes the files. What
    several ranks hold is compared before, by checksums that each of those ranks makes.

    Args:
        directory: Where checkpoints are kept, a file system that all ranks share; made where there is none.
        state: Any pytree: a TrainState, or parameters. Leaves are Sharded, tensors that are the same on every rank, or
            None, bool, int, float or str. Of leaves that ranks hold values of their own of, each rank's are kept.
        step: Names the checkpoint; None takes state.step.
        keep: How many checkpoints stay, those saved last; None for all. Directories without a manifest, and links,
            stay and do not count.
        asynchronous: Copy the state aside and return, so that steps may write over it, and write while they run. From
            an accelerator the state is copied through 64 MB of pinned memory, behind what the current stream was given
            before, and the host waits until all of it is copied: steps that follow, donated ones too, change nothing
            in the checkpoint. The checkpoint is complete when all ranks have written; `Saving.wait` waits for that, and
            raises the error of a rank that could not. A program that ends before waits up to 300 s for its own file,
            and on the first rank 20 s more for those of others, and says on standard error why it is not complete.
        mesh: The mesh of one axis over the ranks that save; None where all ranks of this run do.

    Returns:
        The save under way; complete unless `asynchronous`.

    Raises:
        ValueError: on every rank, before anything is written, if ranks hold different states, or different values
            of what must be the same on every rank, or a leaf cannot be saved.
        CheckpointError: on every rank, if any of them cannot write its file. It names the file, or the rank.

    >>> import tempfile
    >>> from fshard import checkpoint
    >>> directory = tempfile.mkdtemp()
    >>> checkpoint.save(directory, {"w": torch.ones(3)}, step=7).wait().name
    'step-00000007.0'
    >>> checkpoint.restore(directory, like={"w": torch.zeros(3)})
    {'w': tensor([1., 1., 1.])}
    """
    exchange = Exchange(LABEL, mesh=mesh)
    with exchange.raise_on_all_ranks():
        check_flags(LABEL, asynchronous=asynchronous)
        check_arguments(LABEL, NUMBER, keep=1 if keep is None else keep)
        root = exchange.path("directory", directory)
        step = read_step(state, step)
        tensors, manifest = describe_state(exchange, state, step)
    same = {"(step)": step, "(directory)": f"{root}", "(keep)": keep, **manifest.values}
    holders = exchange.find_holders(tensors, {path: repr(value) for path, value in same.items()})
    boxes = choose_boxes(exchange.rank, tensors, holders)
    saving = _start(exchange, root, manifest, keep, boxes, asynchronous)
    if not asynchronous:
        try:
            saving.wait()
        except BaseException:
            # The program may go on and change the state, while some of it is not written yet.
            saving.cancel()
            raise
    return saving


def _start(
    exchange: Exchange,
    root: Path,
    manifest: files.Manifest,
    keep: int | None,
    boxes: Mapping[str, LocalBox],
    asynchronous: bool,
) -> Saving:
    """Make the directory of a new checkpoint, and begin to write this rank's boxes, or copies of them, there."""
    name = None
    with ExitStack() as stack:
        with exchange.raise_on_all_ranks(root):
            if asynchronous:
                copies = copy_to_host([box.tensor for box in boxes.values()])
                pairs = zip(boxes.items(), copies, strict=True)
                boxes = {path: box._replace(tensor=copy) for (path, box), copy in pairs}
            if exchange.rank == 0:
                stack.enter_context(lock(root))
                for leftover in complete_leftovers(root):
                    remove_directory(leftover)
                # Only now, because a rank of a killed run may complete its checkpoint until the leftovers are removed.
                temporary = choose_name(root, manifest.step, exchange.ranks.size)
                Unfinished(temporary).content.mkdir(parents=True)
                name = temporary.name
        unfinished = Unfinished(root / exchange.take_first(name), keep)
        file = unfinished.content / files.file_name(exchange.rank)
        write = partial(_write_file, file, exchange.rank, boxes, manifest)
        # The thread unlocks the directory of checkpoints, which the first rank has locked.
        return Saving(exchange, unfinished, write, stack.pop_all().close)


def read_step(state: Tree, step: Any) -> int:
    """Return the step to save a state as, and refuse it unless it is a whole number."""
    number: Any = getattr(state, "step", None) if step is None else step
    if torch.is_tensor(number) and number.numel() == 1:
        number = number.item()
    is_step = type(number) is int and 0 <= number < 10**18
    if not is_step:
        refuse_donated(LABEL, flatten(state))
    remedy = "pass step=, or a state that has one"
    expect(is_step, LABEL, "step to be a whole number from 0", f"{number!r:.40}", remedy)
    return number


def describe_state(exchange: Exchange, state: Tree, step: int) -> tuple[dict[str, Any], files.Manifest]:
    """Return the tensors by path and a manifest without chunks, and refuse leaves that cannot be saved."""
    flat = exchange.flat(state)
    refuse(f"{LABEL}: leaves cannot be saved", flat.problems(_describe_misfit), "keep them out of the state")
    leaves = dict(flat.named_leaves)
    tensors = {}
    stored = {}
    values = {}
    # The order of a dict's entries is no part of a state, and may differ between ranks.
    for path in sorted(leaves):
        leaf = leaves[path]
        if has_elements(leaf):
            tensors[path] = leaf
            stored[path] = files.StoredLeaf(files.name_of(leaf.dtype), tuple(leaf.shape), chunks=())
        else:
            values[path] = leaf
    return tensors, files.Manifest(step, stored, values)


def _describe_misfit(leaf: Any) -> tuple[str, str] | None:
    """Describe a leaf that cannot be saved, and the leaf expected in its place."""
    local = tensor_of(leaf)
    if type(local) is int and abs(local) >= INT_LIMIT:
        return "one of more", "an int of at most 4300 digits"
    if local is None or type(local) in (bool, int, float, str):
        return None
    if type(local) in (torch.Tensor, torch.nn.Parameter):
        has_values = local.layout == torch.strided and not local.is_meta
        if has_values and files.name_of(local.dtype) in files.SAVED:
            return None
    tensors = f"a strided tensor with values, of dtype {', '.join(files.SAVED)}"
    return describe(local), f"None, a bool, an int, a float, a str, or {tensors}"


def choose_boxes(rank: int, tensors: Mapping[str, Any], holders: Mapping[str, Sequence[int]]) -> dict[str, LocalBox]:
    """Choose the boxes that this rank writes: of those that the same ranks hold, each writes about as many bytes."""
    boxes = {}
    bytes_of_ranks = defaultdict[tuple[int, ...], Counter[int]](Counter)
    for path, ranks in holders.items():
        box = local_box(tensors[path])
        bytes_of_rank = bytes_of_ranks[tuple(ranks)]
        writer = min(ranks, key=bytes_of_rank.__getitem__)
        bytes_of_rank[writer] += box.tensor.nbytes
        if writer == rank and box.tensor.numel():
            boxes[path] = box
    return boxes


def _write_file(path: Path, rank: int, boxes: Mapping[str, LocalBox], manifest: files.Manifest) -> files.Manifest:
    """Write the boxes of this rank, if it has any, and return the manifest with their chunks."""
    if not boxes:
        return manifest
    kinds = {name: (box.tensor.dtype, box.tensor.shape) for name, box in boxes.items()}
    layout = files.lay_out(kinds, pairs=True)
    checksums = files.write_file(path, layout.header, (boxes[name].tensor for name in layout.starts))
    tensors = dict(manifest.tensors)
    for name, checksum in zip(layout.starts, checksums, strict=True):
        chunk = files.Chunk(rank, *boxes[name].box, checksum)
        tensors[name] = tensors[name]._replace(chunks=(chunk,))
    return manifest._replace(tensors=tensors)
