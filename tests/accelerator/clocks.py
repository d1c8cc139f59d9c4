"""Vector clocks over the log of the device "emu": which kernels touch the same memory, and nothing orders them."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from torch.cuda._sanitizer import Access, EventHandler

# CUDA gives out so many streams, one after another, and begins again.
STREAMS = 32
# The host, as if it were a stream: it waits for the device only where it says so, but whatever it launches comes later.
HOST = -1
# The event of the host, beside those of the log, which count from 1.
AFTER_HOST = 0


class Race(NamedTuple):
    """Two kernels on different streams that touch the same memory, of which one writes."""

    # The kernel that wrote the memory first, which tells what it holds; after "freed: " that of the tensor which had
    # the memory before.
    memory: str
    first: str  # the kernel that was launched first
    second: str  # the kernel that nothing orders after the first


class LastAccess(NamedTuple):
    """The last kernel of a stream that touched memory which is free now."""

    memory: str
    access: Access


@dataclass
class Block:
    """Memory that a tensor holds."""

    number: int  # its name for the clocks, which no other memory has: addresses come again
    stream: int  # the stream that it was taken on, and which may take it again as soon as it is free
    memory: str = ""  # the kernel that wrote it first
    # Streams whose work on it must be done before it can be taken again, by `record_stream`.
    kept_for: set[int] = field(default_factory=set)
    # The last accesses, by stream, to what was free on the stream when this was taken.
    before: dict[int, LastAccess] = field(default_factory=dict)


class Clocks:
    """What is ordered with what, by a log that tells of memory and events.

    The order of kernels is that of torch's CUDA sanitizer. It does not know who takes memory again: here, as in CUDA's
    caching allocator, memory that is free goes to any later tensor of the stream that it was taken on. A tensor's first
    kernel must therefore be ordered after all kernels that touched what was free.

    Attributes:
        launches: How many kernels each stream ran.
        orders: How often a stream waited for an event.
        races: How often each was found.
    """

    def __init__(self) -> None:
        self._sanitizer = EventHandler()
        self._numbers = itertools.count(1)
        self._blocks: dict[str, Block] = {}
        self._block_of_number: dict[int, Block] = {}
        self._free: defaultdict[int, dict[int, LastAccess]] = defaultdict(dict)
        self._collective = ""
        self._sanitizer._handle_stream_creation(HOST)
        self.launches: Counter[int] = Counter()
        self.orders = 0
        self.races: Counter[Race] = Counter()

    def read(self, log: Iterable[str]) -> None:
        """Follow a log; lines that tell of neither memory nor events are passed over."""
        for line in log:
            match line.split(" "):
                case ["collective", *words]:
                    self._collective = " ".join(words)
                case ["launch", operator, "on", stream, "reads", *addresses]:
                    self._order_after_host(_stream(stream))
                    self._launch(operator, _stream(stream), addresses)
                case ["run", operator, "on", "host", "reads", *addresses]:
                    self._launch(operator, HOST, addresses)
                case ["take", address, _, "on", stream]:
                    self._take(address, _stream(stream))
                case ["free", address]:
                    self._release(address)
                case ["keep", address, "for", stream]:
                    self._block(address).kept_for.add(_stream(stream))
                case ["event", recording, "of", stream]:
                    self._sanitizer._handle_event_record(int(recording), _stream(stream))
                case ["stream", stream, "after", "event", recording]:
                    self.orders += 1
                    self._sanitizer._handle_event_wait(int(recording), _stream(stream))
                case ["host", "after", "event", recording]:
                    self._sanitizer._handle_event_synchronization(int(recording))
                case ["host", "after", "stream", stream]:
                    self._sanitizer._handle_stream_synchronization(_stream(stream))
                case ["host", "after", "device"]:
                    self._sanitizer._handle_device_synchronization()

    def _order_after_host(self, stream: int) -> None:
        self._sanitizer._handle_event_record(AFTER_HOST, HOST)
        self._sanitizer._handle_event_wait(AFTER_HOST, stream)

    def _launch(self, operator: str, stream: int, addresses: list[str]) -> None:
        end = addresses.index("writes")
        reads = addresses[:end]
        writes = addresses[end + 1 :]
        name = operator.removeprefix("aten::")
        if stream == HOST:
            name = f"host {name}"
        if self._collective:
            name = f"{name} in {self._collective}"
        self.launches[stream] += 1
        written = {self._block(address).number for address in writes}
        read = {self._block(address).number for address in reads} - written
        no_names: defaultdict[int, list[str]] = defaultdict(list)
        for error in self._sanitizer._handle_kernel_launch(stream, read, written, set(), name, no_names):
            memory = self._block_of_number[error.data_ptr].memory
            self.races[Race(memory, error.previous_access.operator, name)] += 1
        for number in written:
            self._begin(self._block_of_number[number], name, stream)

    def _begin(self, block: Block, name: str, stream: int) -> None:
        """Order the first kernel that writes a tensor after all that touched its memory before it was free."""
        block.memory = block.memory or name
        for memory, access in block.before.values():
            if not self._is_ordered(stream, access):
                self.races[Race(f"freed: {memory}", access.operator, name)] += 1
        block.before = {}

    def _block(self, address: str) -> Block:
        """Return the memory at an address, also if it was taken before the log began."""
        if address not in self._blocks:
            self._take(address, stream=HOST if address.startswith("host:") else 0)
        return self._blocks[address]

    def _take(self, address: str, stream: int) -> None:
        block = Block(next(self._numbers), stream, before=dict(self._free[stream]))
        self._blocks[address] = block
        self._block_of_number[block.number] = block

    def _release(self, address: str) -> None:
        block = self._blocks.pop(address, None)
        if block is None:
            return
        del self._block_of_number[block.number]
        accesses = self._last_accesses(block)
        if block.stream == HOST:
            # The allocator of pinned memory waits for copies by itself.
            return
        free = self._free[block.stream]
        for access in accesses:
            # The allocator waits for the work of these streams, and so for what that work waits for.
            is_done = any(self._is_ordered(stream, access) for stream in block.kept_for)
            last = free.get(access.stream)
            if not is_done and (last is None or last.access.seq_num < access.seq_num):
                free[access.stream] = LastAccess(block.memory, access)

    def _is_ordered(self, stream: int, access: Access) -> bool:
        """Tell whether the work of a stream from now on comes after an access."""
        return self._sanitizer.syncs.is_ordered_after(stream, access.seq_num, access.stream)

    def _last_accesses(self, block: Block) -> list[Access]:
        """Return, and let the clocks forget, what touched a tensor since its last write, and this write."""
        accesses = self._sanitizer.tensors_accessed.accesses.pop(block.number, None)
        if accesses is None:
            return []
        return accesses.reads if accesses.write is None else [*accesses.reads, accesses.write]


def _stream(name: str) -> int:
    number = int(name)
    return 1 + (number - 1) % STREAMS if number else 0
