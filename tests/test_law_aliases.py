"""Law 9: what a program keeps of a state has its bits however the state is donated later."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fshard as fs
from tests.ranks import on_ranks
from tests.trees import Meshes, assert_same_bits, meshes, normal

STEPS = 3

STRATEGIES: dict[str, Callable[[Meshes], Any]] = {
    "ddp": lambda on: fs.ddp(on.line),
    "zero1": lambda on: fs.zero1(on.line),
    "zero2": lambda on: fs.zero2(on.line),
    "zero3": lambda on: fs.zero3(on.line),
    "zero3 of every leaf": lambda on: fs.zero3(on.line, min_shard_elements=0),
    "hsdp": lambda on: fs.hsdp(on.grid),
}
OPTIMIZERS = {
    "AdamW": lambda: fs.from_torch(torch.optim.AdamW, lr=0.1),
    "AdamW fused": lambda: fs.from_torch(torch.optim.AdamW, lr=0.1, fused=True),
    "SGD, clipped": lambda: fs.chain(fs.clip_by_global_norm(0.1), fs.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)),
    "ema": lambda: fs.ema(fs.from_torch(torch.optim.AdamW, lr=0.1), decay=0.5),
    "accumulated": lambda: fs.every_k(fs.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9), 2),
    "by names": lambda: fs.partition(
        {"w": fs.from_torch(torch.optim.AdamW, lr=0.1), "*": fs.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)}
    ),
    "fshard's own": lambda: fs.adam(0.1),
}


def started(strategy: str, optimizer: str) -> tuple[fs.Optimizer, fs.TrainState]:
    full = {"w": normal()(6, 4), "b": normal(1)(4), "frozen": normal(2)(3), "scalar": normal(3)()}
    params = fs.shard(full, STRATEGIES[strategy](meshes()), frozen=lambda path: "frozen" in path and optimizer != "ema")
    tx = OPTIMIZERS[optimizer]()
    return tx, fs.TrainState.create(params, tx)


def loss(params: Any, teacher: Any, x: torch.Tensor) -> torch.Tensor:
    full = fs.gather(params)
    student, target = (torch.tanh(x @ w["w"] + w["b"]) * w["scalar"] + w["frozen"].sum() for w in (full, teacher))
    return (student - target).square().sum()


def step_of(tx: fs.Optimizer, donate: bool) -> Callable[..., Any]:
    def step(state: fs.TrainState, teacher: Any, x: torch.Tensor) -> Any:
        value, grads = fs.value_and_grad(loss)(state.params, teacher, x)
        return fs.update(tx, state, grads, donate=donate), value

    return step


def kept_of(state: fs.TrainState) -> Any:
    """All that a program could keep: values that were gathered, and views of them."""
    gathered = fs.gather(state.params)
    # Leaves that are plain tensors are the state itself.
    slots = [leaf for leaf in fs.tree_leaves(fs.unshard(state.opt_state)) if leaf.dim()]
    return gathered, fs.unshard(state.params), slots, {"row": gathered["w"][0], "conjugate": gathered["b"].conj()}


def trained(strategy: str, optimizer: str, form: str) -> Any:
    """Train towards a snapshot of the parameters, another one kept in the middle; what was kept, before and after."""
    tx, state = started(strategy, optimizer)
    step = step_of(tx, donate=form == "donated")
    if form == "jitted, donated":
        step = fs.jit(step, donate_argnums=0)
    x, kept, copies, values = normal(7 + torch.distributed.get_rank())(5, 6), [], [], []
    teacher = None
    for n in range(STEPS):
        if n in (0, 2):
            kept.append(kept_of(state))
            copies.append(fs.tree_map(torch.clone, kept[-1]))
            teacher = kept[-1][0]
        state, value = step(state, teacher, x)
        values.append(value)
    for found, expected in zip(kept, copies):
        assert_same_bits(fs.tree_leaves(found), fs.tree_leaves(expected))
    return fs.unshard(state), values


ROWS = [
    *((form, "AdamW", strategy) for form in ("donated", "jitted, donated") for strategy in STRATEGIES),
    *((form, name, "ddp") for form in ("donated", "jitted, donated") for name in OPTIMIZERS if name != "AdamW"),
]


@pytest.mark.rows(1)
@pytest.mark.parametrize("form, optimizer, strategy", ROWS)
@on_ranks(2)
def test_what_was_kept_has_its_bits_after_donated_steps(form, optimizer, strategy):
    # Compared with a program that donates nothing.
    found, expected = (trained(strategy, optimizer, how) for how in (form, "kept"))
    assert_same_bits(fs.tree_leaves(found), fs.tree_leaves(expected))


def places(state: fs.TrainState) -> list[int]:
    return [tensor.data_ptr() for tensor in fs.tree_leaves((state.params, state.opt_state.slots)) if tensor.dim()]


@pytest.mark.rows(1)
@pytest.mark.parametrize("form", ("donated", "jitted, donated"))
@on_ranks(2, 1)
def test_a_state_that_nobody_shares_stays_where_it_is(form):
    """A copy is made once, while somebody shares it, and of no other leaf under jit."""
    for strategy in ("ddp", "zero3"):
        tx, state = started(strategy, "AdamW")
        step = step_of(tx, donate=form == "donated")
        if form == "jitted, donated":
            step = fs.jit(step, donate_argnums=0)
        x, teacher = normal(7)(5, 6), fs.tree_map(torch.clone, fs.gather(state.params))
        where = places(state)
        for _ in range(STEPS):
            state, _ = step(state, teacher, x)
            assert places(state) == where
        kept = fs.gather({"w": state.params["w"]})
        before, bits = kept["w"].clone(), places(state)
        for n in range(STEPS):
            state, _ = step(state, teacher, x)
            moved = sum(a != b for a, b in zip(places(state), where))
            assert moved == (kept["w"].data_ptr() in bits), n
        assert kept["w"].equal(before)
        where = places(state)
        del kept
        state, _ = step(state, teacher, x)
        assert places(state) == where


@on_ranks(1)
def test_a_donated_state_s_tensors_are_given_up_under_jit_though_they_were_copied():
    tx, state = started("ddp", "AdamW")
    step = fs.jit(step_of(tx, donate=False), donate_argnums=0)
    teacher = fs.gather(state.params)
    step(state, teacher, normal(7)(5, 6))
    with pytest.raises(ValueError, match="arguments were donated"):
        fs.gather(state.params)


@on_ranks(2)
def test_restoring_into_a_donated_state_leaves_what_was_kept(tmp_path):
    _, state = started("ddp", "AdamW")
    fs.checkpoint.save(tmp_path, state, step=0)
    other = fs.tree_map(lambda leaf: leaf + 1, state)
    kept = fs.gather(other.params)
    copy = fs.tree_map(torch.clone, kept)
    restored = fs.checkpoint.restore(tmp_path, other, donate=True)
    assert_same_bits(kept, copy)
    assert_same_bits(fs.tree_leaves(restored), fs.tree_leaves(state))


KEPT = {
    "alone": lambda full, kept: kept,
    "beside its successor": lambda full, kept: fs.tree_map(torch.mul, full, kept),
    "after some maths": lambda full, kept: fs.tree_map(lambda a, b: a + 2 * b.sin(), full, kept),
}


@pytest.mark.parametrize("name", KEPT)
@on_ranks(1, 2)
def test_full_tensors_of_a_call_now_over_are_refused_and_detached_ones_are_constants(name):
    x, seen = normal(7)(5, 6), []

    def first(params):
        seen.append(fs.gather(params))
        return (x @ seen[-1]["w"] + seen[-1]["b"]).square().sum()

    def second(params, kept):
        full = KEPT[name](fs.gather(params), kept)
        return (x @ full["w"] + full["b"]).square().sum()

    for strategy in STRATEGIES.values():
        params = fs.shard({"w": normal()(6, 4), "b": normal(1)(4)}, strategy(meshes()))
        fs.value_and_grad(first)(params)
        with pytest.raises(ValueError, match="full tensors of a call now over") as refusal:
            fs.value_and_grad(second)(params, seen[-1])
        assert "['w']: " in str(refusal.value) or "['b']: " in str(refusal.value)
        assert "full.detach()" in str(refusal.value)
        constants = fs.tree_map(torch.Tensor.detach, seen[-1])
        value, grads = fs.value_and_grad(second)(params, constants)
        expected = second(fs.unshard(params), constants) * value.new_tensor(1.0)
        assert torch.allclose(value, expected, rtol=1e-12)
        # A parameter that the loss does not use has no gradient.
        assert (grads["w"] is None) == (name == "alone")


@on_ranks(1, 2)
def test_saved_tensors_of_a_call_now_over_are_refused():
    kept = []

    def loss(params):
        h = torch.tanh(normal(7)(5, 6) @ fs.gather(params["w"]))
        kept.append((h @ fs.gather(params["v"])).sum())
        return h.square().sum()

    full = {name: normal(i)(6, 6) for i, name in enumerate("vw")}
    params = fs.shard(full, fs.zero3(meshes().line, min_shard_elements=0))
    fs.value_and_grad(loss)(params)
    with pytest.raises(ValueError, match="full tensors of a call now over") as refusal:
        kept[0].backward()
    assert "['v']: " in str(refusal.value)
    return str(refusal.value)
