"""Weights from the ranks that train to the ranks that sample: each byte is sent once, straight to its owner.

The ranks are processes of one job. They exchange messages over torch.distributed's default group, which no mesh uses,
so a lost rank breaks no mesh. Trainers tell samplers which parts of leaves they hold, and each sampler requests those
that it needs: the schedule follows from the two layouts alone.
"""

import json
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import fshard as fs
from fshard.comm import CollectiveError
from fshard.extend import Box, Problem, check_local, check_tensors, expect, flatten, local_box, refuse

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
            tensor, was donated or has no values.
        CollectiveError: if samplers are lost or late, or refuse, with each of them. By then all others have the
            weights, and the trainers' mesh stays good.

    >>> import torch, fshard as fs
    >>> fs.publish({"w": torch.ones(2)}, [0])
    Traceback (most recent call last):
    ValueError: publish: expected ranks to be a list of other ranks of this job, got [0]; start all by one torchrun
    """
    peers = _Peers("publish", ranks, timeout)
    parts = _list_parts("publish", params, names or str)
    boxes = [part.box for part in parts.values()]
    peers.send_values(dict.fromkeys(ranks, (version, boxes)))
    requests: dict[int, list[LeafBox]] = {}
    for rank, rows in peers.receive_values().items():
        if rows is None:
            peers.lost[rank] = "it refused, and its own error says why"
        else:
            requests[rank] = _parse_boxes(rows)
    for messages in _messages_of_units(parts, requests):
        _transfer(peers, parts, messages, dist.isend)
    peers.raise_if_lost()


def _transfer(peers: "_Peers", parts: Parts, messages: Sequence[Message], op: Callable[..., Any]) -> None:
    """Send or receive the messages of a unit. A part that several ranks get is cast once."""
    buffers: dict[LeafBox, torch.Tensor] = {}
    for rank, number, box in messages:
        if box not in buffers:
            buffers[box] = parts[box.name].view(box).to("cpu", getattr(torch, box.dtype)).contiguous()
        peers.start(op, rank, buffers[box].reshape(-1).view(torch.uint8), number)
    peers.wait()
    if op is dist.irecv:
        peers.raise_if_lost()
        for box, buffer in buffers.items():
            parts[box.name].view(box).copy_(buffer)


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
    ValueError: receive: expected ranks to be a list of other ranks of this job, got [0]; start all by one torchrun
    """
    peers = _Peers("receive", ranks, timeout)
    check_tensors("receive", flatten(like))
    made = fs.tree_map(torch.zeros_like, like)
    parts = _list_parts("receive", made, str)
    offers = peers.receive_values()
    peers.raise_if_lost()
    versions = {version for version, _ in offers.values()}
    offered = {rank: _parse_boxes(rows) for rank, (_, rows) in offers.items()}
    requests, problems = _schedule(parts, offered)
    is_refused = bool(problems) or len(versions) > 1
    peers.send_values({rank: None if is_refused else boxes for rank, boxes in requests.items()})
    refuse("receive: leaves do not fit", problems, "receive what trainers publish, by the names that they give it")
    if is_refused:
        raise CollectiveError(f"receive: trainers publish different versions, {sorted(versions)}")
    for messages in _messages_of_units(parts, requests):
        _transfer(peers, parts, messages, dist.irecv)
    return made, versions.pop()


