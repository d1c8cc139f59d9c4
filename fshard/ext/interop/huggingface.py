"""To and from safetensors as Hugging Face lays them out: one file, or several with an index."""

import json
import math
import os
import stat
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

import fshard as fs
from fshard.checkpoint import CheckpointError
from fshard.ext.interop import shared_files
from fshard.ext.interop.export import new_files
from fshard.ext.interop.module_exchange import ModuleExchange
from fshard.ext.interop.shared_files import CHECKSUMS, Checked, Kind, Part
from fshard.ext.interop.transformers import Planned, as_planned, from_files, is_pretrained, to_files
from fshard.extend import Entry, describe, expect, piece_of, refuse

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# The entry of a file's header that is no tensor.
METADATA = "__metadata__"

# Refuses a file unless it is as expected.
expect_file = partial(expect, error=CheckpointError)


def save_huggingface(
    directory: str | PathLike[str],
    params: Any,
    *,
    names: Callable[[str], str] | None = None,
    module: nn.Module | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5_000_000_000,
) -> None:
    """Write full parameters as a Hugging Face model has them, for `from_pretrained`. Every rank must call this.

    Each rank writes its own shards into the files. Leaves are gathered only where transformers converts weights, and
    only those that it converts together. The model's configuration is written by its own `config.save_pretrained`,
    before or after. Files appear when they are complete, the one that names the others last; checksums.json has the
    CRC-32 of each box that a rank wrote. Tied parameters are written once.

    Args:
        directory: Where the files go; made where there is none. A directory that has one of the files, such as an
            earlier export, is refused before anything is written: remove it, or write each export to a new directory.
            Ranks on several hosts need a file system that lets them write to one file at once, such as Lustre or GPFS,
            not NFS.
        params: Any pytree of parameters, perhaps with buffers, Sharded or full. Names are those of its leaves, joined
            by dots.
        names: What a leaf is called in the files, from its name. None takes it as it is, or as transformers calls it.
        module: The module whose parameters they are, on any device: buffers that are not persistent are then left out.
            For a model of transformers the files have the names and weights that its `save_pretrained` writes, where
            they are not those of the module: experts one by one, for instance.
        dtype: What leaves of floating numbers are cast to on the way; None keeps their dtypes.
        max_file_bytes: From how many bytes of tensors on another file is begun; a leaf is never cut.

    Raises:
        ValueError: on every rank, if a leaf is no tensor that safetensors can hold, ranks hold different leaves,
            two have one name, a name is "__metadata__" or no valid Unicode, or parameters or buffers that the module
            saves are not there.
        CheckpointError: on every rank, if the directory has one of the files already, or files cannot be written.

    >>> import os, tempfile, torch, fshard as fs
    >>> from safetensors.torch import load_file
    >>> params = fs.shard({"w": torch.tensor([1.0, 2.0])}, fs.fully_shard(fs.init_mesh({"shard": -1}, device="cpu")))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     fs.checkpoint.save_huggingface(directory, params)
    ...     sorted(os.listdir(directory)), load_file(f"{directory}/model.safetensors")
    (['checksums.json', 'model.safetensors'], {'w': tensor([1., 2.])})
    """
    exchange = ModuleExchange("checkpoint.save_huggingface", module)
    given = exchange.leaves(params)
    leaves = {name: leaf for name, leaf in given.items() if exchange.saved_as(name)}
    full: dict[str, torch.Tensor] = {}
    with exchange.raise_on_all_ranks():
        is_whole = type(max_file_bytes) is int and max_file_bytes > 0
        expect(is_whole, exchange.label, "max_file_bytes to be a whole number from 1", repr(max_file_bytes))
        is_floating = dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
        expect(is_floating, exchange.label, "dtype to be one of floating numbers, or None", f"{dtype!r:.40}")
        needed, lacking = "a parameter or a buffer that the module saves", exchange.saved.keys() - leaves.keys()
        problems = [(name, "nothing", needed) for name in sorted(lacking)]
        refuse(f"{exchange.label}: leaves do not fit", problems, "pass {**params, **buffers}")
        if names is None and is_pretrained(module):
            tensors = to_files(exchange, leaves, module, full)
        else:
            tensors = _renamed(exchange.label, {name: as_planned(leaves, name, full) for name in leaves}, names)
        _check_readable(exchange.label, tensors)
    files = _in_files(tensors, dtype, max_file_bytes)
    listed = {f"({file})": "\n".join(map(str, kinds.items())) for file, kinds in files.items()}
    held = exchange.replicas(leaves, {"(directory)": f"{directory}", **listed})
    with new_files(exchange, directory, (CHECKSUMS, SINGLE, INDEX), files) as temporary:
        results = [tensors[name] for kinds in files.values() for name in kinds]
        sums = shared_files.write(exchange, temporary, files, _parts(exchange, leaves, held, results, full))
        if not exchange.rank:
            (temporary / CHECKSUMS).write_text(json.dumps(sums))
            if SINGLE not in files:
                (temporary / INDEX).write_text(_index(files))


