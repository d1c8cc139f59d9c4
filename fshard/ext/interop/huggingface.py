"""To and from safetensors as Hugging Face lays them out: one file, or several with an index."""

import fnmatch
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
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
from fshard.ext.interop.shared_files import CHECKSUMS, Part, TensorKinds, WrittenTensors
from fshard.ext.interop.transformers import PlannedTensor, from_files, is_pretrained, plan_leaf, to_files
from fshard.extend import FLOATING, NUMBER, Entry, Problem, check_arguments, choose_boxes, describe, expect, refuse

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# The entry of a file's header that is no tensor.
METADATA = "__metadata__"

# What a leaf is called in the files, by its name here.
Names = Callable[[str], str]
PlannedTensors = Mapping[str, PlannedTensor]


def save_huggingface(
    directory: str | PathLike[str],
    params: Any,
    *,
    names: Names | None = None,
    module: nn.Module | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5_000_000_000,
) -> None:
    """Write parameters as safetensors that `from_pretrained` of a Hugging Face model loads. Every rank must call this.

    Each rank writes its own shards into the files. Leaves are gathered only if transformers converts them, and then no
    more than it converts together. Files appear when they are complete, and `model.safetensors` (or its index) appears
    last. checksums.json has the CRC-32 of each box that a rank wrote. Tied parameters are written once. To write the
    model's configuration, call its own `config.save_pretrained` before or after.

    Args:
        directory: Where the files go; made where there is none. A directory that has one of the files, such as an
            earlier export, is refused before anything is written: remove it, or write each export to a new directory.
            Ranks on several hosts need a file system that lets them write to one file at once, such as Lustre or GPFS,
            not NFS.
        params: Any pytree of parameters, perhaps with buffers, Sharded or full. Names are those of its leaves, joined
            by dots.
        names: Returns the name of a leaf in the files, by its name here. None keeps the name, or takes that of
            transformers.
        module: The module whose parameters they are, on any device. Buffers that are not persistent are then left out,
            and a model of transformers gets the names and weights that its `save_pretrained` writes, for instance
            experts one by one.
        dtype: The dtype that leaves of floating numbers are cast to; None keeps their dtypes.
        max_file_bytes: The most bytes of tensors in one file. A leaf is never split: a larger one has its own file.

    Raises:
        ValueError: on every rank, if a leaf is no tensor that safetensors can hold, ranks hold different leaves,
            two leaves have one name, a name is "__metadata__" or no valid Unicode, or parameters or buffers that the
            module saves are missing.
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
    leaves = {name: leaf for name, leaf in exchange.leaves(params).items() if name not in exchange.unsaved}
    full: dict[str, torch.Tensor] = {}
    with exchange.raise_on_all_ranks():
        check_arguments(exchange.label, NUMBER, max_file_bytes=max_file_bytes)
        check_arguments(exchange.label, FLOATING, dtype=dtype)
        absent = sorted(exchange.saved.keys() - leaves.keys())
        problems = [Problem(name, "is saved by the module, and not among the leaves") for name in absent]
        refuse(f"{exchange.label}: leaves do not fit", problems, "pass {**params, **buffers}")
        if names is None and is_pretrained(module):
            tensors = to_files(exchange, leaves, module, full)
        else:
            renamed = _rename(exchange.label, leaves, names)
            tensors = {new_name: plan_leaf(leaves, name, full) for new_name, name in renamed.items()}
    files = _assign_files(tensors, dtype, max_file_bytes)
    texts = {"(directory)": f"{directory}"}
    for file, kinds in files.items():
        texts |= {f"({file}) {name}": f"{kind.dtype}{[*kind.shape]}" for name, kind in kinds.items()}
    holders = exchange.find_holders(leaves, texts)
    boxes = choose_boxes(exchange.rank, leaves, holders)
    with new_files(exchange, directory, (CHECKSUMS, SINGLE, INDEX), files) as temporary:
        results = [tensors[name] for name in chain.from_iterable(files.values())]
        parts = _make_parts(exchange, leaves, boxes, results, full)
        shared_files.write(exchange, temporary, files, parts)
        if exchange.rank == 0 and SINGLE not in files:
            (temporary / INDEX).write_text(_make_index(files))


def load_huggingface(
    directory: str | PathLike[str],
    like: Any,
    *,
    names: Names | None = None,
    module: nn.Module | None = None,
    strict: bool = True,
    cast: bool = False,
) -> Any:
    """Read the weights of a Hugging Face model into parameters of any layout. Every rank must call this.

    Each rank reads the slices that it keeps. If there are checksums, it also reads the whole boxes around them, and
    refuses a box that has other bytes than were written. If transformers has other names or weights in files than in
    the model (such as experts one by one, which the model stacks), its own conversion runs, as in `from_pretrained`. A
    rank reads only its part of weights that are stacked or joined. Any other conversion runs in full, one leaf at a
    time.

    Args:
        directory: Where the weights are: one safetensors file, or several with an index.
        like: A tree of the parameters to make, perhaps with buffers. Its leaves give the dtype, shape and layout; their
            values are not used and may be on the meta device.
        names: Returns the name of a leaf in the files, by its name here. None keeps the name, or takes that of
            transformers.
        module: The module whose parameters they are, on any device. The files may then have a tied parameter under any
            of its names, or under several with the same values, and buffers that are not persistent stay as they are in
            `like`. Pass a model of transformers to have its weights converted.
        strict: Whether the files must have every leaf and nothing else. With False, leaves that are not in the files
            stay as they are in `like`, and weights that are not in `like` are not read: for a model with a head on
            weights without one, or the other way round.
        cast: Whether to convert from one floating dtype to another.

    Returns:
        A tree of the structure, specs, dtypes and devices of `like`.

    Raises:
        ValueError: on every rank, with every leaf that is missing in the files, differs there, or is unexpected.
        CheckpointError: on every rank, if there are no safetensors, a file is damaged, the index names a file
            elsewhere, or transformers cannot convert the weights.

    >>> import tempfile, torch, fshard as fs
    >>> params = fs.shard({"w": torch.tensor([1.0, 2.0])}, fs.fully_shard(fs.init_mesh({"shard": -1}, device="cpu")))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     fs.checkpoint.save_huggingface(directory, params)
    ...     loaded = fs.checkpoint.load_huggingface(directory, like=fs.tree_map(torch.zeros_like, params))
    >>> loaded, loaded["w"].local
    ({'w': Sharded(float32[2], P('shard'), local [2])}, tensor([1., 2.]))
    """
    exchange = ModuleExchange("checkpoint.load_huggingface", module)
    with exchange.raise_on_all_ranks(directory):
        entries, lacking = _open(exchange.path("directory", directory))
        optional: frozenset[str] = frozenset()
        if names is None and is_pretrained(module):
            entries, optional = from_files(entries, module)
    leaves = exchange.leaves(like, needs_values=False, cast=cast, strict=strict)
    with exchange.raise_on_all_ranks():
        if names is not None:
            renamed = _rename(exchange.label, filter(exchange.saved_as, leaves), names)
            for name in chain(*exchange.saved.values(), exchange.unsaved):
                renamed.setdefault(names(name), name)
            # A tensor may have the name of a leaf that `names` calls otherwise, and must not be taken for it.
            entries = {renamed.get(name, f"{name} (in the files)"): entry for name, entry in entries.items()}
        present = {exchange.first.get(name, name) for name in entries}
        absent = leaves.keys() - present - exchange.unsaved - optional
        # Weights that only the index has do no harm where every leaf is found, such as those of a tied head.
        if absent and lacking:
            raise CheckpointError(f"{lacking[0]}, which does not have it; fetch the directory anew")
    if not strict:
        optional = frozenset(leaves)
        entries = {name: entry for name, entry in entries.items() if exchange.first.get(name, name) in leaves}
        if leaves and not entries:
            remedy = "names= gives leaves the names that they have in the files"
            raise ValueError(f"{exchange.label}: none of the leaves is in the files; {remedy}")
    filled = exchange.fill(entries, leaves, cast, optional)
    return exchange.with_leaves(like, filled)


def _rename(label: str, leaves: Iterable[str], names: Names | None) -> dict[str, str]:
    """Return the names of leaves by those that they have in the files, and refuse names that no reader takes."""
    names = str if names is None else names
    expect(callable(names), label, "names to be a function of a name, or None", describe(names))
    renamed: dict[str, str] = {}
    problems = []
    for name in leaves:
        new_name = names(name)
        if type(new_name) is not str:
            problems.append(Problem(name, f"is called {describe(new_name)}, which is no text"))
        elif new_name in renamed:
            problems.append(Problem(name, f"is called {new_name!r}, as another leaf is"))
        elif new_name == METADATA:
            problems.append(Problem(name, f"is called {new_name!r}, a name that safetensors uses itself"))
        elif (printable := new_name.encode(errors="backslashreplace").decode()) != new_name:
            text = "is called so, with half of a surrogate pair, which UTF-8 cannot encode"
            problems.append(Problem(printable, text))
        else:
            renamed[new_name] = name
    refuse(f"{label}: names do not fit", problems, "give leaves other names by names=")
    return renamed


def _assign_files(tensors: PlannedTensors, dtype: torch.dtype | None, max_file_bytes: int) -> dict[str, TensorKinds]:
    """Choose the tensors of each file: at most so many bytes, or one tensor, in the order in which a file has them."""
    groups: list[dict[str, torch.Tensor]] = [{}]
    room = max_file_bytes
    for name, tensor in tensors.items():
        is_cast = dtype is not None and tensor.dtype.is_floating_point
        kind = torch.empty(tensor.shape, dtype=dtype if is_cast else tensor.dtype, device="meta")
        if groups[-1] and kind.nbytes > room:
            groups.append({})
            room = max_file_bytes
        groups[-1][name] = kind
        room -= kind.nbytes
    files: dict[str, TensorKinds] = {}
    for number, group in enumerate(groups, start=1):
        several = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        file = SINGLE if len(groups) == 1 else several
        files[file] = dict(sorted(group.items(), key=lambda item: -item[1].dtype.itemsize))
    return files


def _make_parts(
    exchange: ModuleExchange,
    leaves: Mapping[str, Any],
    boxes: Mapping[str, tuple[tuple[int, ...], torch.Tensor]],
    results: Sequence[PlannedTensor],
    full: dict[str, torch.Tensor],
) -> Iterator[Part | None]:
    """Make the part of each result that this rank writes, one result after another.

    The leaves that transformers converts are gathered just before their result, which ranks write in turns, so every
    rank must take all parts.
    """
    for number, result in enumerate(results):
        part = None
        if result.leaf is None:
            for name in full.keys() - result.sources:
                del full[name]
            shards = {name: leaves[name] for name in sorted(result.sources - full.keys())}
            full.update(fs.unshard(shards))
            if number % exchange.ranks.size == exchange.rank:
                part = Part((0,) * result.dim(), result.value)
        elif result.leaf in boxes:
            offset, tensor = boxes[result.leaf]
            part = Part(offset, tensor.detach)
        yield part


def _make_index(files: Mapping[str, TensorKinds]) -> str:
    weight_map = {}
    total_size = 0
    for file, kinds in files.items():
        for name, kind in kinds.items():
            weight_map[name] = file
            total_size += kind.nbytes
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    return json.dumps(index, indent=2, sort_keys=True)


def _open(directory: Path) -> tuple[dict[str, Entry], list[str]]:
    """List the tensors of a model's files by name, and what the index says of others."""
    # A pipe is no regular file. Links are followed: the cache of huggingface_hub is made of them.
    names = sorted(path.name for path in directory.iterdir() if path.is_file())
    main_file = _find_main_file(directory, names)
    weight_map = _read_weight_map(main_file, names) if main_file.suffix == ".json" else {}
    files = list(dict.fromkeys(weight_map.values())) or [main_file.name]
    written = shared_files.read_checksums(directory)
    entries: dict[str, Entry] = {}
    for file in files:
        for name, entry in _open_file(directory / file, written).items():
            # A tensor may be in several files, and the index names one of them.
            if weight_map.get(name, file) == file:
                entries[name] = entry
    lacking = [f"{main_file} names {weight_map[name]} for {name}" for name in weight_map if name not in entries]
    return entries, lacking


