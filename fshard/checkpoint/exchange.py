"""Exchange: leaves to and from formats by their names, and errors that every rank raises."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TypeVar

import torch

from fshard import _compat, comm
from fshard.checkpoint.boxes import Box, Entry, has_elements, local_box
from fshard.checkpoint.errors import CheckpointError, describe_failure
from fshard.checkpoint.files import digest, name_of
from fshard.errors import Problem, describe_error, expect, refuse
from fshard.mesh import Mesh, ranks_of
from fshard.shard import bytes_of, hash_of, padded, pin_leaf, without_padding
from fshard.tree import Axis, Flat, Sharded, Tree, device_of, flatten, is_sharded
from fshard.tree.checks import check_local, describe

# Leaves by their names or paths.
Leaves = Mapping[str, Any]

T = TypeVar("T")


class Exchange:
    """Moves leaves to or from a format: every rank makes the same calls.

    Attributes:
        label: The public function, for errors.
        ranks: The ranks that call, as one axis.
        rank: The place of this rank among them.
    """

    def __init__(self, label: str, *, mesh: Mesh | Axis | None = None) -> None:
        """Begin an exchange.

        Args:
            label: The public function, for errors.
            mesh: The mesh of the ranks that call; None for all ranks of this run.
        """
        self.label = label
        self.ranks = ranks_of(mesh)
        self.rank = comm.rank(self.ranks)

    @contextmanager
    def raise_on_all_ranks(self, path: object = "", *, checks_arguments: bool = True) -> Iterator[None]:
        """Raise on every rank the first exception that any of them raises inside, where no rank may wait for another.

        Args:
            path: The file or directory that an OSError is about which names none.
            checks_arguments: Whether a ValueError refuses an argument, and is raised on every rank as it is.

        Raises:
            ValueError: on every rank, if an argument was refused.
            CheckpointError: on every rank, if any other exception was raised. Of one that names no file the error
                names the rank and the class.
        """
        failure = None
        report = None
        try:
            yield
        except Exception as error:
            failure = error
            if checks_arguments and type(error) is ValueError:
                report = True, describe_error(error)
            else:
                report = False, describe_failure(error, self.rank, path)
        first_report = self.take_first(report)
        if first_report is None:
            return
        is_refusal, text = first_report
        if is_refusal:
            raise ValueError(text) from failure
        raise CheckpointError(f"{self.label}: {text}") from failure

    @contextmanager
    def raise_on_this_rank(self, path: object) -> Iterator[None]:
        """Raise an OSError as a CheckpointError that names the file, in a call for which ranks send nothing.

        Args:
            path: The file or directory that an OSError is about which names none.
        """
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"{self.label}: {describe_failure(error, self.rank, path)}") from error

    def all_gather_object(self, value: Any) -> list[Any]:
        """Gather a value of every rank, which JSON can hold, in rank order."""
        return comm.all_gather_object(value, [self.ranks], self.label)

    def merge_objects(self, value: T, merge: Callable[[T, T], T]) -> T:
        """Merge the values of all ranks, as `comm.merge_objects` does."""
        return comm.merge_objects(value, merge, [self.ranks], self.label)

    def take_first(self, value: Any) -> Any:
        """Return on every rank the value, which JSON can hold, of the first rank that has one other than None."""
        place = self.ranks.size if value is None else self.rank
        return self.merge_objects([place, value], min)[1]

    def check_agreement(self, entries: Mapping[str, str], headline: str, remedy: str) -> None:
        """Refuse on every rank entries that differ between ranks."""
        differences = comm.find_disagreement(entries, [self.ranks], self.label)
        refuse(f"{self.label}: {headline}", differences, remedy)

    def path(self, name: str, path: Any) -> Path:
        """Return the absolute path of a file or a directory, and refuse an argument that is none."""
        text = fspath(path) if isinstance(path, str | PathLike) else None
        is_path = isinstance(text, str) and text and "\0" not in text
        expect(is_path, self.label, f"{name} to be a path", f"{path!r:.40}")
        # The program may go to another folder while a thread writes.
        return Path(path).absolute()

    def flat(self, tree: Tree, *, needs_values: bool = True) -> Flat:
        """Take a tree apart.

        Args:
            tree: The tree.
            needs_values: Whether to refuse abstract leaves.

        Raises:
            ValueError: with each leaf that was donated or does not fit its spec, or each name that several have.
        """
        flat = flatten(tree)
        is_eager = not (_compat.is_tracing() or _compat.transforms_active())
        expect(is_eager, self.label, "a call outside of fs.jit and torch.func, on their results", "one inside")
        problems = []
        for name, count in Counter(flat.names).items():
            if count > 1:
                problems.append(Problem(name, f"{count} leaves", "one of each name"))
        refuse(f"{self.label}: leaves of one name", problems, "give keys that print differently")
        check_local(self.label, flat, needs_values=needs_values)
        return flat

    def find_holders(self, leaves: Leaves, values: Mapping[str, str]) -> dict[str, list[int]]:
        """Find the ranks that hold the same box of a leaf as this rank, and refuse different values of one box.

        Each rank hashes the boxes that several ranks hold, which takes less time than to copy them. It sends a digest
        of all that must be the same, and one of all boxes that the same ranks hold.

        Args:
            leaves: Tensors and Sharded leaves by path.
            values: Texts of all else that must be the same on every rank.

        Returns:
            The ranks in their order, by path.

        Raises:
            ValueError: on every rank, with the first leaf of another dtype or shape, or every leaf whose values differ.
        """
        facts = {path: describe_leaf(leaf) for path, leaf in leaves.items()}
        facts |= values
        hashes = self._hash_replicas(leaves)
        compared = {"facts": facts, **hashes}
        local: Any = {}
        for name, content in compared.items():
            local[name] = {_digest(content): [self.rank]}
        # For the name of all that is compared, and for each digest of that, the ranks that have it.
        ranks_by_digest = self.merge_objects(local, join_ranks)
        if any(len(digests) > 1 for digests in ranks_by_digest.values()):
            remedy = "make all but the values of Sharded leaves the same on every rank"
            self.check_agreement(facts, "ranks hold different leaves", remedy)
            self._refuse_values(hashes)
        holders = {path: [self.rank] for path in leaves}
        for boxes, hash_by_path in hashes.items():
            (ranks,) = ranks_by_digest[boxes].values()
            holders |= dict.fromkeys(hash_by_path, ranks)
        return holders

    def _hash_replicas(self, leaves: Leaves) -> dict[str, dict[str, str]]:
        """Hash this rank's boxes of leaves that other ranks hold too.

        Returns:
            The hashes of leaves that are split over the same axes, by path. Their name is a digest of the boxes, which
            is the same on the ranks that hold these boxes, and on no others.
        """
        boxes = defaultdict[tuple[Axis, ...], dict[str, Box]](dict)
        hashes = defaultdict[tuple[Axis, ...], dict[str, str]](dict)
        for path, leaf in leaves.items():
            axes = leaf.spec.partition_axes() if is_sharded(leaf) else ()
            if math.prod(axis.size for axis in axes) < self.ranks.size:
                local = local_box(leaf)
                boxes[axes][path] = local.box
                hashes[axes][path] = hash_of(local.tensor)
        return {_digest(boxes[axes]): hashes[axes] for axes in boxes}

    def _refuse_values(self, hashes: Mapping[str, Mapping[str, str]]) -> None:
        """Refuse leaves of which ranks hold different values, each with the first rank that differs from another.

        Args:
            hashes: The hashes of this rank, as `_hash_replicas` returns them.
        """
        first_values: dict[tuple[str, str], str] = {}
        ranks: dict[str, int] = {}
        for rank, hashes_of_rank in enumerate(self.all_gather_object(hashes)):
            for boxes, hash_by_path in hashes_of_rank.items():
                for path, value in hash_by_path.items():
                    if value != first_values.setdefault((boxes, path), value):
                        ranks.setdefault(path, rank)
        problems = []
        for path, rank in sorted(ranks.items()):
            problems.append(Problem(path, f"other values on rank {rank}", "the same on all ranks"))
        remedy = "make them the same, buffers by fs.sync_buffers, or store a row of one leaf for each rank"
        refuse(f"{self.label}: ranks hold different values of one leaf", problems, remedy)

    def read(self, leaves: Leaves, entries: Mapping[str, Sequence[Any]], remedy: str) -> dict[str, Any]:
        """Read this rank's box of each leaf.

        Args:
            leaves: Leaves by name, whose values are not used.
            entries: The entries of each name, several for a parameter that is tied; or a value that is no tensor.
            remedy: What the caller can do about leaves that do not fit.

        Returns:
            New leaves of the same types and places, by name.

        Raises:
            ValueError: on every rank, with every leaf that has no entry or another one, or that is not asked for.
            CheckpointError: on every rank, if an entry cannot be read, or the entries of a leaf differ.
        """
        with self.raise_on_all_ranks():
            refuse(f"{self.label}: leaves do not fit", _list_misfits(leaves, entries), remedy)
            results = {}
            for name, leaf in leaves.items():
                if has_elements(leaf):
                    results[name] = _read_leaf(name, leaf, entries[name])
                else:
                    results[name] = entries[name][0]
            return results


def join_ranks(some: Any, others: Any) -> Any:
    """Merge what some ranks have and what others have: dicts by name, which end in lists of the ranks that have it."""
    if isinstance(some, list):
        return sorted({*some, *others})
    joined = {**some, **others}
    for name in some.keys() & others.keys():
        joined[name] = join_ranks(some[name], others[name])
    return joined


def _digest(content: Any) -> str:
    """Compute a digest of what JSON can hold; the order of a dict's entries does not count."""
    return digest(json.dumps(content, sort_keys=True).encode())


