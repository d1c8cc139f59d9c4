"""One process as rank 0 of several: a backend whose collectives are local copies on a stream of their own."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

# Cycles that a CUDA device waits in each collective, in the place of a link.
SLEEP = 0

# What else a program may change for a while, by `replaced`:
#   disturb: Called on the streams of a collective: before it, as it begins, and after it was waited for.
#   watch: Makes a context for the kernels of a collective.
#   waits: Whether those who wait for a collective really do.
HOOKS = SimpleNamespace(disturb=lambda: None, watch=nullcontext, waits=True)


@contextmanager
def replaced(
    disturb: Callable[[], object] | None = None,
    watch: Callable[[], AbstractContextManager[Any]] | None = None,
    waits: bool = True,
) -> Iterator[None]:
    """Replace hooks for a while; those that are None stay."""
    before = vars(HOOKS).copy()
    HOOKS.disturb = disturb or HOOKS.disturb
    HOOKS.watch = watch or HOOKS.watch
    HOOKS.waits = waits
    try:
        yield
    finally:
        vars(HOOKS).update(before)


def sleep(device: str, cycles: int) -> None:
    """Let the current stream of a CUDA device wait; no other device can."""
    if cycles and device == "cuda":
        torch.cuda._sleep(cycles)


class Done(dist._Work):
    """A collective that an event of a stream ends."""

    def __init__(self, event: Any = None, tensors: Any = None) -> None:
        super().__init__()
        self.event = event
        self.tensors: Any = None
        self.keep(tensors)

    def keep(self, tensors: Any) -> None:
        """Keep tensors until someone has waited, as ProcessGroupNCCL does.

        The allocator does not know that another stream reads them, and would give other tensors their memory.
        """
        self.tensors = tensors

    def wait(self, timeout: Any = None) -> bool:
        if self.event is not None and HOOKS.waits:
            torch.accelerator.current_stream().wait_event(self.event)
            HOOKS.disturb()
        self.tensors = None
        return True


class Loop(dist.ProcessGroup):
    """Rank 0 of ranks that all send what this one sends."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.ranks = size
        self.side: torch.Stream | None = None

    def getBackendName(self) -> str:  # noqa: N802
        return "loop"

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def group_desc(self) -> str:
        return ""

    def choose_stream(self, device: torch.device) -> torch.Stream:
        """Return the stream of the next collective: the same for all, as ProcessGroupNCCL has it."""
        if self.side is None:
            self.side = torch.Stream(device)
        return self.side

    def wait_for_queued_work(self, side: torch.Stream) -> None:
        """Let the stream of a collective wait for what computes its tensors."""
        side.wait_stream(torch.accelerator.current_stream())

    def _run(self, tensors: Any, outs: Any, work: Callable[[], object]) -> Done:
        device = tensors[0].device
        if device.type == "cpu":
            work()
            return Done()
        side = self.choose_stream(device)
        HOOKS.disturb()
        self.wait_for_queued_work(side)
        with side:
            sleep(device.type, SLEEP)
            HOOKS.disturb()
            with HOOKS.watch():
                work()
        return Done(side.record_event(), (list(tensors), list(outs)))

    def allgather_into_tensor_coalesced(self, outs: Any, ins: Any, opts: Any = None) -> Done:
        def work() -> None:
            for out, own in zip(outs, ins, strict=True):
                out.view(self.ranks, *own.shape).copy_(own.expand(self.ranks, *own.shape))

        return self._run(ins, outs, work)

    def reduce_scatter_tensor_coalesced(self, outs: Any, ins: Any, opts: Any = None) -> Done:
        def work() -> None:
            for out, own in zip(outs, ins, strict=True):
                out.copy_(own.view(self.ranks, *out.shape)[0])
                self._sum(out, opts)

        return self._run(ins, outs, work)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Done:
        return self._run(tensors, tensors, lambda: [self._sum(tensor, opts) for tensor in tensors])

    allreduce = allreduce_coalesced

    # Of one tensor each, for FSDP2: the names of torch 2.11, then those of later versions.
    def _allgather_base(self, out: torch.Tensor, own: torch.Tensor, opts: Any = None) -> Done:
        return self.allgather_into_tensor_coalesced([out], [own], opts)

    def _reduce_scatter_base(self, out: torch.Tensor, own: torch.Tensor, opts: Any = None) -> Done:
        return self.reduce_scatter_tensor_coalesced([out], [own], opts)

    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base

    def _sum(self, tensor: torch.Tensor, opts: Any) -> None:
        """Add up what all ranks send, unless they take the mean or another number that equal ones do not change."""
        if opts is None or opts.reduceOp == dist.ReduceOp.SUM:
            tensor.mul_(self.ranks)

    def alltoall(self, outs: Any, ins: Any, opts: Any = None) -> Done:
        own = next((tensor for tensor in ins if tensor.numel()), None)
        return self._run(ins, outs, lambda: [out.copy_(own) for out in outs if out.numel()])

    def alltoall_base(self, out: torch.Tensor, own: torch.Tensor, *_: Any) -> Done:
        """Send the first row in the place of all that other ranks send."""

        def work() -> None:
            if len(own):
                out.copy_(own[:1].expand_as(out))

        return self._run([own], [out], work)

    all_to_all_single = alltoall_base

    def barrier(self, opts: Any = None) -> Done:
        return Done()


def streams() -> set[str]:
    """The numbers of the streams that collectives run on, as the log of the tests' device has them."""
    groups = [group for group in dist.distributed_c10d._world.pg_map if isinstance(group, Loop)]
    return {str(group.side.stream_id) for group in groups if group.side is not None}


class Echo:
    """Links to ranks that say what this one says."""

    is_busy = False

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def swap(self, issued: Any, number: int, to: int, source: int, data: bytes) -> bytes:
        """Answer with a digest, or with the values of all ranks."""
        try:
            known = json.loads(data)
        except ValueError:
            return data
        if isinstance(known, dict) and set(known) == {"0"}:
            known = {str(rank): known["0"] for rank in range(self.ranks)}
        return json.dumps(known).encode()

    def find_ended_peers(self) -> list[int]:
        return []

    cut = find_ended_peers

    def leave_to_parent(self) -> None:
        pass


def start(ranks: int, device: str) -> None:
    """Make this process rank 0 of so many."""
    for name, kind in (("loop", "cpu"), ("loopx", device)):
        dist.Backend.register_backend(name, lambda store, rank, size, timeout: Loop(rank, size), devices=[kind])
    dist.init_process_group(f"cpu:loop,{device}:loopx", store=dist.HashStore(), rank=0, world_size=ranks)
    from fshard import _compat
    from fshard.comm import Meeting

    def agree(self: Meeting, text: str, merge: Callable[[Sequence[str]], str], look: Callable[[], object]) -> str:
        """Answer for all ranks."""
        self.client = _compat.StoreClient(self.store)
        return merge([text] * len(self.ranks))

    Meeting.agree = agree
    Meeting.connect = lambda self: setattr(self, "links", Echo(ranks))
