"""A jitted step captured as a CUDA graph."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import fshard as fs
from stages import Findings, Place, copied, is_equal, reported

REPLAYS = 5
State = fs.TrainState
Step = Callable[[State], State]


def capture(place: Place) -> Findings:
    """Five replays against five steps, with counts on the device; counts on the processor are refused by name."""
    with reported(f"{REPLAYS} replays") as row:
        state, run = prepared(place, capturable=True)
        state = warm(place, state, run)
        expected = copied(state)
        places = places_of(expected)
        for _ in range(REPLAYS):
            expected = run(expected)
        # A replay reads what the one before has written only if that lies where it was.
        row["leaves that stay in place"] = places == places_of(expected)
        latest, replay = captured(place, state, run)
        for _ in range(REPLAYS):
            replay()
        torch.accelerator.synchronize()
        row["equal parameters"] = is_equal(latest().params, expected.params)
        row["equal states"] = is_equal(latest(), expected)
        row["passed"] = row["equal parameters"] and row["equal states"] and row["leaves that stay in place"]
    yield row
    with reported("counts on the processor") as row:
        state, run = prepared(place)
        state = warm(place, state, run)
        row |= refusal(place, state, run)
    yield row


def prepared(place: Place, **options: Any) -> tuple[State, Step]:
    """Make a state and a jitted step that donates it; counts are on the device where AdamW is `capturable`."""
    mesh = fs.init_mesh({"shard": -1}, device=place.device)
    torch.manual_seed(0)
    module = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]).to(place.device)
    model = fs.functionalize(module, units=torch.nn.Linear)
    tx = fs.chain(fs.clip_by_global_norm(1.0), fs.from_torch(torch.optim.AdamW, lr=1e-2, **options))
    x = torch.linspace(-1, 1, 8 * 64).reshape(8, 64).to(place.device)

    def train_step(state: State) -> State:
        _, grads = fs.value_and_grad(lambda params: model.apply(params, x).square().mean())(state.params)
        return fs.update(tx, state, grads)

    state = State.create(model.init(fs.zero3(mesh)), tx)
    if options:
        state = counts_on(place.device, state)
    return state, fs.jit(train_step, donate_argnums=0)


def places_of(state: State) -> list[int]:
    """Where in memory the tensors of a state begin."""
    return [leaf.data_ptr() for leaf in fs.tree_leaves(state) if isinstance(leaf, torch.Tensor)]


def counts_on(device: str, state: State) -> State:
    """Move the counts of a state to a device."""

    def move(leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, torch.Tensor) and leaf.dim() == 0 else leaf

    return fs.tree_map(move, state)


def warm(place: Place, state: State, run: Step) -> State:
    """Take steps on a stream beside, as a capture asks for: the first one traces, which a capture cannot."""
    side = torch.Stream(place.device)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        for _ in range(3):
            state = run(state)
    torch.accelerator.current_stream().wait_stream(side)
    torch.accelerator.synchronize()
    return state


def captured(place: Place, state: State, run: Step) -> tuple[Callable[[], State], Callable[[], None]]:
    """Capture a step; return what gives the state that it writes, and what runs it. A rehearsal only runs it."""
    states = [state]
    if place.is_rehearsal:
        return partial(states.__getitem__, 0), lambda: states.__setitem__(0, run(states[0]))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        states[0] = run(state)
    return partial(states.__getitem__, 0), graph.replay


def refusal(place: Place, state: State, run: Step) -> dict[str, Any]:
    """Capture a step whose counts lie on the processor: the error must name one of them."""
    if place.is_rehearsal:
        # The device has no graphs, but can say that it records one.
        torch.get_device_module(place.device).is_capturing = True
    try:
        _, replay = captured(place, state, run)
        replay()
    except ValueError as error:
        return {"passed": "captured" in str(error) and "step" in str(error), "refused": str(error)}
    return {"passed": False, "refused": None}