def load_huggingface(
    directory: str | PathLike[str],
    like: Any,
    *,
    names: Callable[[str], str] | None = None,
    module: nn.Module | None = None,
    strict: bool = True,
    cast: bool = False,
) -> Any:
    """Read the weights of a Hugging Face model into parameters of any layout. Every rank must call this.

    Each rank reads the slices it keeps. Where there are checksums it also reads the whole boxes around them, and
    refuses a box that has other bytes than were written. Where transformers has other names in files than in the model,
    or other weights (experts one by one, which the model stacks), its own conversion runs, as in `from_pretrained`. Of
    weights that it stacks or joins a rank reads only what it needs; any other conversion is done in full, one leaf at a
    time.

    Args:
        directory: Where the weights are: one safetensors file, or several with an index.
        like: Parameters as they shall be, perhaps with buffers: leaves say which dtype, shape and layout; their values
            are not used and may be on the meta device.
        names: What a leaf is called in the files, from its name. None takes it as it is, or as transformers calls it.
        module: The module whose parameters they are, on any device: files may then have a tied parameter under any of
            its names, or under several with the same values, and buffers that are not persistent stay as they are in
            `like`. A model of transformers is needed for its conversion.
        strict: Whether files must have every leaf and nothing else. False is for a model with a head on the weights of
            one without, and the other way: leaves that are not in the files stay as they are in `like`, and weights
            that are not in `like` are not read.
        cast: Whether to convert from one floating dtype to another.

    Returns:
        A tree of the structure, specs, dtypes and devices of `like`.

    Raises:
        ValueError: on every rank, with every leaf that the files lack, have otherwise or have besides.
        CheckpointError: on every rank, if there are no safetensors, a file is damaged or leads elsewhere, or
            transformers cannot convert its weights.

    >>> import tempfile, torch, fshard as fs
    >>> params = fs.shard({"w": torch.tensor([1.0, 2.0])}, fs.fully_shard(fs.init_mesh({"shard": -1}, device="cpu")))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     fs.checkpoint.save_huggingface(directory, params)
    ...     loaded = fs.checkpoint.load_huggingface(directory, like=fs.tree_map(torch.zeros_like, params))
    >>> loaded, loaded["w"].local
    ({'w': Sharded(float32[2], P('shard'), local [2])}, tensor([1., 2.]))
    """
    exchange = ModuleExchange("checkpoint.load_huggingface", module)
    with ExitStack() as stack:
        with exchange.raise_on_all_ranks(directory):
            found = _open(exchange.path("directory", directory), stack)
            optional: Container[str] = ()
            if names is None and is_pretrained(module):
                found, optional = from_files(found, module)
        leaves = exchange.leaves(like, cast=cast, strict=strict)
        if names is not None:
            _check_names(exchange.label, names)
            ours = {names(name): name for name in (*exchange.first, *leaves)}
            # A name of the files that no leaf is called there must not pass for a leaf's own.
            found = {ours.get(name, f"{name} (in the files)"): entry for name, entry in found.items()}
        if not strict:
            optional = leaves
            found = {name: entry for name, entry in found.items() if exchange.first.get(name, name) in leaves}
            expect(found or not leaves, exchange.label, "names of leaves among those in the files", "none of them")
        return exchange.with_leaves(like, exchange.fill(found, leaves, cast, optional))


def _check_names(label: str, names: Any) -> None:
    expect(names is None or callable(names), label, "names to be a function of a name, or None", describe(names))


def _renamed(label: str, leaves: dict[str, Any], names: Callable[[str], str] | None) -> dict[str, Any]:
    _check_names(label, names)
    out: dict[str, Any] = {}
    for name, leaf in leaves.items():
        new = name if names is None else names(name)
        if type(new) is not str or new in out:
            found = "the name of another leaf" if new in out else describe(new)
            refuse(f"{label}: names do not fit", [(name, found, "a name of its own")], "change names=")
        out[new] = leaf
    return out


def _check_readable(label: str, names: Iterable[str]) -> None:
    """Refuse names of tensors that readers of safetensors do not take; they would not read the other tensors either."""
    problems = []
    for name in names:
        printable = name.encode(errors="backslashreplace").decode()
        if name == METADATA:
            problems.append((name, "a name that safetensors uses itself", "another name"))
        elif name != printable:
            problems.append((printable, "half of a surrogate pair", "a name that UTF-8 can encode"))
    refuse(f"{label}: safetensors cannot hold these names", problems, "give these leaves other names by names=")


