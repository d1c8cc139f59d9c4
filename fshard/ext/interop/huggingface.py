"""To and from safetensors as Hugging Face lays them out: one file, or several with an index."""

import json
import math
import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from fshard.checkpoint import CheckpointError
from fshard.ext.interop.transformers import Found, Planned, as_planned, from_files, is_pretrained, to_files
from fshard.extend import Entry, Exchange, describe, expect, piece_of, refuse

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
# A weight takes some 100 bytes of an index.
MAX_INDEX_BYTES = 1 << 28
# Leaves that one result or several small ones are made of are gathered together, up to this many bytes.
BUCKET_BYTES = 32 << 20

# Refuses a file unless it is as expected.
expect_file = partial(expect, error=CheckpointError)


def save_huggingface(
    directory: str | PathLike[str],
    params: Any,
    *,
    names: Callable[[str], str] | None = None,
    module: nn.Module | None = None,
    max_file_bytes: int = 5_000_000_000,
) -> None:
    """Write full parameters as a Hugging Face model has them, for `from_pretrained`. Every rank must call this.

    The first rank writes; of large leaves one is full at a time, or those that transformers converts together. The
    model's configuration is written by its own `config.save_pretrained`, before or after. Files appear when they are
    complete, the one that names the others last. Tied parameters are written once. To write another dtype, pass
    parameters that `fs.tree_map` has converted.

    Args:
        directory: Where the files go; made where there is none.
        params: Any pytree of parameters, perhaps with buffers, Sharded or full. Names are those of its leaves, joined
            by dots.
        names: What a leaf is called in the files, from its name. None takes it as it is, or as transformers calls it.
        module: The module whose parameters they are, on any device: buffers that are not persistent are then left out.
            For a model of transformers the files have the names and weights that its `save_pretrained` writes, where
            they are not those of the module: experts one by one, for instance.
        max_file_bytes: From how many bytes of tensors on another file is begun; a leaf is never cut.

    Raises:
        ValueError: on every rank, if a leaf is no tensor that safetensors can hold, ranks hold different leaves,
            two have one name, or parameters or buffers that the module saves are not there.
        CheckpointError: on every rank, if the directory has weights already, or files cannot be written.

    >>> import os, tempfile, torch, fshard as fs
    >>> from safetensors.torch import load_file
    >>> params = fs.shard({"w": torch.tensor([1.0, 2.0])}, fs.fully_shard(fs.init_mesh({"shard": -1}, device="cpu")))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     fs.checkpoint.save_huggingface(directory, params)
    ...     os.listdir(directory), load_file(f"{directory}/model.safetensors")
    (['model.safetensors'], {'w': tensor([1., 2.])})
    """
    exchange = Exchange("checkpoint.save_huggingface", module)
    whole = type(max_file_bytes) is int and max_file_bytes > 0
    expect(whole, exchange.label, "max_file_bytes to be a whole number from 1", repr(max_file_bytes))
    leaves = {name: leaf for name, leaf in exchange.leaves(params).items() if exchange.saved_as(name)}
    exchange.agree({"(directory)": str(directory)})
    lacking = [name for name in exchange.aliases if exchange.saved_as(name) and name not in leaves]
    problems = [(name, "nothing", "a parameter or a buffer that the module saves") for name in lacking]
    refuse(f"{exchange.label}: leaves do not fit", problems, "pass {**params, **buffers}")
    full: dict[str, torch.Tensor] = {}
    if names is None and is_pretrained(module):
        with exchange.raise_on_all_ranks():
            tensors = to_files(exchange, leaves, module, full)
    else:
        tensors = _renamed(exchange.label, {name: as_planned(leaves, name, full) for name in leaves}, names)
    known = ", ".join(map(_dtype_name, exchange.dtypes.values()))
    problems = [
        (name, f"dtype {_dtype_name(tensor.dtype)}", f"one of {known}")
        for name, tensor in tensors.items()
        if tensor.dtype not in exchange.dtypes.values()
    ]
    refuse(f"{exchange.label}: safetensors has no such dtype", problems, "convert these leaves by fs.tree_map")
    exchange.replicas(leaves)
    with exchange.new_files(directory, (SINGLE, INDEX)) as temporary:
        _write(exchange, temporary, leaves, tensors, full, exchange.in_groups(tensors, max_file_bytes))