def _schedule(parts: Parts, offered: BoxesOfRanks) -> tuple[BoxesOfRanks, list[Problem]]:
    """Choose for each rank on the other side what it sends, and find the leaves that ranks there do not make up."""
    requests: dict[int, list[LeafBox]] = {rank: [] for rank in offered}
    problems = []
    # The ranks that hold each part, by the names of leaves.
    holders_of_leaves: dict[str, dict[LeafBox, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, boxes in offered.items():
        for box in boxes:
            holders_of_leaves[box.name][box].append(rank)
    # Ranks here and leaves take turns among those that hold the same.
    for turn, (name, (box, tensor)) in enumerate(parts.items(), start=dist.get_rank()):
        if name not in holders_of_leaves:
            problems.append(Problem(name, "is none of the leaves that are published"))
            continue
        held, *_ = holders_of_leaves[name]
        are_floating = tensor.is_floating_point() and getattr(torch, held.dtype).is_floating_point
        if held.shape != box.shape or not (are_floating or held.dtype == box.dtype):
            problems.append(Problem(name, f"{held.dtype}{[*held.shape]}", f"{box.dtype}{[*box.shape]}"))
            continue
        covered = 0
        for held, ranks in holders_of_leaves[name].items():
            region = box.region.intersect(held.region)
            if min(region.shape, default=1) > 0:
                covered += math.prod(region.shape)
                requests[ranks[turn % len(ranks)]].append(box._replace(region=region))
        if covered != tensor.numel():
            problems.append(Problem(name, "is only in part on the ranks that publish it"))
    return requests, problems


def _list_parts(api_name: str, tree: Any, names: Callable[[str], str]) -> Parts:
    """List the parts of leaves that this rank holds, by their names there; none where it holds no element."""
    flat = flatten(tree)
    check_tensors(api_name, flat)
    check_local(api_name, flat)
    parts: dict[str, LeafPart] = {}
    for name, leaf in zip(flat.names, flat.leaves, strict=True):
        if leaf is None:
            continue
        local = local_box(leaf)
        if local.tensor.numel():
            new_name = names(name)
            if new_name in parts:
                raise ValueError(f"{api_name}: names gives several leaves one name, {new_name!r}; change it")
            dtype = str(local.tensor.dtype).removeprefix("torch.")
            parts[new_name] = LeafPart(LeafBox(new_name, dtype, tuple(leaf.shape), local.box), local.tensor)
    return parts


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
    messages = []
    for rank, boxes in requests.items():
        messages += [Message(rank, number, box) for number, box in enumerate(boxes)]
    messages.sort(key=_leaf_of)
    unit: list[Message] = []
    unit_bytes = 0
    for name, messages_of_leaf in groupby(messages, _leaf_of):
        nbytes = parts[name].tensor.nbytes
        if unit_bytes + nbytes > UNIT_BYTES:
            yield unit
            unit = []
            unit_bytes = 0
        unit += messages_of_leaf
        unit_bytes += nbytes
    yield unit


def _leaf_of(message: Message) -> str:
    return message.box.name


class _Peers:
    """The ranks on the other side. Nothing more is sent to one that is lost.

    Attributes:
        lost: The reasons for which ranks are lost, by rank.
    """

    def __init__(self, api_name: str, ranks: Sequence[int], timeout: float) -> None:
        others: set[int] = set()
        if dist.is_initialized():
            others = set(range(dist.get_world_size())) - {dist.get_rank()}
        are_others = isinstance(ranks, Iterable) and ranks and others.issuperset(ranks)
        remedy = "start all by one torchrun"
        expect(are_others, api_name, "ranks to be a list of other ranks of this job", f"{ranks!r:.40}", remedy)
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
            text = json.dumps(value).encode()
            for tag, data in ((LENGTH, len(text).to_bytes(8)), (TEXT, text)):
                self.start(dist.isend, rank, torch.frombuffer(bytearray(data), dtype=torch.uint8), tag)
        self.wait()

    def receive_values(self) -> dict[int, Any]:
        """Receive a value from each rank that is not lost."""
        lengths = self._receive_bytes(dict.fromkeys(self._ranks, 8), LENGTH)
        texts = self._receive_bytes({rank: int.from_bytes(data) for rank, data in lengths.items()}, TEXT)
        return {rank: json.loads(text) for rank, text in texts.items()}

    def _receive_bytes(self, sizes: Mapping[int, int], tag: int) -> dict[int, bytes]:
        """Receive so many bytes from each rank, and leave out those that are lost."""
        buffers = {}
        for rank, size in sizes.items():
            buffers[rank] = torch.zeros(size, dtype=torch.uint8, device="cpu")
            self.start(dist.irecv, rank, buffers[rank], tag)
        self.wait()
        return {rank: bytes(buffer.numpy()) for rank, buffer in buffers.items() if rank not in self.lost}

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