def _find_main_file(directory: Path, names: Sequence[str]) -> Path:
    """Find the one file of weights or their index, as transformers does; other libraries have other names for it."""
    candidates: list[str] = []
    for pattern in (SINGLE, INDEX, "*.safetensors.index.json", "*.safetensors"):
        candidates = candidates or fnmatch.filter(names, pattern)
    if len(candidates) != 1:
        listed = ", ".join(candidates) or "none"
        text = f"expected {SINGLE}, {INDEX} or one file of weights, got {listed}; move others elsewhere"
        raise CheckpointError(f"{directory}: {text}")
    return directory / candidates[0]


def _read_weight_map(path: Path, names: Sequence[str]) -> dict[str, str]:
    """Read which of the files beside an index each tensor is in."""
    try:
        weight_map = {**json.loads(path.read_bytes())["weight_map"]}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{path} has no map from tensors to files ({type(error).__name__})") from None
    for name, file in weight_map.items():
        if file not in names or not file.endswith(".safetensors"):
            raise CheckpointError(f"{path} names {file!r} for {name}, which is no .safetensors file beside it")
    return weight_map


def _open_file(path: Path, written: WrittenTensors | None) -> dict[str, Entry]:
    """List the tensors of one file, by name."""
    entries = {}
    try:
        file = safe_open(path, framework="pt")
        for name in file.keys():  # noqa: SIM118 - it is no dict
            entries[name] = shared_files.make_entry(path, name, file.get_slice(name), written)
    except (SafetensorError, RuntimeError) as error:
        # torch has no dtypes of less than a byte.
        raise CheckpointError(f"{path}: {error}") from None
    return entries
