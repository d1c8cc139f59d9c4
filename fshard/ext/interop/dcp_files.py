"""Files of torch.distributed.checkpoint, whose import takes long: this module is imported on first use.

Leaves are handed over as boxes of elements, without a copy, so that any layout is written and read: DTensor has no such
for some.
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
from fshard.extend import Entry, piece_of

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
    with ExitStack() as stack:
        if not dist.is_initialized():
            # It says that there is one process alone.
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        try:
            state_dict_saver.save({}, checkpoint_id=directory, planner=_SavePlanner(content))
        except api.CheckpointException as error:
            rank, (first, _) = next(iter(error.failures.items()))
            raise CheckpointError(f"{type(first).__name__} on rank {rank}: {first}") from error


def contents(directory: Path) -> tuple[dict[str, Entry], dict[str, Callable[[], Any]]]:
    """Open a checkpoint, whose list of contents is a pickle.

    Returns:
        The tensors, and functions that read the other values, by key.

    Raises:
        CheckpointError: if it is damaged.
    """
    reader = filesystem.FileSystemReader(directory)
    entries: dict[str, Entry] = {}
    values: dict[str, Callable[[], Any]] = {}
    with _damaged(directory / METADATA):
        listed = reader.read_metadata()
        reader.set_up_storage_reader(listed, is_coordinator=True)
        for key, found in listed.state_dict_metadata.items():
            if not isinstance(found, metadata.TensorStorageMetadata):
                values[key] = partial(_read_value, reader, key)
                continue
            # Elements that no file has would be whatever memory held.
            if sum(chunk.sizes.numel() for chunk in found.chunks) != found.size.numel():
                raise ValueError(f"the chunks of {key} do not cover it")
            entries[key] = Entry(found.properties.dtype, tuple(found.size), partial(_read_box, reader, key, found))
    return entries, values


def _read_box(reader: Any, key: str, found: metadata.TensorStorageMetadata, box: tuple[slice, ...]) -> torch.Tensor:
    shape = torch.Size([part.stop - part.start for part in box])
    chunk = metadata.ChunkStorageMetadata(torch.Size([part.start for part in box]), shape)
    room = torch.empty(shape, dtype=found.properties.dtype, device="cpu")
    with _damaged(reader.path, key):
        items = create_read_items_for_chunk_list(key, found, [chunk])
        reader.read_data(planner.LoadPlan(items), _LoadPlanner(room)).wait()
    return room


def _read_value(reader: Any, key: str) -> Any:
    index, nothing = metadata.MetadataIndex(key), torch.Size((0,))
    item = planner.ReadItem(planner.LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)
    into = _LoadPlanner()
    with _damaged(reader.path, key):
        reader.read_data(planner.LoadPlan([item]), into).wait()
    return into.value


@contextmanager
def _damaged(*place: object) -> Iterator[None]:
    """Name the file, and the key in it, in an error: a pickle that is damaged raises anything."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise CheckpointError(": ".join(map(str, (*place, type(error).__name__, error)))) from error


class _LoadPlanner(default_planner.DefaultLoadPlanner):
    """Puts tensors that are read into the memory of one, and keeps another value."""

    def __init__(self, room: torch.Tensor | None = None) -> None:
        super().__init__()
        self.room, self.value = room, None

    def lookup_tensor(self, index: metadata.MetadataIndex) -> Any:
        return self.room

    def load_bytes(self, read_item: planner.ReadItem, value: Any) -> None:
        self.value = torch.load(value, weights_only=True)


class _SavePlanner(default_planner.DefaultSavePlanner):
    """Says which boxes of elements this rank writes."""

    def __init__(self, content: Mapping[Place, Any]) -> None:
        super().__init__()
        # Torch's offline tools nest what they read by these.
        self.mappings = {".".join(map(str, place)): place for place in content}
        self.values = {key: content[place] for key, place in self.mappings.items()}
        is_tensor = {key: isinstance(value, fs.Sharded | torch.Tensor) for key, value in self.values.items()}
        self.pieces = {key: piece_of(self.values[key]) for key in self.values if is_tensor[key]}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> planner.SavePlan:
        items = []
        for key in self.values:
            piece = self.pieces.get(key)
            if piece is None:
                items.append(planner.WriteItem(metadata.MetadataIndex(key), planner.WriteItemType.BYTE_IO))
            # A rank without elements has nothing to write, unless nobody has any.
            elif piece.tensor.numel() or 0 in piece.full_shape:
                chunk = metadata.ChunkStorageMetadata(torch.Size(piece.offset), piece.tensor.shape)
                properties = metadata.TensorProperties.create_from_tensor(piece.tensor)
                data = planner.TensorWriteData(chunk, properties, torch.Size(piece.full_shape))
                index = metadata.MetadataIndex(key, chunk.offsets)
                items.append(planner.WriteItem(index, planner.WriteItemType.SHARD, tensor_data=data))
        self.plan = planner.SavePlan(items, planner_data=self.mappings)
        return self.plan

    def lookup_object(self, index: metadata.MetadataIndex) -> Any:
        piece = self.pieces.get(index.fqn)
        return self.values[index.fqn] if piece is None else piece.tensor
