"""Files of torch.distributed.checkpoint, whose import takes long: this module is imported on first use.

Leaves are handed over as boxes of elements, without a copy, so that any layout is written and read: DTensor has no such
for some.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_saver import save

import fshard as fs
from fshard.checkpoint import CheckpointError
from fshard.extend import Entry, describe, piece_of

METADATA = ".metadata"


# Where a value lies in the nested dicts and lists that are saved.
Place = tuple[str | int, ...]


def write(directory: Path, content: Mapping[Place, Any]) -> None:
    """Write this rank's parts of leaves, and other values once.

    Args:
        directory: The directory that gets the files.
        content: Leaves and other values, by place.

    Raises:
        CheckpointError: on every rank, if one of them could not write.
    """
    try:
        with _one_process():
            save({}, checkpoint_id=directory, planner=_SavePlanner(content))
    except CheckpointException as error:
        rank, (first, _) = next(iter(error.failures.items()))
        raise CheckpointError(f"{type(first).__name__} on rank {rank}: {first}") from error


@contextmanager
def _one_process() -> Iterator[None]:
    """Leave out the warning that there is one process alone."""
    if dist.is_initialized():
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


def contents(directory: Path) -> tuple[dict[str, Entry], dict[str, Callable[[], Any]]]:
    """Open a checkpoint, whose list of contents is a pickle.

    Returns:
        The tensors, and functions that read the other values, by key.

    Raises:
        CheckpointError: if it is damaged.
    """
    reader = FileSystemReader(directory)
    with _damaged(directory / METADATA):
        metadata = reader.read_metadata()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it holds {describe(metadata)}")
        reader.set_up_storage_reader(metadata, is_coordinator=True)
    entries: dict[str, Entry] = {}
    values: dict[str, Callable[[], Any]] = {}
    for key, found in metadata.state_dict_metadata.items():
        if not isinstance(found, TensorStorageMetadata):
            index, nothing = MetadataIndex(key), torch.Size((0,))
            items = [ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)]
            values[key] = partial(_read, reader, key, items)
            continue
        entries[key] = Entry(found.properties.dtype, tuple(found.size), partial(_read_box, reader, key, found))
        # Elements that no file has would be whatever memory held.
        if sum(chunk.sizes.numel() for chunk in found.chunks) != found.size.numel():
            raise CheckpointError(f"{directory / METADATA}: the chunks of {key} do not cover it")
    return entries, values


def _read_box(reader: FileSystemReader, key: str, found: TensorStorageMetadata, box: tuple[slice, ...]) -> torch.Tensor:
    shape = torch.Size([part.stop - part.start for part in box])
    chunk = ChunkStorageMetadata(torch.Size([part.start for part in box]), shape)
    room = torch.empty(shape, dtype=found.properties.dtype, device="cpu")
    _read(reader, key, create_read_items_for_chunk_list(key, found, [chunk]), room)
    return room


def _read(reader: FileSystemReader, key: str, items: list[ReadItem], room: torch.Tensor | None = None) -> Any:
    """Read the items of a key: boxes of a tensor into the room, or a value that is returned."""
    planner = _LoadPlanner(room)
    with _damaged(reader.path, key):
        reader.read_data(LoadPlan(items), planner).wait()
    return planner.value


@contextmanager
def _damaged(*place: object) -> Iterator[None]:
    """Name the file, and the key in it, in an error: a pickle that is damaged raises anything."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise CheckpointError(": ".join(map(str, (*place, type(error).__name__, error)))) from error


class _LoadPlanner(DefaultLoadPlanner):
    """Puts tensors that are read into the memory of one, and keeps another value."""

    def __init__(self, room: torch.Tensor | None) -> None:
        super().__init__()
        self.room, self.value = room, None

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        assert self.room is not None
        return self.room

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        self.value = torch.load(value, weights_only=True)


class _SavePlanner(DefaultSavePlanner):
    """Says which boxes of elements this rank writes."""

    def __init__(self, content: Mapping[Place, Any]) -> None:
        super().__init__()
        # Torch's offline tools nest what they read by these.
        self.mappings = {".".join(map(str, place)): place for place in content}
        self.values = {key: content[place] for key, place in self.mappings.items()}
        self.pieces = {
            key: piece_of(value) for key, value in self.values.items() if isinstance(value, fs.Sharded | torch.Tensor)
        }

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        items = []
        for key in self.values:
            if key not in self.pieces:
                items.append(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO))
                continue
            piece = self.pieces[key]
            offset, tensor = torch.Size(piece.offset), piece.tensor
            # A rank without elements has nothing to write, unless nobody has any.
            if tensor.numel() or 0 in piece.full_shape:
                chunk = ChunkStorageMetadata(offset, tensor.shape)
                properties = TensorProperties.create_from_tensor(tensor)
                data = TensorWriteData(chunk, properties, torch.Size(piece.full_shape))
                items.append(WriteItem(MetadataIndex(key, offset), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.pieces[index.fqn].tensor if index.fqn in self.pieces else self.values[index.fqn]