def describe_leaf(leaf: Any) -> str:
    """Describe a leaf or an entry for an error: its dtype and global shape, or what else it is."""
    if not has_elements(leaf) and not isinstance(leaf, Entry):
        return describe(leaf)
    return f"{name_of(leaf.dtype)}{list(leaf.shape)}"


def _list_misfits(leaves: Leaves, entries: Mapping[str, Sequence[Any]]) -> list[Problem]:
    """List the leaves whose entries are missing, or of another kind, dtype or shape, and entries without a leaf."""
    problems = []
    for name in dict.fromkeys((*leaves, *entries)):
        expected = describe_leaf(leaves[name]) if name in leaves else "nothing"
        for entry in entries.get(name, [None]):
            got = "nothing" if name not in entries else describe_leaf(entry)
            if got != expected:
                problems.append(Problem(name, got, expected))
    return problems


def _read_leaf(name: str, leaf: Any, entries: Sequence[Entry]) -> Any:
    """Read this rank's box of a leaf, whose values are not used."""
    local = without_padding(leaf) if is_sharded(leaf) else leaf
    if local.numel():
        slices = local_box(leaf).box.slices
        tensors = [entry.read(slices) for entry in entries]
    else:
        tensors = [torch.empty(local.shape, device="cpu")]
    tensor = tensors[0]
    if any(bytes_of(other) != bytes_of(tensor) for other in tensors[1:]):
        remedy = "Pass a module that does not tie them, so that each has its own"
        raise CheckpointError(f"{name} is a tied parameter, and its names have different values. {remedy}.")
    tensor = tensor.to(device_of(leaf), entries[0].dtype)
    # A view would hold its base, and a donated step writes to no memory that two tensors hold.
    tensor = tensor.reshape(local.shape).detach().contiguous()
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()
    if not is_sharded(leaf):
        return tensor
    restored = Sharded(padded(tensor, leaf.spec), leaf.spec)
    return pin_leaf(restored) if local.is_meta or leaf.local.is_pinned() else restored
