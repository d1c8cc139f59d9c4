"""Programs whose streams must not race, and faults whose races must be found.

As a script: `races.py LIBRARY RESULT` runs them in one process, as rank 0 of 8 by the backend of
`benchmarks/loop_backend.py`, whose collectives run on a stream of their own. The result tells what
`tests/accelerator/clocks.py` reads in the log of each.
"""

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import fshard as fs
from benchmarks import loop_backend
from fshard import _compat
from fshard.checkpoint import files, host_copies, saving
from fshard.comm import ops, recorder
from fshard.comm.events import decode_label
from tests.accelerator import emu
from tests.accelerator.clocks import HOST, Clocks, Race
from tests.accelerator.programs import batches, modelled

RANKS = 8
DEVICE = "emu"
# Each block of the model is a unit. Gathers cast what they send, and sums what they receive, to memory of their own.
OPTIONS: dict[str, Any] = {"bucket_bytes": 0, "param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
Layout = Callable[[Any], fs.ShardTransform]


class CollectiveNames:
    """A watcher that lets the log tell which collective launches the kernels that follow."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def starts(self, issued: Any, tensors: Any) -> None:
        label = decode_label(issued.label)
        self._library.note(f"collective {issued.op} of {label.unit or label.verb}")

    def started(self, issued: Any) -> None:
        self._library.note("collective")


class HostAccesses(TorchDispatchMode):
    """Lets the log tell which memory of the host its own operators read and write."""

    def __init__(self, library: Any) -> None:
        super().__init__()
        self._library = library
        # Weak, because an update copies a donated tensor whose memory something else holds.
        self._storages: dict[str, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        arguments = dict(zip([argument.name for argument in schema.arguments], args)) | (kwargs or {})
        if arguments.get("device") == torch.device("cpu"):
            self._note_freed()
        results = func(*args, **(kwargs or {}))
        tensors = tensors_in([arguments, results])
        if schema.name.startswith("aten::empty"):
            # Memory is taken, and not written.
            return results
        if any(tensor.device.type != "cpu" for tensor in tensors):
            # The device logs copies between the two, and its own operators.
            self._addresses(tensor for tensor in tensors if tensor.device.type == "cpu")
            return results
        reads = []
        writes = []
        for argument in schema.arguments:
            if argument.alias_info is None:
                reads += tensors_in(arguments.get(argument.name))
            elif argument.alias_info.is_write:
                writes += tensors_in(arguments.get(argument.name))
        for returned, result in zip(schema.returns, results if len(schema.returns) > 1 else [results]):
            if returned.alias_info is None:
                writes += tensors_in(result)
        self.note(func.name(), reads, writes)
        return results

    def note(self, name: str, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        """Log an operator of the host that has run."""
        words = ["run", name, "on", "host", "reads", *self._addresses(reads), "writes", *self._addresses(writes)]
        self._library.note(" ".join(words))

    def _addresses(self, tensors: Iterable[torch.Tensor]) -> list[str]:
        addresses = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                address = f"host:{storage.data_ptr()}"
                self._note_freed(address)
                self._storages.setdefault(address, StorageWeakRef(storage))
                addresses.append(address)
        return addresses

    def _note_freed(self, *addresses: str) -> None:
        """Log which memory, of some or all that is known, was freed and may be another tensor's."""
        for address in addresses or list(self._storages):
            storage = self._storages.get(address)
            if storage is not None and storage.expired():
                del self._storages[address]
                self._library.note(f"free {address}")

    def of_checkpoints(self) -> AbstractContextManager[object]:
        """Let the log tell which tensors are written to files, by whichever thread."""
        bytes_of = files.bytes_of

        def noted_bytes_of(tensor: torch.Tensor) -> memoryview:
            if tensor.device.type == "cpu":
                self.note("write_file", [tensor], [])
            return bytes_of(tensor)

        return mock.patch.object(files, "bytes_of", noted_bytes_of)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """List tensors with values; those of a trace have none."""
    tensors = [leaf for leaf in pytree.tree_leaves(tree) if type(leaf) in (torch.Tensor, torch.nn.Parameter)]
    return [tensor for tensor in tensors if not tensor.is_meta]


# ---- programs


def hsdp(_: Any) -> fs.ShardTransform:
    return fs.hsdp(fs.init_mesh({"replicate": 2, "shard": -1}, device=DEVICE), **OPTIONS)


def offloaded(mesh: Any) -> fs.ShardTransform:
    return fs.compose(fs.offload(DEVICE), fs.zero3(mesh, bucket_bytes=0))


def train(
    layout: Layout,
    *,
    jitted: bool = False,
    donated: bool = False,
    accumulated: bool = False,
    after_step: Callable[[fs.TrainState], object] = lambda state: None,
) -> None:
    """Train some steps."""
    params, loss_fn = modelled(DEVICE, layout, torch.float32)
    tx = fs.chain(fs.clip_by_global_norm(0.5), fs.from_torch(torch.optim.AdamW, lr=1e-2))
    differentiate = fs.accumulate(loss_fn) if accumulated else fs.value_and_grad(loss_fn)

    def step(state: fs.TrainState, batch: Any) -> tuple[fs.TrainState, torch.Tensor]:
        loss, grads = differentiate(state.params, batch)
        return fs.update(tx, state, grads, donate=donated and not jitted), loss

    run = fs.jit(step, donate_argnums=0 if donated else ()) if jitted else step
    state = fs.TrainState.create(params, tx)
    for batch in batches(DEVICE, torch.float32):
        state, _ = run(state, [batch, batch, batch] if accumulated else batch)
        after_step(state)


def apply_offloaded() -> None:
    """Apply a model whose parameters are offloaded; nothing lets the host wait."""
    params, loss_fn = modelled(DEVICE, offloaded, torch.float32)
    with torch.no_grad():
        # Each gather takes streams: so many that they come again.
        for batch in 4 * batches(DEVICE, torch.float32):
            loss_fn(params, batch)


def save_beside_steps(jitted: bool) -> None:
    """Save each step's state while the next step, to which it is donated, writes over it."""

    def save(state: fs.TrainState) -> None:
        saves.append(fs.checkpoint.save(tempfile.mkdtemp(dir=folder), state, asynchronous=True))

    saves: list[fs.checkpoint.Saving] = []
    # The other ranks write no files: nobody waits for them, and the checkpoints stay incomplete.
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(saving, "OTHERS_SECONDS", 0.01):
        train(partial(fs.zero3, **OPTIONS), jitted=jitted, donated=True, after_step=save)
        for each in saves:
            each.finish_at_exit()


def eager_and_jitted(name: str, layout: Layout, **options: bool) -> dict[str, Callable[[], None]]:
    return {name: partial(train, layout, **options), f"{name}, jitted": partial(train, layout, jitted=True, **options)}


PROGRAMS: dict[str, Callable[[], None]] = {
    **eager_and_jitted("zero3", partial(fs.zero3, **OPTIONS)),
    **eager_and_jitted("zero3 in default buckets", fs.zero3),
    **eager_and_jitted("hsdp", hsdp),
    **eager_and_jitted("ddp", partial(fs.ddp, **OPTIONS)),
    **eager_and_jitted("accumulate", partial(fs.zero3, **OPTIONS), accumulated=True),
    **eager_and_jitted("offload", offloaded),
    "offload, forwards": apply_offloaded,
    **eager_and_jitted("donated updates", partial(fs.zero3, **OPTIONS), donated=True),
    "asynchronous saves": partial(save_beside_steps, jitted=False),
    "asynchronous saves, jitted": partial(save_beside_steps, jitted=True),
}


# ---- faults


def lost_wait(op: str) -> AbstractContextManager[object]:
    """No stream waits for collectives of a kind."""
    finish = ops.wait

    def finish_without_wait(buffer: torch.Tensor) -> torch.Tensor:
        issued = buffer.__dict__.get("issued")
        if issued is None or issued.op != op:
            return finish(buffer)
        with mock.patch.object(_compat, "WAIT_TENSOR", lambda buffer: buffer):
            return finish(buffer)

    return mock.patch.object(ops, "wait", finish_without_wait)


def lost_order() -> AbstractContextManager[object]:
    """Collectives do not wait for what computes their tensors."""
    return mock.patch.object(loop_backend.Loop, "wait_for_queued_work", do_nothing)


def lost_order_of_copies() -> AbstractContextManager[object]:
    """Offloaded parameters are copied to the device on a stream that nobody waits for."""

    def copy_beside(self: Any, leaves: list[torch.Tensor], specs: Any) -> list[torch.Tensor]:
        with torch.Stream(DEVICE):
            return [leaf.to(DEVICE, non_blocking=True) for leaf in leaves]

    return mock.patch.object(type(fs.offload(DEVICE)), "gather", copy_beside)


def dropped_record_stream() -> AbstractContextManager[object]:
    """The allocator does not know that another stream reads what was gathered."""
    return mock.patch.object(torch.Tensor, "record_stream", do_nothing)


def freed_buffer() -> AbstractContextManager[object]:
    """A collective does not keep the tensors that it reads until somebody has waited for it."""
    return mock.patch.object(loop_backend.Done, "keep", do_nothing)


def lost_wait_of_host() -> AbstractContextManager[object]:
    """The host uses gradients while they are copied to it."""

    def copy_alone(self: Any, grads: list[torch.Tensor], specs: Any) -> list[torch.Tensor]:
        return [grad.to("cpu", non_blocking=True) for grad in grads]

    return mock.patch.object(type(fs.offload(DEVICE)), "scatter", copy_alone)


def lost_wait_of_save() -> AbstractContextManager[object]:
    """A save in the background copies out of its buffer what has not arrived there."""
    return mock.patch.object(host_copies, "_wait_for_copy", do_nothing)


def do_nothing(*_: object) -> None:
    """Takes the place of a function. Unlike a mock it does not keep tensors that it is called with."""


class Fault(NamedTuple):
    """A fault, and a race that it leads to in some program."""

    plant: Callable[[], AbstractContextManager[object]]  # makes a context with the fault
    program: str
    race: Race  # one of the races that must be found


GATHERED = "copy_ in all_gather of 2"
REDUCED = "copy_ in reduce_scatter of 2"
FAULTS = {
    "lost wait for gathers": Fault(partial(lost_wait, "all_gather"), "zero3", Race(GATHERED, GATHERED, "addmm")),
    "lost wait for gathers, jitted": Fault(
        partial(lost_wait, "all_gather"), "zero3, jitted", Race(GATHERED, GATHERED, "addmm")
    ),
    "lost wait for reductions": Fault(
        partial(lost_wait, "reduce_scatter"), "zero3", Race(REDUCED, "mul in reduce_scatter of 2", "_foreach_div_")
    ),
    "lost wait for sums": Fault(
        partial(lost_wait, "all_reduce"),
        "ddp",
        Race("_foreach_copy_ in all_reduce of 2", "mul in all_reduce of 2", "_foreach_div_"),
    ),
    "lost order of collectives": Fault(lost_order, "zero3", Race("_foreach_copy_", "_foreach_copy_", GATHERED)),
    "lost order of copies": Fault(lost_order_of_copies, "offload", Race("copy_", "copy_", GATHERED)),
    "lost wait of the host": Fault(lost_wait_of_host, "offload", Race("copy_", "copy_", "host _foreach_div_.Scalar")),
    "lost wait of a save": Fault(lost_wait_of_save, "asynchronous saves", Race("copy_", "copy_", "host copy_")),
    "dropped record_stream": Fault(
        dropped_record_stream, "offload, forwards", Race(f"freed: {GATHERED}", "addmm", "copy_")
    ),
    "freed buffer": Fault(freed_buffer, "zero3, jitted", Race("freed: _foreach_copy_", REDUCED, "mm")),
}


# ---- the script


def inspect(
    library: Any, program: Callable[[], None], plant: Callable[[], AbstractContextManager[object]] = nullcontext
) -> dict[str, Any]:
    """Run a program, perhaps with a fault, and read its log."""
    clocks = Clocks()
    library.take_events()
    start = time.perf_counter()
    host = HostAccesses(library)
    with plant(), host, host.of_checkpoints(), recorder.watched(CollectiveNames(library)):
        program()
    gc.collect()
    clocks.read(library.take_events())
    device = clocks.launches[0]
    on_host = clocks.launches[HOST]
    return {
        "launches": device,
        "launches of other streams": clocks.launches.total() - device - on_host,
        "operators of the host": on_host,
        "waits for events": clocks.orders,
        "races": [[*race, count] for race, count in clocks.races.most_common()],
        "seconds": time.perf_counter() - start,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", type=Path)
    parser.add_argument("result", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    library = emu.load(options.library)
    library.note_memory(True)
    # Otherwise a wait for one collective would order all that were started before it, and hide that their own waits
    # are lost.
    loop_backend.Loop.choose_stream = lambda self, device: torch.Stream(device)
    loop_backend.start(RANKS, DEVICE)
    reports = {}
    for name, program in PROGRAMS.items():
        reports[name] = inspect(library, program)
        print(name, reports[name], flush=True)
    for name, fault in FAULTS.items():
        reports[name] = inspect(library, PROGRAMS[fault.program], fault.plant)
        print(name, reports[name], flush=True)
    library.note_memory(False)
    options.result.write_text(json.dumps(reports))


if __name__ == "__main__":
    main()
