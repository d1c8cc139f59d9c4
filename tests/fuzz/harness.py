"""What every generated program ends with: plain torch, torch DDP and fshard, and their comparison.

The text below the line of dashes is part of each program, which defines the names that it reads. So that a program can
be pasted, it uses nothing but torch and fshard.
"""

# ruff: noqa: F821
# mypy: ignore-errors

import re
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

import fshard as fs
from fshard.testing import spmd

# ----------------------------------------------------------------------------------------------------------------------


def local(run, data, r, t):
    """This rank's loss of one microbatch: (loss, count)."""
    x, y = data
    rows = (run(x, r, t) - y).to(STORED).square().sum(-1)
    return (rows.mean() if REDUCE == "mean" else rows.sum()), torch.tensor(len(x))


def dense():
    """Every step by plain torch: each rank's microbatches one by one, with gradients summed and divided."""
    values = initial()
    trained = {name: nn.Parameter(values[name]) for name in values if name not in FROZEN}
    optimizer, history = dense_optimizer(list(trained.values())), []
    for t in range(STEPS):
        total, counts, sums = 0, 0, {}
        for r in range(WORLD):
            for data in batches(r, t):
                run, leaves = fresh(values | trained)
                value, count = local(run, data, r, t)
                if value.requires_grad:
                    value.backward()
                total, counts = total + value.detach(), counts + count
                for name, leaf in leaves.items():
                    if leaf.grad is not None:
                        sums[name] = sums.get(name, 0) + leaf.grad.to(REDUCED or leaf.dtype)
        divisor = {"mean": JOB, "sum": 1, "weighted": counts}[REDUCE]
        for name, leaf in trained.items():
            leaf.grad = (sums[name] / divisor).to(leaf.dtype) if name in sums else None
        grads = {name: trained[name].grad if name in trained else None for name in values}
        history.append({"loss": (total / divisor).to(STORED), "grads": copied(grads)})
        if CLIP:
            torch.nn.utils.clip_grad_norm_(list(trained.values()), CLIP)
        optimizer.step()
        history[-1]["params"] = copied(values | trained)
        if EVALUATE:
            with torch.no_grad():
                history[-1]["out"] = [fresh(values | trained)[0](batches(r, t)[0][0], r, t) for r in range(WORLD)]
    return history


def torch_ddp():
    """Every step by torch DDP, on a rank that is a process."""
    module, r, history = build(), dist.get_rank(), []
    ddp = nn.parallel.DistributedDataParallel(module, find_unused_parameters=SOME_UNUSED)
    trained = [leaf for leaf in module.parameters() if leaf.requires_grad]
    optimizer = dense_optimizer(trained)
    for t in range(STEPS):
        optimizer.zero_grad()
        value, _ = local(ddp, batches(r, t)[0], r, t)
        value.backward()
        value = value.detach().clone()
        dist.all_reduce(value)
        grads = {name: leaf.grad for name, leaf in module.named_parameters()}
        history.append({"loss": value / WORLD, "grads": copied(grads)})
        if CLIP:
            torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        history[-1]["params"] = copied(dict(module.named_parameters()))
    return history


def of_rank(strategy, jitted):
    """Every step by fshard; the text of the error where it raises one."""
    try:
        return steps_of_rank(strategy, jitted)
    except Exception as error:
        if isinstance(error, AssertionError):
            raise
        return f"{type(error).__name__}: {error}"


def steps_of_rank(strategy, jitted):
    mesh = fs.init_mesh(MESHES.get(strategy, {"shard": -1}), device="cpu")
    r, tx, history = dist.get_rank(), optimizer(), []
    run, params = sharded(STRATEGIES[strategy](mesh))
    state = fs.TrainState.create(params, tx)

    def loss_fn(params, data, t):
        value, count = local(partial(run, params), data, r, t)
        return (value, count) if REDUCE == "weighted" else value

    def step(state, data, t):
        if MICRO > 1:
            gradient = fs.accumulate(loss_fn, reduce=REDUCE, communicate=COMMUNICATE, **SUMS)
        else:
            gradient, (data,) = fs.value_and_grad(loss_fn, reduce=REDUCE), data
        loss, grads = gradient(state.params, data, t)
        return fs.update(tx, state, grads, donate=DONATE and not jitted), loss, grads

    run_step = fs.jit(step, donate_argnums=0 if DONATE else (), static_argnums=2) if jitted else step
    for t in range(STEPS):
        before = copied(fs.unshard(state.params))
        if t == BREAKS and not jitted:
            try:
                step(state, batches(r, t), t + 100)
            except Exception:
                # The rank that raised has broken the groups of all; the state before serves the new ones.
                fs.init_mesh(MESHES.get(strategy, {"shard": -1}), device="cpu")
                assert same(fs.unshard(state.params), before), f"step {t} failed, and the state is not whole"
            else:
                raise AssertionError(f"step {t} returned on rank {r} although rank {BREAKING} raised")
        if AGAIN and not DONATE:
            _, loss, grads = run_step(state, batches(r, t), t if LATE else 0)
            again = {"loss": loss.clone(), "grads": copied(fs.unshard(grads))}
            assert same(fs.unshard(state.params), before), f"step {t} changed its state"
        state, loss, grads = run_step(state, batches(r, t), t if LATE else 0)
        found = {"loss": loss.detach().clone(), "grads": copied(fs.unshard(grads))}
        if AGAIN and not DONATE:
            assert same(again, found), f"step {t} from the same state gave other bits"
        found["params"] = copied(fs.unshard(state.params))
        if EVALUATE:
            with torch.no_grad() if EVALUATE == "no_grad" else torch.inference_mode():
                found["out"] = run(state.params, batches(r, t)[0][0], r, t).clone()
        history.append(found)
    return history


