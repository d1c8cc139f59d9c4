"""Gathers that a program has started by itself, ahead of the verb that uses the full tensors."""

import functools
import warnings
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from fshard import _compat, comm
from fshard.comm.events import join_leaves
from fshard.transforms.run import check_results, may_take_gradients
from fshard.tree import Sharded, register_leaf_class
from fshard.tree.checks import count_writes

# Waits for the full tensor of a leaf, and returns it alone in a list.
Finish = Callable[[], Sequence[torch.Tensor]]


class StartedGather:
    """A gather of leaves of one transform that has started, and the owner of their full tensors until they are used."""

    def __init__(self, paths: Sequence[str], leaves: Sequence[Sharded]) -> None:
        """Start the gather.

        Args:
            paths: The leaves' paths.
            leaves: The leaves.
        """
        shards = [leaf.local.detach() for leaf in leaves]
        versions = _compat.versions(shards)
        specs = [leaf.spec for leaf in leaves]
        transform = specs[0].transform
        has_gradients = may_take_gradients(shards)
        with count_writes(), torch.no_grad(), comm.annotate_collectives((), paths):
            finish = transform.start_gather(shards, specs)
        # Returns the same dict each time, which holds the full tensors until they are taken out of it.
        self._wait = functools.cache(
            lambda: dict(
                zip(paths, check_results(transform, "gather", finish(), paths, specs, has_gradients), strict=True)
            )
        )
        # By the paths of leaves that no call has claimed: the shards, and how often they had been written to.
        self._unused = dict(zip(paths, zip(shards, versions, strict=True), strict=True))
        weakref.finalize(self, _release, self._wait, self._unused)

    def take_over(self, path: str) -> Finish:
        """Claim the full tensor of a leaf for a call.

        Args:
            path: The leaf's path.

        Returns:
            A function that waits for the full tensor, and returns it alone in a list. It raises a ValueError if the
            leaf was written to since the gather started.

        Raises:
            ValueError: if it was claimed before.
        """
        started = self._unused.pop(path, None)
        if started is None:
            raise ValueError(
                f"start_gather: the full tensor of {path} was used before, and one gather serves one "
                "use. Start another gather, or pass the parameters themselves."
            )
        return functools.partial(self._take, path, *started)

    def _take(self, path: str, shard: torch.Tensor, version: int) -> Sequence[torch.Tensor]:
        if _compat.version(shard) != version:
            raise ValueError(
                f"start_gather: {path} was written to after its gather had started, so that its full "
                "tensor would have old values. Start the gather after the update."
            )
        return [self._wait().pop(path)]


def _release(wait: Callable[[], object], unused: Collection[str]) -> None:
    """Wait for a gather, whose buffers nobody else would let go of, and warn of leaves that were not used."""
    # What has ended the mesh was raised before.
    with suppress(Exception):
        wait()
    if unused:
        warnings.warn(
            f"start_gather: {join_leaves([*unused])} was gathered, and no verb has used it. Pass the result "
            "of start_gather to value_and_grad, apply or gather.",
            RuntimeWarning,
            stacklevel=3,
        )


@dataclass(frozen=True, eq=False, slots=True)
class Started(Sharded):
    """A leaf whose gather has started. Maps over it and copies of it give the leaf alone.

    Attributes:
        started: Its gather.
        path: Its path, by which the gather knows it.
    """

    started: StartedGather
    path: str


register_leaf_class(Started)


def take_over(leaf: Any) -> Finish | None:
    """Claim the full tensor of a leaf whose gather has started; None for others."""
    return leaf.started.take_over(leaf.path) if isinstance(leaf, Started) else None