def load_huggingface(
    directory: str | PathLike[str],
    like: Any,
    *,
    names: Callable[[str], str] | None = None,
    module: nn.Module | None = None,
    strict: bool = True,
    cast: bool = False,
    trusted: bool = False,
) -> Any:
    """Read the weights of a Hugging Face model into parameters of any layout. Every rank must call this.

    Each rank reads the slices it keeps and no more. Where transformers has other names in files than in the model, or
    other weights (experts one by one, which the model stacks), its own conversion runs, as in `from_pretrained`. A
    conversion that stacks, joins, cuts or transposes reads only the slices that a rank needs too; any other is done in
    full, one leaf at a time.

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
        trusted: Whether weights that are pickled (*.bin), where there are no others, may be read. Only tensors are
            taken from them, but a pickle can be made to run code as it is read.

    Returns:
        A tree of the structure, specs, dtypes and devices of `like`.

    Raises:
        ValueError: on every rank, with every leaf that the files lack, have otherwise or have besides.
        CheckpointError: on every rank, if there are no weights, they are pickled and not trusted, a file is
            damaged or leads elsewhere, or transformers cannot convert its weights.

    >>> import tempfile, torch, fshard as fs
    >>> params = fs.shard({"w": torch.tensor([1.0, 2.0])}, fs.fully_shard(fs.init_mesh({"shard": -1}, device="cpu")))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     fs.checkpoint.save_huggingface(directory, params)
    ...     loaded = fs.checkpoint.load_huggingface(directory, like=fs.tree_map(torch.zeros_like, params))
    >>> loaded, loaded["w"].local
    ({'w': Sharded(float32[2], P('shard'), local [2])}, tensor([1., 2.]))
    """
    exchange = Exchange("checkpoint.load_huggingface", module)
    with ExitStack() as stack:
        with exchange.raise_on_all_ranks(directory):
            exchange.check_flags(trusted=trusted, strict=strict)
            found = Found(_open(exchange, exchange.path("directory", directory), stack, trusted))
            if names is None and is_pretrained(module):
                found = from_files(found.entries, module)
        own = [*exchange.first, *exchange.leaves(like)]
        _check_names(exchange.label, names)
        entries = _as_ours(found.entries, own, names)
        return exchange.fill(entries, like, cast, found.optional, strict)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_names(label: str, names: Any) -> None:
    known = names is None or callable(names)
    expect(known, label, "names to be a function of a name, or None", describe(names))


def _renamed(label: str, leaves: dict[str, Any], names: Callable[[str], str] | None) -> dict[str, Any]:
    if names is None:
        return leaves
    _check_names(label, names)
    out: dict[str, Any] = {}
    for name, leaf in leaves.items():
        new = names(name)
        if type(new) is not str or new in out:
            found = "the name of another leaf" if new in out else describe(new)
            refuse(f"{label}: names do not fit", [(name, found, "a name of its own")], "change names=")
        out[new] = leaf
    return out


def _as_ours(found: dict[str, Entry], own: list[str], names: Callable[[str], str] | None) -> dict[str, Entry]:
    """Return the entries of files under the names that leaves have."""
    if names is None:
        return found
    ours = {names(name): name for name in own}
    # A name of the files that no leaf is called there must not pass for a leaf's own.
    return {ours.get(name, f"{name} (in the files)"): entry for name, entry in found.items()}


def _write(
    exchange: Exchange,
    directory: Path,
    leaves: Mapping[str, Any],
    tensors: Mapping[str, Planned],
    full: dict[str, torch.Tensor],
    groups: list[list[str]],
) -> None:
    """Write a file of each group on the first rank; every rank gathers all leaves, also when the first cannot write."""
    # The order in which tensors are written.
    groups = [sorted(group, key=lambda name: -tensors[name].dtype.itemsize) for group in groups]
    number = len(groups)
    files = [SINGLE] if number == 1 else [f"model-{i:05d}-of-{number:05d}.safetensors" for i in range(1, number + 1)]
    sources = {name: tensors[name].sources for group in groups for name in group}
    gathering = _gathered_for(exchange, sources, leaves, full)
    try:
        if exchange.rank:
            return
        for file, group in zip(files, groups, strict=True):
            parts = {name: tensors[name] for name in group}
            exchange.write_safetensors(directory / file, parts, lambda _: tensors[next(gathering)].value())
        if number > 1:
            where = {name: file for file, group in zip(files, groups, strict=True) for name in group}
            total = sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values())
            index = {"metadata": {"total_size": total}, "weight_map": where}
            with open(directory / INDEX, "xb") as listing:
                listing.write(json.dumps(index, indent=2, sort_keys=True).encode())
                listing.flush()
                os.fsync(listing.fileno())
    finally:
        for _ in gathering:
            pass


