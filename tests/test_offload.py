"""Offloaded parameters stay in pinned memory, from which alone copies run beside what computes.

Processors have no pinned memory: here it is what `pin_memory` has returned. The device that computes has no values.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fshard as fs
from fshard._compat import divide_in_place
from fshard.collectives import divide
from tests.trees import one_axis

SHAPES = {"w": (6, 2), "b": (5,)}


@pytest.fixture(autouse=True)
def pinned_storages(monkeypatch):
    """Let tensors know whether their memory is pinned."""
    pinned = {}

    def pin_memory(tensor):
        copy = tensor.clone()
        # Kept, so that no other memory takes its address.
        pinned[copy.untyped_storage().data_ptr()] = copy
        return copy

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.untyped_storage().data_ptr() in pinned)
    return pinned


@pytest.fixture(autouse=True)
def waits(monkeypatch):
    """The devices that the host has waited for."""
    devices = []
    monkeypatch.setattr(torch.accelerator, "synchronize", devices.append)
    return devices


def offloaded():
    return fs.compose(fs.offload("meta"), fs.fully_shard(one_axis()))


def make_state(tx):
    params = fs.shard({name: torch.ones(shape) for name, shape in SHAPES.items()}, offloaded())
    return fs.TrainState.create(params, tx)


def gradients_like(state):
    return fs.tree_map(torch.ones_like, state.params)


def are_pinned(tree):
    return [leaf.is_pinned() for leaf in fs.tree_leaves(tree)]


OPTIMIZERS = {
    "native": lambda: fs.sgd(0.1, momentum=0.9),
    "of torch": lambda: fs.from_torch(torch.optim.AdamW, lr=0.1),
    "clipped": lambda: fs.chain(fs.clip_by_global_norm(0.1), fs.ema(fs.adamw(0.1), 0.9)),
}


@pytest.mark.parametrize("mode", ("eager", "donated", "jitted", "jitted and donated"))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_are_pinned_after_updates_and_state_is_not(name, mode, waits):
    tx = OPTIMIZERS[name]()
    state = make_state(tx)
    assert are_pinned(state.params) == [True, True]

    def step(state, grads):
        return fs.update(tx, state, grads, donate=mode == "donated"), grads["w"].local.sum()

    if mode.startswith("jitted"):
        step = fs.jit(step, donate_argnums=0 if "donated" in mode else ())
    for _ in range(3):
        before = [leaf.data_ptr() for leaf in fs.tree_leaves(state.params)]
        may_write = mode == "jitted and donated" or (mode == "donated" and tx.update_donated is not None)
        in_place = mode == "jitted and donated" or (mode == "donated" and name == "of torch")
        state, _ = step(state, gradients_like(state))
        assert are_pinned(state.params) == [True, True]
        assert not any(are_pinned(state.opt_state))
        assert ([leaf.data_ptr() for leaf in fs.tree_leaves(state.params)] == before) == in_place
        # What writes there lets gathers read first that have been started before.
        assert waits == [torch.device("meta")] * may_write
        waits.clear()


def test_parameters_are_pinned_after_a_restore(tmp_path):
    tx = fs.adamw(0.1)
    state = make_state(tx)
    fs.checkpoint.save(tmp_path, state).wait()
    restored = fs.checkpoint.restore(tmp_path, state)
    assert are_pinned(restored.params) == [True, True]
    assert not any(are_pinned(restored.opt_state))
    blank = fs.tree_map(lambda leaf: leaf.to("meta"), state)
    assert are_pinned(fs.checkpoint.restore(tmp_path, blank).params) == [True, True]


def test_copies_of_a_graph_end_before_the_next_operator():
    """The next one may write to the leaf, and a graph has no wait in between."""
    state = make_state(fs.sgd(0.1))
    graph = fs.make_graph(lambda params: fs.gather(params)["w"] * 2)(state.params).module.graph
    copies = [node.kwargs for node in graph.nodes if "device" in node.kwargs]
    assert len(copies) == 1
    assert not copies[0].get("non_blocking", False)


def test_a_count_on_the_accelerator_divides_gradients_on_the_cpu():
    with FakeTensorMode():
        gradient = torch.ones(2)
        count = torch.tensor(2.0, device="cuda")
        assert divide(gradient, count).is_cpu
        divide_in_place([gradient], count)


class Device:
    """The streams of a device that is not the current one: an event that nothing else waits for than it is told to."""

    device = torch.device("cuda:1")

    def __init__(self):
        self.waiting = []

    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass

    def record_event(self):
        return self

    def wait(self, stream=None):
        self.waiting.append(stream)


def test_the_device_that_computes_waits_for_copies_also_if_it_is_not_the_current_one(monkeypatch):
    copies = Device()
    monkeypatch.setattr(fs.comm, "copy_stream", lambda _: copies)
    monkeypatch.setattr(fs.comm, "keep_for_current", lambda *_: None)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device=None: ("current", device))
    fs.gather(make_state(fs.sgd(0.1)).params)
    assert copies.waiting == [("current", Device.device)]
