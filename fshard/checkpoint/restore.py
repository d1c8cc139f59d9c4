"""restore: read a checkpoint into a state of any layout, and refuse a damaged one."""

import os
import zlib
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fshard import _compat, comm
from fshard.checkpoint import directory as directories
from fshard.checkpoint.errors import CheckpointError, expect_file
from fshard.checkpoint.exchange import Exchange
from fshard.checkpoint.files import named, open_regular, read_bytes
from fshard.checkpoint.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Chunk,
    Leaf,
    Manifest,
    decode,
    digest,
    file_name,
    parts_of,
)
from fshard.checkpoint.pieces import (
    Piece,
    byte_view,
    described,
    empty_like,
    is_tensor,
    padded_with_zeros,
    piece_of,
)
from fshard.checkpoint.safetensors import BLOCK_BYTES, lay_out
from fshard.checkpoint.save import members
from fshard.errors import Problem, expect, leaf_error, refuse
from fshard.mesh import Mesh
from fshard.tree import (
    MASK,
    Flat,
    Mask,
    Sharded,
    Tree,
    is_mask,
    is_sharded,
    matches,
    tensor_of,
    unflatten,
)
from fshard.tree.checks import check_matches, describe

LABEL = "checkpoint.restore"


def latest(directory: str | PathLike[str]) -> int | None:
    """Return the step of the checkpoint that was saved last.

    Args:
        directory: Where checkpoints are kept.

    Returns:
        Its step, or None where there is no checkpoint.

    Raises:
        CheckpointError: if the file that names it is damaged, or cannot be read.

    >>> import tempfile, torch, fshard as fs
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     before = fs.checkpoint.latest(directory)
    ...     path = fs.checkpoint.save(directory, {"w": torch.ones(3)}, step=10).wait()
    ...     before, fs.checkpoint.latest(directory)
    (None, 10)
    """
    root = Exchange("checkpoint.latest").path("directory", directory)
    with named(root):
        path = directories.latest_path(root)
    return None if path is None else directories.step_of(path)


