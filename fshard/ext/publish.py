"""Weights from the ranks that train to the ranks that sample: each byte is sent once, straight to its owner.

The ranks are processes of one job. They exchange messages over torch.distributed's default group, which no mesh uses,
so a lost rank breaks no mesh. Trainers tell samplers which parts of leaves they hold, and each sampler requests those
that it needs: the schedule follows from the two layouts alone.
"""

import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import fshard as fs
from fshard.comm import CollectiveError
from fshard.extend import Box, describe, expect, flatten, local_box, refuse

# At most so many bytes of leaves are cast and sent at a time; a larger leaf is sent alone.
UNIT_BYTES = 16 * 1024 * 1024
# Seconds that a rank waits for one on the other side.
TIMEOUT = 60.0
# Tags of the parts of a text; those of weights are numbers from 0.
LENGTH = 2**30
TEXT = LENGTH + 1


class LeafBox(NamedTuple):
    """A part of a leaf: the leaf's name, its dtype and shape, and the region that the part is."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    region: Box

    def is_like(self, other: "LeafBox") -> bool:
        """Whether both are of one leaf, whose floating numbers may be cast."""
        are_floating = all(getattr(torch, box.dtype).is_floating_point for box in (self, other))
        return self.shape == other.shape and (are_floating or self.dtype == other.dtype)

    @property
    def numel(self) -> int:
        """Count its elements."""
        return math.prod(max(size, 0) for size in self.region.shape)


class LeafPart(NamedTuple):
    """The part of a leaf that this rank holds, and a tensor with its elements."""

    box: LeafBox
    tensor: torch.Tensor

    def view(self, box: LeafBox) -> torch.Tensor:
        """The elements of a part inside it."""
        return self.tensor[box.region.inside(self.box.region).slices]


class Message(NamedTuple):
    """A part of a leaf that is sent: the rank on the other side, the number of the message there, and the part."""

    rank: int
    number: int
    box: LeafBox


# The parts that this rank holds, by the names of leaves.
Parts = Mapping[str, LeafPart]
# The parts that each rank on the other side offers or is to send, by rank.
BoxesOfRanks = Mapping[int, Sequence[LeafBox]]


def publish(
    params: Any,
    ranks: Sequence[int],
    *,
    version: int = 0,
    names: Callable[[str], str] | None = None,
    timeout: float = TIMEOUT,
) -> None:
    """Send this trainer's part of weights to ranks that sample, which call `receive`; every trainer must call this.

    Each byte is sent once, from a trainer that holds it to the sampler that needs it, in the sampler's dtype. For its
    messages a trainer needs memory for 16 MB of its weights, or for one leaf if that is larger. For samplers of other
    jobs, write safetensors by `fs.checkpoint.save_huggingface`, to a new directory for each version.

    Args:
        params: Any pytree of tensors and Sharded leaves, of the same structure on every trainer, such as a whole
            TrainState. Leaves that are None are not sent.
        ranks: The samplers, by their ranks in the job.
        version: A number that samplers get with the weights.
        names: Returns the name of a leaf there, by its name here; None keeps the name.
        timeout: Seconds to wait for a sampler.

    Raises:
        ValueError: if `ranks` are no other ranks of this job, `names` gives several leaves one name, or a leaf is no
            tensor.
        CollectiveError: if samplers are lost or late, or refuse, with each of them. By then all others have the
            weights, and the trainers' mesh stays good.

    >>> import torch, fshard as fs
    >>> fs.publish({"w": torch.ones(2)}, [0])
    Traceback (most recent call last):
    ValueError: publish: expected ranks to be other ranks of this job, got [0]; start all of them by one torchrun
    """
    peers = _Peers("publish", ranks, timeout)
    _check_tensors("publish", params)
    listed = list(_list_parts(params, names or str))
    parts = {part.box.name: part for part in listed}
    if len(parts) != len(listed):
        raise ValueError("publish: names gives several leaves one name; change it")
    boxes = [part.box for part in listed]
    peers.send_values(dict.fromkeys(ranks, (version, boxes)))
    requests: dict[int, list[LeafBox]] = {}
    for rank, rows in peers.receive_values().items():
        if rows is None:
            peers.lost[rank] = "it refused, and its own error says why"
        else:
            requests[rank] = _parse_boxes(rows)
    for messages in _messages_of_units(parts, requests):
        _send(peers, parts, messages)
    peers.raise_if_lost()


def _send(peers: "_Peers", parts: Parts, messages: Sequence[Message]) -> None:
    """Send the messages of a unit. A part that several ranks get is cast once."""
    data: dict[LeafBox, torch.Tensor] = {}
    for rank, number, box in messages:
        if box not in data:
            tensor = parts[box.name].view(box).to("cpu", getattr(torch, box.dtype))
            data[box] = _bytes(tensor.contiguous())
        peers.start(dist.isend, rank, data[box], number)
    peers.wait()


def receive(like: Any, ranks: Sequence[int], *, timeout: float = TIMEOUT) -> tuple[Any, int]:
    """Get weights from ranks that train, which call `publish`; every sampler must call this.

    Args:
        like: A pytree of tensors and Sharded leaves, with the dtypes, shapes and layouts that the weights get here.
            Leaves that are None stay None.
        ranks: The trainers, by their ranks in the job.
        timeout: Seconds to wait for a trainer.

    Returns:
        New weights of the structure, specs and dtypes of `like`, and their version.

    Raises:
        ValueError: if trainers have no such leaf, or one of another shape or kind of number, which their own error
            tells them; or if a leaf is no tensor.
        CollectiveError: if a trainer is lost or late, or trainers have different versions.

    >>> import torch, fshard as fs
    >>> fs.receive({"w": torch.ones(2)}, [0])
    Traceback (most recent call last):
    ValueError: receive: expected ranks to be other ranks of this job, got [0]; start all of them by one torchrun
    """
    peers = _Peers("receive", ranks, timeout)
    _check_tensors("receive", like)
    offers = peers.receive_values()
    peers.raise_if_lost()
    versions = {version for version, _ in offers.values()}
    offered = {rank: _parse_boxes(rows) for rank, (_, rows) in offers.items()}
    made = fs.tree_map(torch.zeros_like, like)
    parts = {part.box.name: part for part in _list_parts(made, str)}
    requests = _request(peers, parts, offered, versions)
    for messages in _messages_of_units(parts, requests):
        _receive(peers, parts, messages)
    return made, versions.pop()


def _request(peers: "_Peers", parts: Parts, offered: BoxesOfRanks, versions: set[int]) -> BoxesOfRanks:
    """Ask each rank on the other side for what it is to send; where leaves or versions do not fit, ask none."""
    requests, problems = _schedule(parts, offered)
    is_refused = bool(problems) or len(versions) > 1
    peers.send_values({rank: None if is_refused else boxes for rank, boxes in requests.items()})
    refuse("receive: leaves do not fit", problems, "receive what trainers publish, by the names that they give it")
    if is_refused:
        raise CollectiveError(f"receive: trainers publish different versions, {sorted(versions)}")
    return requests


def _receive(peers: "_Peers", parts: Parts, messages: Sequence[Message]) -> None:
    """Receive the messages of a unit into their places."""
    arrivals = []
    for rank, number, box in messages:
        place = parts[box.name].view(box)
        buffer = place
        if not (place.is_contiguous() and place.is_cpu):
            buffer = torch.empty(place.shape, dtype=place.dtype, device="cpu")
        peers.start(dist.irecv, rank, _bytes(buffer), number)
        arrivals.append((place, buffer))
    peers.wait()
    peers.raise_if_lost()
    for place, buffer in arrivals:
        place.copy_(buffer)


def _schedule(parts: Parts, offered: BoxesOfRanks) -> tuple[BoxesOfRanks, list[tuple[str, str, str]]]:
    """Choose for each rank on the other side what it sends, and find the leaves that ranks there do not make up."""
    requests: dict[int, list[LeafBox]] = {rank: [] for rank in offered}
    problems = []
    holders_of_leaves = _find_holders(offered)
    for number, (name, holders) in enumerate(holders_of_leaves.items()):
        if name not in parts:
            continue
        box = parts[name].box
        other = next(iter(holders))
        if not box.is_like(other):
            problems.append((name, f"{other.dtype}{[*other.shape]}", f"{box.dtype}{[*box.shape]}"))
            continue
        common: dict[LeafBox, list[int]] = {}
        for held, ranks in holders.items():
            region = box.region.intersect(held.region)
            common[box._replace(region=region)] = ranks
        if sum(part.numel for part in common) != box.numel:
            problems.append((name, "is only in part on the ranks that publish it", ""))
        # Ranks here and leaves take turns among those that hold the same.
        turn = dist.get_rank() + number
        for part, ranks in common.items():
            if part.numel:
                requests[ranks[turn % len(ranks)]].append(part)
    for name in parts:
        if name not in holders_of_leaves:
            problems.append((name, "is none of the leaves that are published", ""))
    return requests, problems


def _find_holders(offered: BoxesOfRanks) -> dict[str, dict[LeafBox, list[int]]]:
    """List the ranks that hold each part, by the names of leaves."""
    holders_of_leaves: dict[str, dict[LeafBox, list[int]]] = {}
    for rank, boxes in offered.items():
        for box in boxes:
            holders = holders_of_leaves.setdefault(box.name, {})
            holders.setdefault(box, []).append(rank)
    return holders_of_leaves


def _check_tensors(api_name: str, tree: Any) -> None:
    """Refuse leaves that are neither tensors nor None."""

    def misfit(leaf: Any) -> tuple[str, str] | None:
        if leaf is None or isinstance(leaf, torch.Tensor | fs.Sharded):
            return None
        return describe(leaf), "a tensor, a Sharded leaf or None"

    remedy = "make tensors of numbers, and keep other values out of the tree"
    refuse(f"{api_name}: leaves are no tensors", flatten(tree).problems(misfit), remedy)


def _list_parts(tree: Any, names: Callable[[str], str]) -> Iterator[LeafPart]:
    """List the parts of leaves that this rank holds, under their names there; none where it holds no element."""
    flat = flatten(tree)
    for name, leaf in zip(flat.names, flat.leaves, strict=True):
        if leaf is None:
            continue
        local = local_box(leaf)
        if local.tensor.numel():
            dtype = str(local.tensor.dtype).removeprefix("torch.")
            yield LeafPart(LeafBox(names(name), dtype, local.full_shape, local.box), local.tensor)


def _parse_boxes(rows: Sequence[Sequence[Any]]) -> list[LeafBox]:
    """Make boxes of what JSON made of them."""
    boxes = []
    for name, dtype, shape, region in rows:
        boxes.append(LeafBox(name, dtype, tuple(shape), Box(*map(tuple, region))))
    return boxes


def _messages_of_units(parts: Parts, requests: BoxesOfRanks) -> Iterator[list[Message]]:
    """List the messages that are under way together: those of at most UNIT_BYTES of leaves, or of one leaf.

    Both sides take leaves in the order of their names, or each would wait for another leaf.
    """
    messages_of_leaves: dict[str, list[Message]] = {name: [] for name in sorted(parts)}
    for rank, boxes in requests.items():
        for number, box in enumerate(boxes):
            messages_of_leaves[box.name].append(Message(rank, number, box))
    unit: list[Message] = []
    unit_bytes = 0
    for name, messages in messages_of_leaves.items():
        nbytes = parts[name].tensor.nbytes
        if unit_bytes + nbytes > UNIT_BYTES:
            yield unit
            unit = []
            unit_bytes = 0
        unit += messages
        unit_bytes += nbytes
    yield unit


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


class _Peers:
    """The ranks on the other side. Nothing more is sent to one that is lost.

    Attributes:
        lost: The reasons for which ranks are lost, by rank.
    """

    def __init__(self, api_name: str, ranks: Sequence[int], timeout: float) -> None:
        job = range(dist.get_world_size()) if dist.is_initialized() else ()
        are_others = ranks and all(rank in job and rank != dist.get_rank() for rank in ranks)
        remedy = "start all of them by one torchrun"
        expect(are_others, api_name, "ranks to be other ranks of this job", f"{ranks!r:.40}", remedy)
        self._api_name = api_name
        self._ranks = ranks
        self._limit = timedelta(seconds=timeout)
        self._works: list[tuple[int, Any]] = []
        self.lost: dict[int, str] = {}

    def start(self, op: Callable[..., Any], rank: int, tensor: torch.Tensor, tag: int) -> None:
        """Start a message."""
        if rank not in self.lost:
            with self._noting_loss(rank):
                self._works.append((rank, op(tensor, rank, tag=tag)))

    def wait(self) -> None:
        """Wait for all messages, in a thread: torch's own wait does not return for Ctrl-C."""
        thread = threading.Thread(target=self._wait_for_messages, daemon=True)
        thread.start()
        thread.join()

    def _wait_for_messages(self) -> None:
        works = self._works
        self._works = []
        for rank, work in works:
            if rank not in self.lost:
                with self._noting_loss(rank):
                    work.wait(self._limit)

    def send_values(self, values: Mapping[int, Any]) -> None:
        """Send a value to each rank. Messages go between CPUs, whatever torch's default device is."""
        for rank, value in values.items():
            text = bytearray(json.dumps(value).encode())
            self.start(dist.isend, rank, torch.tensor([len(text)], device="cpu"), LENGTH)
            self.start(dist.isend, rank, torch.frombuffer(text, dtype=torch.uint8), TEXT)
        self.wait()

    def receive_values(self) -> dict[int, Any]:
        """Receive a value from each rank that is not lost."""
        lengths = {rank: torch.zeros(1, dtype=torch.int64, device="cpu") for rank in self._ranks}
        for rank, length in lengths.items():
            self.start(dist.irecv, rank, length, LENGTH)
        self.wait()
        texts = {}
        for rank, length in lengths.items():
            texts[rank] = torch.empty(int(length), dtype=torch.uint8, device="cpu")
        for rank, text in texts.items():
            self.start(dist.irecv, rank, text, TEXT)
        self.wait()
        return {rank: json.loads(bytes(text.numpy())) for rank, text in texts.items() if rank not in self.lost}

    def raise_if_lost(self) -> None:
        """Raise an error that names the ranks that are lost, if there are any."""
        if self.lost:
            lines = [f"\n  rank {rank}: {text}" for rank, text in self.lost.items()]
            raise CollectiveError(f"{self._api_name}: ranks on the other side are lost{''.join(lines)}")

    @contextmanager
    def _noting_loss(self, rank: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self.lost[rank] = f"{error}".partition("\n")[0]
