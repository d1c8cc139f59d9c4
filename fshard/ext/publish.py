"""Weights from the ranks that train to the ranks that sample: each byte goes once, straight to its owner.

Ranks of one job, which are processes, send each other messages by torch.distributed's default group, beside the groups
of all meshes, so that a rank that is lost breaks no mesh. Trainers tell samplers which boxes of leaves they hold, and
each sampler asks for those that it lacks: a schedule that follows from the two layouts alone.
"""

import json
import math
import threading
import zlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import fshard as fs
from fshard.comm import CollectiveError
from fshard.extend import describe, expect, flatten, piece_of, refuse

# Leaves are cast and under way up to this many bytes at a time, a larger one alone.
UNIT_BYTES = 16 * 1024 * 1024
# Seconds that a rank waits for one on the other side.
TIMEOUT = 60.0
# Tags of the parts of a text; those of weights are numbers from 0.
LENGTH, TEXT = 2**30, 2**30 + 1


class Box(NamedTuple):
    """A part of a leaf: the leaf's name, its dtype and shape, and where the part begins and its size along each dim."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """Index the part in a tensor that holds another one."""
        starts = [a - b for a, b in zip(self.start, outer.start, strict=True)]
        return tuple(slice(begin, begin + size) for begin, size in zip(starts, self.size, strict=True))

    def common(self, other: "Box") -> "Box":
        """The part that two have in common, perhaps empty; with this one's dtype."""
        start = tuple(map(max, self.start, other.start))
        ends = map(lambda a, m, b, n: min(a + m, b + n), self.start, self.size, other.start, other.size)
        return self._replace(start=start, size=tuple(max(end - a, 0) for end, a in zip(ends, start, strict=True)))

    def is_like(self, other: "Box") -> bool:
        """Whether both are of one leaf, whose floating numbers may be cast."""
        floating = all(getattr(torch, box.dtype).is_floating_point for box in (self, other))
        return self.shape == other.shape and (floating or self.dtype == other.dtype)

    @property
    def numel(self) -> int:
        """Count its elements."""
        return math.prod(self.size)


def publish(
    params: Any,
    ranks: Sequence[int],
    *,
    version: int = 0,
    names: Callable[[str], str] | None = None,
    timeout: float = TIMEOUT,
) -> None:
    """Send this trainer's part of weights to ranks that sample, which call `receive`; every trainer must call this.

    Each byte that a sampler owns is sent once, by a trainer that holds it, in the sampler's dtype. A trainer holds one
    unit of its weights more, of 16 MB or one leaf, for messages. For samplers of other jobs write safetensors by
    `fs.checkpoint.save_huggingface`, to a new directory for each version.

    Args:
        params: Any pytree of tensors and Sharded leaves, the same on every trainer, such as a whole TrainState; nothing
            is sent of leaves that are None.
        ranks: The samplers, by their ranks in the job.
        version: A number that samplers get beside the weights.
        names: What a leaf is called there, from its name here; None takes it as it is.
        timeout: Seconds to wait for a sampler.

    Raises:
        ValueError: if `ranks` are no other ranks of this job, `names` gives several leaves one name, or a leaf is no
            tensor.
        CollectiveError: with each sampler that is lost or late, or refuses, when all others have the weights. The
            trainers' mesh stays good.

    >>> import torch, fshard as fs
    >>> fs.publish({"w": torch.ones(2)}, [0])
    Traceback (most recent call last):
    ValueError: publish: expected ranks of this job on the other side, got [0]; start all by one torchrun
    """
    peers = _Peers("publish", ranks, timeout)
    _check_tensors("publish", params)
    boxes = [*_boxes(params, names or str)]
    held = {box.name: (box, tensor) for box, tensor in boxes}
    expect(len(held) == len(boxes), "publish", "names to give each leaf a name of its own", "one of several leaves")
    peers.tell(dict.fromkeys(ranks, (version, [box for box, _ in boxes])))
    said = peers.hear()
    peers.lost |= {rank: "it refused, and says why" for rank, parts in said.items() if parts is None}
    asked = {rank: [*map(_box, parts)] for rank, parts in said.items() if parts is not None}
    sums: dict[int, list[int]] = {rank: [] for rank in asked}
    for unit in _units(held):
        ready: dict[Box, torch.Tensor] = {}
        for rank, number, box in _of_unit(asked, unit):
            outer, tensor = held[box.name]
            if box not in ready:
                ready[box] = _bytes(tensor[box.within(outer)].to("cpu", getattr(torch, box.dtype)).contiguous())
            sums[rank].append(zlib.crc32(ready[box].numpy().data))
            peers.start(dist.isend, rank, ready[box], number)
        peers.wait()
    peers.tell(sums)
    peers.end()


