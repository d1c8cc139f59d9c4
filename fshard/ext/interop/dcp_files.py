"""Files of torch.distributed.checkpoint.

Leaves are handed over as boxes of elements, without a copy. DTensor would not do: it does not have all layouts.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import api, default_planner, filesystem, metadata, planner, state_dict_saver

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
                values[key] = partial(_read, reader, contents, key, None)
                continue
            elements = sum(chunk.sizes.numel() for chunk in stored.chunks)
            # Elements that are in no file would have the values that memory had before.
            if elements != stored.size.numel():
                raise ValueError(f"the chunks of {key} do not cover it")
            read = partial(_read_box, reader, contents, key)
            entries[key] = Entry(stored.properties.dtype, tuple(stored.size), read)
    return entries, values


def _read_box(reader: Any, contents: metadata.Metadata, key: str, box: tuple[slice, ...]) -> torch.Tensor:
    stored: Any = contents.state_dict_metadata[key]
    offsets = [part.start for part in box]
    shape = [part.stop - part.start for part in box]
    tensor = torch.empty(shape, dtype=stored.properties.dtype, device="cpu")
    _read(reader, contents, key, _hand_over(offsets, tensor, stored.size))
    return tensor


def _read(reader: Any, contents: metadata.Metadata, key: str, target: Any) -> Any:
    """Read what a checkpoint has under a key: into a box, or a value that is no tensor."""
    load_planner = default_planner.DefaultLoadPlanner(flatten_state_dict=False)
    with _name_damage(reader.path, key):
        load_planner.set_up_planner({key: target}, contents)
        reader.read_data(load_planner.create_local_plan(), load_planner).wait()
    return load_planner.state_dict[key]


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


class _StoredBox(torch.Tensor):
    """A box of a leaf, which torch asks for what it writes or reads of the leaf, as of a DTensor. Checked on 2.13.

    Attributes:
        offsets: Where it starts along each dim of the leaf.
        local: Its elements.
        full_shape: The leaf's global shape.
    """

    offsets: torch.Size
    local: torch.Tensor
    full_shape: torch.Size

    def size(self, *_: Any) -> Any:
        return self.full_shape

    def __create_chunk_list__(self) -> list[metadata.ChunkStorageMetadata]:
        return [metadata.ChunkStorageMetadata(self.offsets, self.local.shape)]

    def __create_write_items__(self, key: str, _: Any) -> list[planner.WriteItem]:
        # A rank without elements writes nothing, unless no rank has any.
        if not self.local.numel() and 0 not in self.full_shape:
            return []
        (chunk,) = self.__create_chunk_list__()
        properties = metadata.TensorProperties.create_from_tensor(self.local)
        data = planner.TensorWriteData(chunk, properties, self.full_shape)
        index = metadata.MetadataIndex(key, chunk.offsets)
        return [planner.WriteItem(index, planner.WriteItemType.SHARD, tensor_data=data)]

    def __get_tensor_shard__(self, _: Any) -> torch.Tensor:
        return self.local


def _hand_over(offsets: Sequence[int], local: torch.Tensor, full_shape: Sequence[int]) -> _StoredBox:
    stored = local.as_subclass(_StoredBox)
    stored.offsets = torch.Size(offsets)
    stored.local = local
    stored.full_shape = torch.Size(full_shape)
    return stored


def _store(leaf: Any) -> Any:
    if not isinstance(leaf, fs.Sharded | torch.Tensor):
        return leaf
    return _hand_over(*local_box(leaf), leaf.shape)