def _gathered_for(
    exchange: Exchange, sources: Mapping[str, Collection[str]], leaves: Mapping[str, Any], full: dict[str, torch.Tensor]
) -> Iterator[str]:
    """Name one result after the other, when the leaves that it is made of are full. Every rank must take all.

    Args:
        exchange: The exchange.
        sources: The names of the leaves of each result.
        leaves: The leaves by name.
        full: Where full leaves are put, those of one result or of several with small leaves at a time.
    """

    def nbytes_of(names: Collection[str]) -> int:
        pieces = [piece_of(leaves[name]) for name in names]
        return sum(piece.tensor.element_size() * math.prod(piece.full_shape) for piece in pieces)

    buckets: list[tuple[list[str], dict[str, Any]]] = [([], {})]
    room = BUCKET_BYTES
    for result, names in sources.items():
        new = [name for name in sorted(names) if name not in buckets[-1][1]]
        if new and buckets[-1][0] and nbytes_of(new) > room:
            buckets.append(([], {}))
            room, new = BUCKET_BYTES, sorted(names)
        buckets[-1][0].append(result)
        buckets[-1][1].update({name: leaves[name] for name in new})
        room -= nbytes_of(new)
    for results, needed in buckets:
        full.update(exchange.full(needed))
        yield from results
        full.clear()


def _open(exchange: Exchange, directory: Path, stack: ExitStack, trusted: bool) -> dict[str, Entry]:
    """The tensors of a model's files, by name."""
    names = sorted(os.listdir(directory))
    # As transformers looks for them; other libraries have other names for the same, and pickles come last.
    candidates = [name for name in (SINGLE, INDEX) if name in names][:1]
    candidates = candidates or [name for name in names if name.endswith(".safetensors.index.json")]
    candidates = candidates or [name for name in names if name.endswith(".safetensors")]
    if not candidates:
        candidates = [name for name in PICKLED if name in names][:1]
        expect_file(candidates, str(directory), f"{SINGLE} or {INDEX}", "neither")
        exchange.refuse_untrusted(directory / candidates[0], trusted)
    found_names, remedy = ", ".join(candidates), "move others elsewhere"
    expect_file(len(candidates) < 2, str(directory), "one of its files of weights", found_names, remedy)
    (name,) = candidates
    where = _weight_map(directory / name) if name.endswith(".json") else {}
    found: dict[str, Entry] = {}
    for file in dict.fromkeys(where.values()) or [name]:
        for tensor, entry in _tensors(exchange, directory / file, stack).items():
            expect_file(tensor not in found, f"{directory / file}", f"{tensor} in one file", "it in another too")
            found[tensor] = entry
    for tensor, file in where.items():
        expect_file(tensor in found, f"{directory / file}", f"{tensor} as {name} says", "none")
    return found


def _weight_map(path: Path) -> dict[str, str]:
    _check_regular(path)
    size = path.stat().st_size
    expect_file(size <= MAX_INDEX_BYTES, str(path), f"at most {MAX_INDEX_BYTES} bytes", str(size))
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: it is no JSON ({error})") from None
    where = document.get("weight_map") if isinstance(document, dict) else None
    expect_file(isinstance(where, dict) and where, str(path), "a weight_map from tensors to files", "none")
    assert isinstance(where, dict)
    suffix = path.name.removesuffix(".index.json").rpartition(".")[2]
    for tensor, file in where.items():
        plain = isinstance(file, str) and file == os.path.basename(file) and "\0" not in file
        beside = plain and file.endswith(f".{suffix}")
        expect_file(beside, str(path), f"a .{suffix} file beside the index", f"{file!r} for {tensor}")
    return where


def _tensors(exchange: Exchange, path: Path, stack: ExitStack) -> dict[str, Entry]:
    _check_regular(path)
    if path.suffix == ".bin":
        return exchange.read_pickle(path)
    dtypes, found = exchange.dtypes, {}
    try:
        file = stack.enter_context(safe_open(path, framework="pt"))
        for name in file.keys():  # noqa: SIM118 - it is no dict
            part = file.get_slice(name)
            stored = part.get_dtype()
            expect_file(stored in dtypes, str(path), f"{name} to have a dtype of {list(dtypes)}", stored)
            found[name] = Entry(dtypes[stored], tuple(part.get_shape()), part.__getitem__)
    except SafetensorError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return found


def _check_regular(path: Path) -> None:
    # Links are followed: the cache of huggingface_hub is made of them.
    expect_file(stat.S_ISREG(path.stat().st_mode), str(path), "a regular file", "something else")