def receive(like: Any, ranks: Sequence[int], *, timeout: float = TIMEOUT) -> tuple[Any, int]:
    """Get weights from ranks that train, which call `publish`; every sampler must call this.

    Args:
        like: A pytree of tensors and Sharded leaves: which dtype, shape and layout the weights shall have here. None
            leaves stay None.
        ranks: The trainers, by their ranks in the job.
        timeout: Seconds to wait for a trainer.

    Returns:
        New weights of the structure, specs and dtypes of `like`, and their version.

    Raises:
        ValueError: if trainers have no such leaf, or another shape or kind of number, and they hear of it too; or if a
            leaf is no tensor.
        CollectiveError: if a trainer is lost or late, trainers have different versions, or bytes are not those sent.

    >>> import torch, fshard as fs
    >>> fs.receive({"w": torch.ones(2)}, [0])
    Traceback (most recent call last):
    ValueError: receive: expected ranks of this job on the other side, got [0]; start all by one torchrun
    """
    peers = _Peers("receive", ranks, timeout)
    _check_tensors("receive", like)
    said = peers.hear()
    peers.end()
    made = fs.tree_map(torch.zeros_like, like)
    held = {box.name: (box, tensor) for box, tensor in _boxes(made, str)}
    asked, problems = _schedule(held, {rank: [*map(_box, boxes)] for rank, (_, boxes) in said.items()})
    versions = {version for version, _ in said.values()}
    fits = not problems and len(versions) == 1
    peers.tell({rank: boxes if fits else None for rank, boxes in asked.items()})
    refuse("receive: leaves do not fit", problems, "receive what trainers publish, by the names that they give it")
    expect(fits, "receive", "one version", f"{sorted(versions)}", error=CollectiveError)
    # In the order in which trainers send them.
    order = dict.fromkeys(name for _, boxes in said.values() for name, *_ in boxes)
    held = {name: held[name] for name in order if name in held}
    sums: dict[int, list[int]] = {rank: [] for rank in ranks}
    for unit in _units(held):
        landing = []
        for rank, number, box in _of_unit(asked, unit):
            outer, tensor = held[box.name]
            place = tensor[box.within(outer)]
            alone = place.is_contiguous() and place.is_cpu
            buffer = place if alone else torch.empty(place.shape, dtype=place.dtype, device="cpu")
            peers.start(dist.irecv, rank, _bytes(buffer), number)
            landing.append((rank, place, buffer))
        peers.wait()
        peers.end()
        for rank, place, buffer in landing:
            sums[rank].append(zlib.crc32(_bytes(buffer).numpy().data))
            place.copy_(buffer)
    told = peers.hear()
    peers.end()
    wrong = [rank for rank in ranks if told[rank] != sums[rank]]
    expect(not wrong, "receive", "the bytes that were sent", f"others from ranks {wrong}", error=CollectiveError)
    return made, versions.pop()


def _schedule(
    held: Mapping[str, tuple[Box, torch.Tensor]], offered: Mapping[int, Sequence[Box]]
) -> tuple[dict[int, list[Box]], list[Any]]:
    """Choose for each rank on the other side what it sends, and find the leaves that ranks there do not make up."""
    holders: dict[str, dict[Box, list[int]]] = {}
    for rank, boxes in offered.items():
        for box in boxes:
            holders.setdefault(box.name, {}).setdefault(box, []).append(rank)
    asked: dict[int, list[Box]] = {rank: [] for rank in offered}
    problems = []
    for number, (name, theirs) in enumerate(holders.items()):
        own, other = held.get(name, (None,))[0], next(iter(theirs))
        if own and not own.is_like(other):
            problems.append((name, f"{other.dtype}{[*other.shape]}", f"{own.dtype}{[*own.shape]}"))
        elif own:
            parts = {own.common(part): ranks for part, ranks in theirs.items()}
            for part, ranks in parts.items():
                if part.numel:
                    # Ranks here and leaves take turns among those that hold the same.
                    asked[ranks[(dist.get_rank() + number) % len(ranks)]].append(part)
            if sum(part.numel for part in parts) != own.numel:
                problems.append((name, "a part of it", "all of it on the ranks that publish"))
    problems += [(name, "nothing", "a leaf") for name in held if name not in holders]
    return asked, problems


def _check_tensors(what: str, tree: Any) -> None:
    """Refuse leaves that are neither tensors nor None."""
    flat = flatten(tree)
    problems = []
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        if not (leaf is None or isinstance(leaf, torch.Tensor | fs.Sharded)):
            problems.append((path, describe(leaf), "a tensor, a Sharded leaf or None"))
    refuse(f"{what}: leaves are no tensors", problems, "make tensors of numbers, and keep other values out of the tree")


