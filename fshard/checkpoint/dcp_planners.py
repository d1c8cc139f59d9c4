"""What tells torch.distributed.checkpoint which boxes of elements this rank writes and reads."""

from collections.abc import Mapping
from typing import Any

import torch

from fshard.checkpoint.layout import piece_of, shape_of
from fshard.tree import is_sharded

# Where a value lies in the nested dicts and lists that are saved.
Place = tuple[str | int, ...]


def save_planner(content: Mapping[str, tuple[Place, Any]]) -> Any:
    """A planner that writes this rank's parts of leaves, and other values once.

    Args:
        content: Where each value lies and the value, by its key.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    values = {key: value for key, (_, value) in content.items()}
    leaves = {key: value for key, value in values.items() if is_sharded(value) or isinstance(value, torch.Tensor)}
    pieces = {key: piece_of(leaf) for key, leaf in leaves.items()}

    def item(key: str) -> WriteItem:
        if key not in leaves:
            return WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)
        offset, tensor = torch.Size(pieces[key].offset), pieces[key].tensor
        chunk = ChunkStorageMetadata(offset, tensor.shape)
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(tensor), torch.Size(shape_of(leaves[key])))
        return WriteItem(MetadataIndex(key, offset), WriteItemType.SHARD, tensor_data=data)

    def is_mine(key: str) -> bool:
        # A rank without elements has nothing to write, unless nobody has any.
        return key not in leaves or pieces[key].tensor.numel() > 0 or 0 in shape_of(leaves[key])

    class Planner(DefaultSavePlanner):
        def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
            self.is_coordinator = is_coordinator
            # Torch's offline tools nest what they read by these.
            self.mappings = {key: place for key, (place, _) in content.items()}

        def create_local_plan(self) -> SavePlan:
            self.plan = SavePlan([item(key) for key in values if is_mine(key)], planner_data=self.mappings)
            return self.plan

        def lookup_object(self, index: MetadataIndex) -> Any:
            return pieces[index.fqn].tensor if index.fqn in pieces else values[index.fqn]

    return Planner()


def load_planner(leaves: Mapping[str, Any], values: dict[str, Any]) -> Any:
    """A planner that reads this rank's parts of leaves, in place, and other values.

    Args:
        leaves: What is read into, by key.
        values: Where other values go; its keys say which.
    """
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    pieces = {key: piece for key, leaf in leaves.items() if (piece := piece_of(leaf)).tensor.numel()}
    nothing = torch.Size((0,))

    class Planner(DefaultLoadPlanner):
        def set_up_planner(
            self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
        ) -> None:
            self.metadata, self.is_coordinator = metadata, is_coordinator

        def create_local_plan(self) -> LoadPlan:
            assert self.metadata is not None
            items = []
            for key, piece in pieces.items():
                found = self.metadata.state_dict_metadata[key]
                assert isinstance(found, TensorStorageMetadata)
                chunk = ChunkStorageMetadata(torch.Size(piece.offset), piece.tensor.shape)
                items += create_read_items_for_chunk_list(key, found, [chunk])
            for key in values:
                index = MetadataIndex(key)
                items.append(ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing))
            return LoadPlan(items)

        def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
            return pieces[index.fqn].tensor

        def load_bytes(self, read_item: ReadItem, value: Any) -> None:
            values[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

    return Planner()