def _in_files(
    tensors: Mapping[str, Planned], dtype: torch.dtype | None, max_file_bytes: int
) -> dict[str, dict[str, Kind]]:
    """The tensors of each file: at most so many bytes, or one tensor, in the order in which a file has them."""
    groups: list[dict[str, Kind]] = [{}]
    room = max_file_bytes
    for name, tensor in tensors.items():
        kind = (dtype if dtype and tensor.dtype.is_floating_point else tensor.dtype, tensor.shape)
        if groups[-1] and _nbytes(kind) > room:
            groups.append({})
            room = max_file_bytes
        groups[-1][name] = kind
        room -= _nbytes(kind)
    number = len(groups)
    names = [SINGLE] if number == 1 else [f"model-{i:05d}-of-{number:05d}.safetensors" for i in range(1, number + 1)]
    ordered = [dict(sorted(group.items(), key=lambda item: -item[1][0].itemsize)) for group in groups]
    return dict(zip(names, ordered, strict=True))


def _nbytes(kind: Kind) -> int:
    return math.prod(kind[1]) * kind[0].itemsize


def _parts(
    exchange: ModuleExchange,
    leaves: Mapping[str, Any],
    held: Mapping[str, Mapping[Any, Sequence[int]]],
    results: Sequence[Planned],
    full: dict[str, torch.Tensor],
) -> Iterator[Part | None]:
    """Give what this rank writes of one result after the other; those that hold the same take turns.

    Of a result that is converted its leaves are gathered before, so that every rank must take all.
    """
    for number, result in enumerate(results):
        ranks: Sequence[int] = range(exchange.ranks.size)
        if result.leaf is None:
            for name in full.keys() - result.sources:
                del full[name]
            full.update(fs.unshard({name: leaves[name] for name in sorted(result.sources - full.keys())}))
            part: Part = (0,) * result.dim(), result.value
        else:
            offset, tensor, _ = piece_of(leaves[result.leaf])
            ranks, part = held[result.leaf][offset, tuple(tensor.shape)], (offset, tensor.detach)
        yield part if ranks[number % len(ranks)] == exchange.rank else None


def _index(files: Mapping[str, Mapping[str, Kind]]) -> str:
    total = sum(_nbytes(kind) for kinds in files.values() for kind in kinds.values())
    where = {name: file for file, kinds in files.items() for name in kinds}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2, sort_keys=True)


def _open(directory: Path, stack: ExitStack) -> dict[str, Entry]:
    """The tensors of a model's files, by name."""
    names = sorted(os.listdir(directory))
    # As transformers looks for them; other libraries have other names for the same.
    candidates = (
        [name for name in (SINGLE, INDEX) if name in names][:1]
        or [name for name in names if name.endswith(".safetensors.index.json")]
        or [name for name in names if name.endswith(".safetensors")]
    )
    found_names, remedy = ", ".join(candidates) or "none", "move others elsewhere"
    expect_file(len(candidates) == 1, f"{directory}", f"{SINGLE}, {INDEX} or one file of weights", found_names, remedy)
    (name,) = candidates
    where = _weight_map(directory / name) if name.endswith(".json") else {}
    sums = shared_files.read_checksums(directory)
    found: dict[str, Entry] = {}
    for file in dict.fromkeys(where.values()) or [name]:
        for tensor, entry in _tensors(directory / file, sums, stack).items():
            # A tensor may be in several files, of which the index names one.
            if where.get(tensor, file) == file:
                found[tensor] = entry
    return found


def _weight_map(path: Path) -> dict[str, str]:
    _check_regular(path)
    try:
        where = json.loads(path.read_bytes())["weight_map"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{path}: found no map from tensors to files ({type(error).__name__})") from None
    expect_file(isinstance(where, dict) and where, f"{path}", "a map from tensors to files", "none")
    for tensor, file in where.items():
        fits = isinstance(file, str) and file == os.path.basename(file) and file.endswith(".safetensors")
        expect_file(fits, f"{path}", "a .safetensors file beside the index", f"{file!r} for {tensor}")
    return dict(where)


def _tensors(path: Path, sums: Mapping[str, Sequence[Checked]] | None, stack: ExitStack) -> dict[str, Entry]:
    _check_regular(path)
    found = {}
    try:
        file = stack.enter_context(safe_open(path, framework="pt"))
        for name in file.keys():  # noqa: SIM118 - it is no dict
            part = file.get_slice(name)
            shape = tuple(part.get_shape())
            read = partial(shared_files.read, path, name, part, None if sums is None else sums.get(name, ()))
            found[name] = Entry(part[tuple(slice(0, 0) for _ in shape)].dtype, shape, read)
    except SafetensorError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return found


def _check_regular(path: Path) -> None:
    # Links are followed: the cache of huggingface_hub is made of them.
    expect_file(stat.S_ISREG(path.stat().st_mode), f"{path}", "a regular file", "something else")
