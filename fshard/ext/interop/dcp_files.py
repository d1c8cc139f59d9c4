"""Files of torch.distributed.checkpoint.

Leaves are handed over as boxes of elements, without a copy. DTensor would not do: it does not have all layouts.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import api, default_planner, filesystem, metadata, planner, state_dict_saver
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

import fshard as fs
from fshard.checkpoint import CheckpointError
from fshard.extend import Entry, local_box, map_leaves

METADATA = ".metadata"


def write(directory: Path, state_dict: Mapping[str, Any]) -> None:
    """Write this rank's parts of leaves, and other values once.

    Args:
        directory: The directory that gets the files.
        state_dict: Leaves and other values, in nested dicts and lists.

    Raises:
        CheckpointError: on every rank, if one of them could not write.
    """
    with ExitStack() as stack:
        if not dist.is_initialized():
            # torch warns that there is one process alone.
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        try:
            state_dict_saver.save(map_leaves(_store, state_dict), checkpoint_id=directory)
        except api.CheckpointException as error:
            rank, (failure, _) = next(iter(error.failures.items()))
            text = f"rank {rank} could not write its file, perhaps because the disk is full"
            raise CheckpointError(f"{directory.parent}: {text}: {type(failure).__name__}: {failure}") from error


def read_contents(directory: Path) -> tuple[dict[str, Entry], dict[str, Callable[[], Any]]]:
    """Open a checkpoint, whose list of contents is a pickle.

    Returns:
        The tensors, and functions that read the other values, by key.

    Raises:
        CheckpointError: if it is damaged.
    """
    reader = filesystem.FileSystemReader(directory)
    entries: dict[str, Entry] = {}
    values: dict[str, Callable[[], Any]] = {}
    with _name_damage(directory / METADATA):
        contents = reader.read_metadata()
        reader.set_up_storage_reader(contents, is_coordinator=True)
        for key, stored in contents.state_dict_metadata.items():
            if not isinstance(stored, metadata.TensorStorageMetadata):
                values[key] = partial(_read_value, reader, key)
                continue
            elements = sum(chunk.sizes.numel() for chunk in stored.chunks)
            # Elements that are in no file would have the values that memory had before.
            if elements != stored.size.numel():
                raise ValueError(f"the chunks of {key} do not cover it")
            read = partial(_read_box, reader, key, stored)
            entries[key] = Entry(stored.properties.dtype, tuple(stored.size), read)
    return entries, values


def _read_box(reader: Any, key: str, stored: metadata.TensorStorageMetadata, box: tuple[slice, ...]) -> torch.Tensor:
    offset = torch.Size([part.start for part in box])
    shape = torch.Size([part.stop - part.start for part in box])
    chunk = metadata.ChunkStorageMetadata(offset, shape)
    tensor = torch.empty(shape, dtype=stored.properties.dtype, device="cpu")
    with _name_damage(reader.path, key):
        items = create_read_items_for_chunk_list(key, stored, [chunk])
        reader.read_data(planner.LoadPlan(items), _LoadPlanner(tensor)).wait()
    return tensor


def _read_value(reader: Any, key: str) -> Any:
    index = metadata.MetadataIndex(key)
    nothing = torch.Size((0,))
    item = planner.ReadItem(planner.LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)
    load_planner = _LoadPlanner()
    with _name_damage(reader.path, key):
        reader.read_data(planner.LoadPlan([item]), load_planner).wait()
    return load_planner.value


@contextmanager
def _name_damage(*place: object) -> Iterator[None]:
    """Name the file and the key in an error, which may be of any class: a damaged pickle raises anything."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        parts = (*place, type(error).__name__, error)
        raise CheckpointError(": ".join(map(str, parts))) from error


class _LoadPlanner(default_planner.DefaultLoadPlanner):
    """Reads into the memory of a tensor, and keeps a value that is no tensor."""

    def __init__(self, tensor: torch.Tensor | None = None) -> None:
        super().__init__()
        self.tensor = tensor
        self.value: Any = None

    def lookup_tensor(self, index: metadata.MetadataIndex) -> Any:
        return self.tensor

    def load_bytes(self, read_item: planner.ReadItem, value: Any) -> None:
        self.value = torch.load(value, weights_only=True)


class _StoredBox(torch.Tensor):
    """This rank's box of a leaf, which torch asks for what it writes of it, as of a DTensor. Checked on 2.13."""

    box: Any

    def __create_write_items__(self, key: str, _: Any) -> list[planner.WriteItem]:
        box = self.box
        # A rank without elements writes nothing, unless no rank has any.
        if not box.tensor.numel() and 0 not in box.full_shape:
            return []
        chunk = metadata.ChunkStorageMetadata(torch.Size(box.offsets), box.tensor.shape)
        properties = metadata.TensorProperties.create_from_tensor(box.tensor)
        data = planner.TensorWriteData(chunk, properties, torch.Size(box.full_shape))
        index = metadata.MetadataIndex(key, chunk.offsets)
        return [planner.WriteItem(index, planner.WriteItemType.SHARD, tensor_data=data)]

    def __get_tensor_shard__(self, _: Any) -> torch.Tensor:
        tensor: torch.Tensor = self.box.tensor
        return tensor


def _store(leaf: Any) -> Any:
    if not isinstance(leaf, fs.Sharded | torch.Tensor):
        return leaf
    box = local_box(leaf)
    stored = box.tensor.detach().as_subclass(_StoredBox)
    stored.box = box
    return stored