def _boxes(tree: Any, names: Callable[[str], str]) -> Iterator[tuple[Box, torch.Tensor]]:
    """The parts of leaves that this rank holds, by their names there; none where it holds no element."""
    flat = flatten(tree)
    for name, leaf in zip(flat.names, flat.leaves, strict=True):
        if leaf is None:
            continue
        start, tensor, shape = piece_of(leaf)
        if tensor.numel():
            yield Box(names(name), str(tensor.dtype).removeprefix("torch."), shape, start, tuple(tensor.shape)), tensor


def _box(fields: Sequence[Any]) -> Box:
    """Make a box of what JSON made of it."""
    return Box(*(tuple(field) if isinstance(field, list) else field for field in fields))  # type: ignore[arg-type]


def _units(held: Mapping[str, tuple[Box, torch.Tensor]]) -> Iterator[set[str]]:
    """Leaves of at most so many bytes together, or of one leaf, in their order."""
    unit, nbytes = set[str](), 0
    for name, (_, tensor) in held.items():
        if unit and nbytes + tensor.nbytes > UNIT_BYTES:
            yield unit
            unit, nbytes = set(), 0
        unit.add(name)
        nbytes += tensor.nbytes
    yield unit


def _of_unit(asked: Mapping[int, Sequence[Box]], unit: Container[str]) -> Iterator[tuple[int, int, Box]]:
    """The messages of a unit: the rank on the other side, the message's number, and what is sent."""
    for rank, boxes in asked.items():
        yield from ((rank, number, box) for number, box in enumerate(boxes) if box.name in unit)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


class _Peers:
    """Ranks on the other side, and why some of them are lost, to which nothing is sent any more.

    Attributes:
        lost: What became of each rank that is lost.
    """

    def __init__(self, what: str, ranks: Sequence[int], timeout: float) -> None:
        job = range(dist.get_world_size()) if dist.is_initialized() else ()
        fits = ranks and all(rank in job and rank != dist.get_rank() for rank in ranks)
        expect(fits, what, "ranks of this job on the other side", f"{ranks!r:.40}", "start all by one torchrun")
        self._what, self._ranks, self._limit = what, ranks, timedelta(seconds=timeout)
        self._works: list[tuple[int, Any]] = []
        self.lost: dict[int, str] = {}

    def start(self, op: Callable[..., Any], rank: int, tensor: torch.Tensor, tag: int) -> None:
        """Start a message."""
        if rank not in self.lost:
            with self._noting(rank):
                self._works.append((rank, op(tensor, rank, tag=tag)))

    def wait(self) -> None:
        """Wait for all messages, in a thread: torch's own wait does not return for Ctrl-C."""
        thread = threading.Thread(target=self._wait_for_messages, daemon=True)
        thread.start()
        thread.join()

    def _wait_for_messages(self) -> None:
        works, self._works = self._works, []
        for rank, work in works:
            if rank not in self.lost:
                with self._noting(rank):
                    work.wait(self._limit)

    def tell(self, values: Mapping[int, Any]) -> None:
        """Send a value to each rank."""
        texts = {rank: json.dumps(value).encode() for rank, value in values.items()}
        for rank, text in texts.items():
            self.start(dist.isend, rank, torch.tensor([len(text)]), LENGTH)
            self.start(dist.isend, rank, torch.frombuffer(bytearray(text), dtype=torch.uint8), TEXT)
        self.wait()

    def hear(self) -> dict[int, Any]:
        """Receive a value from each rank that is not lost."""
        lengths = {rank: torch.zeros(1, dtype=torch.int64) for rank in self._ranks}
        for rank, length in lengths.items():
            self.start(dist.irecv, rank, length, LENGTH)
        self.wait()
        texts = {rank: torch.empty(int(length), dtype=torch.uint8) for rank, length in lengths.items()}
        for rank, text in texts.items():
            self.start(dist.irecv, rank, text, TEXT)
        self.wait()
        return {rank: json.loads(bytes(text.numpy())) for rank, text in texts.items() if rank not in self.lost}

    def end(self) -> None:
        """Name the ranks that are lost."""
        found = "".join(f"\n  rank {rank}: {text}" for rank, text in self.lost.items())
        if self.lost:
            raise CollectiveError(
                f"{self._what}: expected an answer of all ranks on the other side, got none of{found}"
            )

    @contextmanager
    def _noting(self, rank: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self.lost[rank] = f"{error}".partition("\n")[0]