def copied(tree):
    """Flat, by names joined with dots, and detached."""
    if not any(isinstance(value, dict) for value in tree.values()):
        return {name: None if leaf is None else leaf.detach().clone() for name, leaf in tree.items()}
    return {f"{part}.{name}": leaf for part, leaves in tree.items() for name, leaf in copied(leaves).items()}


def same(a, b):
    """Whether two trees have the same bits."""
    a, b = dict(flat_items(a)), dict(flat_items(b))
    return a.keys() == b.keys() and all(
        a[name] is b[name] if a[name] is None or b[name] is None else torch.equal(a[name], b[name]) for name in a
    )


def flat_items(tree, path=""):
    for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if isinstance(value, dict | list):
            yield from flat_items(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def differences(found, expected):
    """Lines that name what differs by more than rounding."""
    eps = torch.finfo(ROUNDED).eps
    for t, (a, b) in enumerate(zip(found, expected, strict=True)):
        a, b = dict(flat_items(a)), dict(flat_items(b))
        if a.keys() != b.keys():
            yield f"step {t}: {sorted(a.keys() ^ b.keys())} on one side only"
            return
        sizes = [float(leaf.abs().max()) for leaf in b.values() if leaf is not None and leaf.numel()]
        bound = OPERATIONS * (t + 1) * eps * max(1.0, *sizes)
        for name, x in a.items():
            y = b[name]
            if x is None and y is None:
                continue
            if x is None or y is None or (x.shape, x.dtype) != (y.shape, y.dtype):
                yield f"step {t}: {name} is {describe(x)}, expected {describe(y)}"
            elif x.numel() and (gap := (x - y).abs().nan_to_num(torch.inf).max()) > bound:
                yield f"step {t}: {name} differs by {float(gap):.3g}, expected {describe(y)}"


def describe(leaf):
    if leaf is None or not leaf.numel():
        return "None" if leaf is None else "empty"
    return f"{leaf.dtype}{list(leaf.shape)} up to {float(leaf.abs().max()):.3g}"


def check(strategy, expected, jitted=False):
    """Run a strategy; returns what every rank found, or None where all refuse as they may."""
    what = f"{strategy}{', jitted' * jitted}, {WORLD} ranks"
    ranks = spmd(partial(of_rank, strategy, jitted), WORLD, timeout=TIMEOUT)
    refused = {r: found for r, found in enumerate(ranks) if isinstance(found, str)}
    if refused:
        assert len(refused) == WORLD, f"{what}: only ranks {sorted(refused)} refuse: {refused}"
        unknown = [text for text in refused.values() if not any(re.search(p, text) for p in REFUSALS)]
        assert not unknown, f"{what}: an error that no feature of the program allows: {unknown[0]}"
        return None
    outputs = [[step.pop("out") for step in history] for history in ranks] if EVALUATE else None
    for r, history in enumerate(ranks):
        assert same(history, ranks[0]), f"{what}: rank {r} has other bits than rank 0"
    if EVALUATE:
        for t, step in enumerate(ranks[0]):
            step["out"] = [outputs[r][t] for r in range(WORLD)]
    lines = list(differences(ranks[0], expected))
    assert not lines, "\n  ".join([f"{what}: wrong numbers without an error", *lines[:6]])
    return ranks[0]


def main(workers=None):
    """Compare; returns how many runs there were and the names of those that were refused."""
    expected, refused, runs = dense(), [], 0
    for strategy in STRATEGIES:
        eager = check(strategy, expected)
        runs, refused = runs + 1, refused + [strategy] * (eager is None)
        if strategy in JITTED:
            jitted = check(strategy, expected, jitted=True)
            runs, refused = runs + 1, refused + [f"{strategy}, jitted"] * (jitted is None)
            if eager and jitted:
                assert same(eager, jitted), f"{strategy}: the jitted step has other bits than the eager one"
    if TORCH_DDP and workers is not None:
        for history in spmd(torch_ddp, workers):
            lines = list(differences(history, [{k: v for k, v in step.items() if k != "out"} for step in expected]))
            assert not lines, "\n  ".join(["torch DDP differs from the oracle", *lines[:6]])
    return runs, refused
