"""Abstract leaves: Sharded leaves whose local tensors are on the meta device, with a spec and a dtype but no values."""

from typing import Any

import torch

from fshard.tree.nodes import is_sharded, tensor_of
from fshard.tree.specs import Spec


def storage_device(spec: Spec) -> torch.device | None:
    """Find the device that keeps the shards of a leaf: that of its transform, or of its mesh; None if neither says."""
    storage = spec.transform and spec.transform.storage
    if storage:
        return storage.device
    return next((torch.device(axis.device_type) for axis in spec.axes if axis.device_type), None)


def is_abstract(leaf: Any) -> bool:
    """Tell whether a Sharded leaf has no values, as those of `model.init(abstract=True)`.

    The meta device can also be where a transform keeps its shards. Those leaves are like others.
    """
    if not is_sharded(leaf) or not getattr(leaf.local, "is_meta", False):
        return False
    device = storage_device(leaf.spec)
    return device is None or device.type != "meta"


def device_of(leaf: Any) -> torch.device:
    """Return the device of this rank's tensor of a leaf; of one without values, the device that its values would be on.

    A plain tensor on the meta device does not say where its values would be, so they would be on the default one.
    """
    if is_abstract(leaf):
        return storage_device(leaf.spec) or torch.get_default_device()
    device = tensor_of(leaf).device
    return torch.get_default_device() if device.type == "meta" and not is_sharded(leaf) else device