def restore(
    directory: str | PathLike[str],
    like: Tree,
    *,
    step: int | None = None,
    subtree: str = "",
    only: Mask | None = None,
    donate: bool = False,
    mesh: Mesh | None = None,
) -> Tree:
    """Read a checkpoint, bitwise, into any layout, mesh and number of ranks. Every rank must call this.

    Each chunk that this rank needs a part of is read as a whole and compared with its checksum.

    Args:
        directory: Where checkpoints are kept.
        like: A tree as it shall be: leaves say which dtype, shape, layout and device; their values are not used and
            may be on the meta device, which stands for the default one.
        step: Which checkpoint; None takes the one saved last.
        subtree: The path under which `like` lies in what was saved, such as ".params" of a TrainState.
        only: Which leaves of `like` to read, by a pattern of their names such as "head.*", several, or a function of
            (name, leaf); others stay as they are. None reads all, and refuses a checkpoint that has more.
        donate: Read into the memory of `like`, whose values are lost, also where reading fails half-way; otherwise
            there is room for both.
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
    exchange = Exchange(LABEL, ranks=members(LABEL, mesh, like))
    with exchange.raise_on_all_ranks():
        root = exchange.path("directory", directory)
        exchange.check_flags(donate=donate)
        flat = exchange.flat(like)
        wanted = _wanted(flat, only)
        _check_arguments(flat, wanted, step, subtree)
    path, manifest = _open(exchange, root, step)
    names = [subtree + ("" if name == "(root)" else name) for name in flat.paths]
    needed = {names[i]: leaf for i, leaf in enumerate(flat.leaves) if wanted[i]}
    _check_fit(exchange, needed, subtree, only is None, manifest, path)
    tensors = {name: leaf for name, leaf in needed.items() if is_tensor(leaf)}
    made: dict[str, Any] = {name: manifest.values[name] for name in needed if name not in tensors}
    with exchange.raise_on_all_ranks(path), _Reader(path, manifest) as reader:
        # The headers of files that nobody reads are checked too, by each rank its share.
        for index in range(exchange.rank, len(manifest.files), exchange.ranks.size):
            reader.open(index)
        made |= {name: reader.read(name, leaf, donate) for name, leaf in tensors.items()}
    return unflatten(flat.treedef, [made.get(name, leaf) for name, leaf in zip(names, flat.leaves, strict=True)])


def _wanted(flat: Flat, only: Mask | None) -> list[bool]:
    """For each leaf whether to read it."""
    if only is None:
        return [True] * len(flat.leaves)
    expect(is_mask(only), LABEL, f"only to be {MASK}", describe(only))
    check_matches(LABEL, [only], flat.names, flat.leaves)
    return [matches(only, name, leaf) for name, leaf in zip(flat.names, flat.leaves, strict=True)]


def _check_arguments(flat: Flat, wanted: list[bool], step: Any, subtree: Any) -> None:
    """Refuse leaves that nothing can be read into, and arguments of other types."""
    expect(step is None or type(step) is int, LABEL, "step to be an int, or None for the latest", describe(step))
    expect(isinstance(subtree, str), LABEL, "subtree to be a path such as '.params'", describe(subtree))
    problems = []
    for path, leaf, take in zip(flat.paths, flat.leaves, wanted, strict=True):
        local = tensor_of(leaf) if take and is_tensor(leaf) else None
        if local is None:
            continue
        if type(local) not in (torch.Tensor, torch.nn.Parameter) or local.layout != torch.strided:
            layout = str(local.layout).removeprefix("torch.")
            problems.append(Problem(path, f"{describe(local)}, {layout}", "a plain strided tensor"))
        elif local.is_meta and torch.get_default_device().type == "meta":
            problems.append(Problem(path, "a meta tensor where the default device is meta too", "room for values"))
    remedy = "pass a tree of plain tensors or Sharded leaves, and call restore outside of torch.device('meta')"
    refuse(f"{LABEL}: nothing can be read into some leaves", problems, remedy)


def _open(exchange: Exchange, root: Path, step: int | None) -> tuple[Path, Manifest]:
    """Find the checkpoint, the same on every rank, and read its manifest."""
    with exchange.raise_on_all_ranks(root):
        path = directories.latest_path(root) if step is None else directories.path_of(root, step)
        if path is None:
            raise CheckpointError(f"{root}: expected a checkpoint that fs.checkpoint.save wrote, got none")
        data = read_bytes(path / MANIFEST, MAX_MANIFEST_BYTES)
        try:
            manifest = decode(data)
        except CheckpointError as error:
            # The names in a hostile one may be long.
            raise CheckpointError(f"{path / MANIFEST}: {str(error)[:1000]}") from None
        named_step, remedy = directories.step_of(path), "give it its own name back"
        needed, found = f"step {named_step} as its name says", f"step {manifest.step}"
        expect_file(manifest.step == named_step, str(path), needed, found, remedy)
        needed_files = {MANIFEST, *map(file_name, range(len(manifest.files)))}
        for name in sorted(needed_files ^ set(os.listdir(path))):
            expect_file(name not in needed_files, f"{path / name}", "the file that the manifest names", "nothing")
            raise CheckpointError(f"{path / name}: found a file that the manifest does not name; move it elsewhere")
    entries = {"(checkpoint)": f"{path.name} of digest {digest(data)}"}
    exchange.agree(entries, "ranks read different checkpoints", "pass step=")
    return path, manifest


def _check_fit(
    exchange: Exchange, leaves: Mapping[str, Any], subtree: str, whole: bool, manifest: Manifest, path: Path
) -> None:
    """Refuse on every rank leaves that the checkpoint lacks, or has of another dtype, shape or type."""
    found = {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in manifest.tensors.items()}
    found |= {name: describe(value) for name, value in manifest.values.items()}
    needed = {name: described(leaf) if is_tensor(leaf) else describe(leaf) for name, leaf in leaves.items()}
    extra = sorted(name for name in found.keys() - needed.keys() if _is_under(name, subtree)) if whole else []
    problems = [
        Problem(name or "(root)", found.get(name, "nothing"), needed.get(name, "nothing"))
        for name in (*needed, *extra)
        if found.get(name) != needed.get(name)
    ]
    entries = {p.path: f"{p.got} instead of {p.expected}" for p in problems}
    difference = comm.disagreement(entries, [exchange.ranks], LABEL)
    problems = [difference] if difference else problems
    if problems:
        remedy = "restore into a state built as the one that was saved; only= and subtree= read parts of it"
        inner = {name[len(subtree) :]: need for name, need in needed.items()}
        first = next(iter(inner), "")
        # A tree that is one leaf may be any.
        places = [name.removesuffix(first) for name in manifest.tensors if name.endswith(first)] if first else []
        fitting = [place for place in places if all(found.get(place + n) == need for n, need in inner.items())]
        under = min(fitting, key=len, default=subtree)
        if under != subtree:
            remedy = f"pass subtree={under!r}, where the checkpoint has such leaves"
        raise leaf_error(f"{LABEL}: {path.name} does not fit", problems, remedy)


def _is_under(name: str, subtree: str) -> bool:
    return name.startswith(subtree) and (not subtree or name[len(subtree) : len(subtree) + 1] in ("", ".", "["))


class _File(NamedTuple):
    """An open file, and where each of its tensors begins."""

    descriptor: int
    starts: dict[str, int]


class _Reader:
    """The files of a checkpoint, each opened and checked when it is first needed.

    It reads into the memory of the result and compares as it goes, where maps of files, as readers of safetensors make
    them, cost a fault for each page and end the process when a file is cut short.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._path, self._manifest, self._parts = path, manifest, parts_of(manifest)
        self._open: dict[int, _File] = {}
        self._filled: set[int] = set()

    def __enter__(self) -> "_Reader":
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._open.values():
            os.close(file.descriptor)

    def open(self, index: int) -> _File:
        """Open a file, and compare its size and its header, which follows from the manifest, byte for byte."""
        if index not in self._open:
            path, needed = self._path / file_name(index), self._manifest.files[index]
            layout = lay_out(self._parts[index], pairs=True)
            descriptor = open_regular(path)
            self._open[index] = _File(descriptor, layout.starts)
            size = os.fstat(descriptor).st_size
            expect_file(size == needed.bytes, str(path), f"{needed.bytes} bytes", str(size))
            header = os.pread(descriptor, len(layout.header), 0)
            if header != layout.header or digest(header) != needed.header or layout.size != size:
                raise CheckpointError(f"{path}: its header does not match its digest, so it was damaged")
        return self._open[index]

    def read(self, name: str, like: Any, donated: bool) -> Any:
        """Read this rank's part of a leaf, into the memory of one that is donated."""
        made = self._taken(like) if donated else empty_like(like)
        piece = piece_of(made)
        for chunk, source, target in _overlaps(self._manifest.tensors[name], piece):
            whole = (chunk.offset, chunk.shape) == (piece.offset, piece.shape)
            if whole and piece.tensor.is_contiguous() and piece.tensor.device.type == "cpu":
                self._read_chunk(name, chunk, piece.tensor)
            else:
                room = torch.empty(chunk.shape, dtype=piece.tensor.dtype, device="cpu")
                self._read_chunk(name, chunk, room)
                piece.tensor[target].copy_(room[source])
        return made

    def _taken(self, like: Any) -> Any:
        """A donated leaf to be filled, or a new one where other tensors share its memory."""
        local = tensor_of(like)
        memory, is_shared = _compat.storage_key(local), _compat.shares_memory(local)
        local = local.detach()
        is_lazy = local.is_conj() or local.is_neg()
        if local.is_meta or is_lazy or not local.is_contiguous() or is_shared or memory in self._filled:
            return empty_like(like)
        self._filled.add(memory)
        return padded_with_zeros(Sharded(local, like.spec) if is_sharded(like) else local)

    def _read_chunk(self, name: str, chunk: Chunk, into: torch.Tensor) -> None:
        """Read a chunk into contiguous memory on the host."""
        path, file = self._path / file_name(chunk.file), self.open(chunk.file)
        data, checksum, at = byte_view(into), 0, file.starts[name]
        while data:
            block = data[:BLOCK_BYTES]
            count = os.preadv(file.descriptor, [block], at)
            if not count:
                raise CheckpointError(f"{path}: it was cut short while it was read")
            checksum = zlib.crc32(block[:count], checksum)
            data, at = data[count:], at + count
        if checksum != chunk.checksum:
            raise CheckpointError(f"{path}: the elements of {name} do not match their checksum, so it was damaged")


Slices = tuple[slice, ...]


def _overlaps(leaf: Leaf, piece: Piece) -> Iterator[tuple[Chunk, Slices, Slices]]:
    """The chunks that have elements of a piece, with the elements that both have, as slices of either."""
    # A rank that has nothing of a leaf without dims has a piece with one.
    for chunk in leaf.chunks if piece.tensor.numel() else ():
        first, second = [], []
        for a, n, b, m in zip(chunk.offset, chunk.shape, piece.offset, piece.shape, strict=True):
            start, stop = max(a, b), min(a + n, b + m)
            first.append(slice(start - a, stop - a))
            second.append(slice(start - b, stop - b))
        if all(part.start < part.stop for part in first):
            yield chunk, tuple(first), tuple(second)
